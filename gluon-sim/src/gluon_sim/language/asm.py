"""Inline assembly: from tensors to the registers of a text and back.

PTX is run by `ptx`. A text that it cannot read needs a meaning in Python (`register`); a text with
neither raises, so a kernel never runs with an instruction silently dropped.

With `pack` n a text gets n registers of a thread at a time. Which elements those are follows from
the layout, one of wgmma's accumulators or a linear one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gluon_sim.errors import Unsupported
from gluon_sim.language import ptx
from gluon_sim.machine.context import current
from gluon_sim.values.dtypes import Array, DType
from gluon_sim.values.tensors import Pointer, Tensor, scalar

Meaning = Callable[[re.Match[str], Sequence[Any]], Any]

_MEANINGS: dict[re.Pattern[str], Meaning] = {}
_WIDTHS = {"h": 2, "r": 4, "f": 4, "l": 8}  # bytes of a register, by its constraint
# A kernel says that wgmma sees the copies it waited for, by the hardware and not by a fence.
_TRUSTED = "copies that have arrived are seen by wgmma"

QUIET_NAN = 0x7FC00000


def register(pattern: str, meaning: Meaning) -> None:
    """Teach the simulator a text, all of which (with its whitespace squeezed) `pattern` matches.

    `meaning(match, operands)` gets numbers and NumPy arrays and returns the result, or a tuple.
    """
    _MEANINGS[re.compile(pattern)] = meaning


def inline_asm_elementwise(
    asm: str,
    constraints: str,
    args: Sequence[Any],
    dtype: DType | Sequence[DType],
    is_pure: bool,
    pack: Any,
) -> Any:
    """What the text does to the operands: a tensor per type in `dtype`."""
    types = list(dtype) if isinstance(dtype, Sequence) else [dtype]
    squeezed, plain, trusts_copies = _read(asm)
    made = _by_meaning(squeezed, args, types)
    if made is None:
        if trusts_copies:
            current().clock.trust_copies()
        program = ptx.parse(plain)
        sizes = [8 if isinstance(a, Pointer) else scalar(a).dtype.itemsize for a in args]
        _check_constraints(constraints, tuple(t.itemsize for t in types), tuple(sizes), int(pack))
        made = (_packed if pack > 1 else _one_by_one)(program, list(args), types, int(pack))
    return made[0] if isinstance(dtype, DType) else tuple(made)


@functools.cache
def _read(asm: str) -> tuple[str, str, bool]:
    """A text with its whitespace squeezed, without its comments, and whether one of them says that
    copies are seen."""
    comments = [comment.strip() for comment in re.findall("//(.*)", asm)]
    return " ".join(asm.split()), re.sub("//.*", "", asm), _TRUSTED in comments


def _by_meaning(text: str, args: Sequence[Any], types: list[DType]) -> list[Tensor] | None:
    """The results of a registered text; None if this is none."""
    for pattern, meaning in _MEANINGS.items():
        if match := pattern.fullmatch(text):
            operands = [scalar(a) for a in args]
            like = next((a for a in operands if a.shape), scalar(0))
            found = meaning(match, [a.value for a in operands])
            made = zip(found if isinstance(found, tuple) else (found,), types, strict=True)
            return [Tensor(scalar(x, t).data, t, like.split, like.layout) for x, t in made]
    return None


@functools.cache
def _check_constraints(
    constraints: str, results: tuple[int, ...], operands: tuple[int, ...], pack: int
) -> None:
    """One register per value, as wide as the value in bytes: results first, then operands."""
    sizes = [*results, *operands]
    wanted = [size for size in sizes for _ in range(pack)]
    given = [c.strip() for c in constraints.split(",") if not c.strip().startswith("~")]
    widths = [_WIDTHS.get(c.lstrip("=")) for c in given]
    outputs = [c.startswith("=") for c in given]
    if widths != wanted or outputs != [i < len(results) * pack for i in range(len(given))]:
        raise ValueError(f"constraints {constraints!r} do not fit values of {sizes} bytes")


def _bits(x: Tensor) -> Array:
    raw = np.ascontiguousarray(x.dtype.encode(np.asarray(x.value)))
    return raw.view(f"u{x.dtype.itemsize}").reshape(np.shape(x.value))


def _tensor(bits: Array, dtype: DType, like: Tensor | None) -> Tensor:
    if bits.itemsize != dtype.itemsize:
        raise ValueError(f"inline assembly leaves {8 * bits.itemsize} bits for a result of {dtype}")
    values = dtype.decode(np.ascontiguousarray(bits).reshape(bits.shape).view(dtype.storage))
    split, layout = (like.split, like.layout) if like is not None else (None, None)
    return Tensor(values if np.ndim(values) else values[()], dtype, split, layout)


def _one_by_one(
    program: ptx.Program, args: list[Any], types: list[DType], pack: int
) -> list[Tensor]:
    """Every element by itself; numbers, which all threads have alike, by every lane."""
    tensors = [a if isinstance(a, Pointer) else scalar(a) for a in args]
    like = next((a for a in tensors if isinstance(a, Tensor) and a.shape), None)
    shape = np.broadcast_shapes(*(np.shape(a.data) for a in tensors if isinstance(a, Tensor)))
    lanes = program.across_lanes and not shape
    if lanes:
        shape = (current().num_warps, ptx.WARP)
    first = len(types)
    inputs = {
        f"${first + i}": a if isinstance(a, Pointer) else np.array(np.broadcast_to(_bits(a), shape))
        for i, a in enumerate(tensors)
    }
    threads = ptx.Threads(shape, lanes, inputs)
    threads.run(program)
    results = [threads.result(f"${i}") for i in range(first)]
    if lanes:
        if any((r != r.flat[0]).any() for r in results):
            raise ValueError("inline assembly gives the threads of a partition different numbers")
        results = [r[0, 0] for r in results]
    return [_tensor(np.asarray(r), t, like) for r, t in zip(results, types, strict=True)]


def _packed(program: ptx.Program, args: list[Any], types: list[DType], pack: int) -> list[Tensor]:
    """`pack` registers of a thread at a time, 32 bits each.

    A thread that holds fewer gives the text registers with no meaning, which NaN stands for, and
    what the text makes of them is dropped.
    """
    first: Tensor = args[0]
    if any(t.itemsize != 4 for t in [*types, *(a.dtype for a in args)]):
        raise Unsupported("the simulator packs values of 32 bits only")
    places = registers_of(first.layout, first.shape)
    used = min(pack, places[0].shape[2])
    # By axis of the tensor: [groups, used, warps, lanes].
    at = tuple(p.reshape(*p.shape[:2], -1, used).transpose(2, 3, 0, 1) for p in places)
    inputs = {}
    for i, x in enumerate(args):
        held = _bits(x)[at]
        for j in range(pack):
            real = held[:, j] if j < used else np.full_like(held[:, 0], QUIET_NAN)
            inputs[f"${(len(types) + i) * pack + j}"] = real
    threads = ptx.Threads((at[0].shape[0], *at[0].shape[2:]), True, inputs)
    threads.run(program)
    made = []
    for i, dtype in enumerate(types):
        out = np.empty(first.shape, np.uint32)
        for j in range(used):
            out[tuple(axis[:, j] for axis in at)] = threads.result(f"${i * pack + j}")
        made.append(_tensor(out, dtype, first))
    return made


def registers_of(layout: Any, shape: Sequence[int]) -> tuple[Array, ...]:
    """The element in every register, by axis of the tensor: [warps, lanes, registers]."""
    if type(layout).__name__ != "DistributedLinearLayout":
        return accumulator_registers(layout, shape)
    kinds = (layout.warp_bases, layout.lane_bases, layout.reg_bases)
    sizes = [1 << len(bases) for bases in kinds]
    places = np.zeros((len(shape), *sizes), np.int64)
    for number, bases in zip(np.indices(sizes), kinds, strict=True):
        for bit, basis in enumerate(bases):
            step = np.array([int(x) for x in basis]).reshape(-1, 1, 1, 1)
            places += step * (number >> bit & 1)
    return tuple(places)


def accumulator_registers(layout: Any, shape: Sequence[int]) -> tuple[Array, Array]:
    """Row and column of every register of wgmma's accumulator, [warps, lanes, registers].

    A warp holds 16 rows, a quad of lanes two of them: registers 0, 1 are neighbors in the upper
    row, 2, 3 in the lower, 4 … continue 8 columns further.
    """
    known = getattr(layout, "version", None) is not None and list(layout.version) == [3, 0]
    if not known or list(layout.warps_per_cta) != [4, 1] or len(shape) != 2 or shape[0] != 64:
        raise Unsupported("packed inline assembly on a layout other than 64 rows of wgmma's")
    warp, lane, register = np.ogrid[:4, : ptx.WARP, : shape[1] // 2]
    rows = 16 * warp + lane // 4 + 8 * (register >> 1 & 1)
    columns = 0 * warp + 2 * (lane % 4) + (register & 1) + 8 * (register >> 2)
    return np.broadcast_arrays(rows, columns)  # type: ignore[return-value]


register(r"s_mov_b32 \$0, (?P<n>-?\d+)", lambda match, _: int(match["n"]))  # CDNA4
register(r"; \$0 is needed here", lambda match, operands: operands[0])  # a comment on CDNA4
