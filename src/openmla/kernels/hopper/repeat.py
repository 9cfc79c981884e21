"""Launching a compiled kernel again, without Triton's argument binding.

Binding works out types, alignments and constexprs of every argument of every launch, and encodes
every descriptor anew: hundreds of microseconds for a kernel with six descriptors. All but addresses
and token counts is fixed once the kernel is compiled, so the arguments are kept as one flat list,
as Triton's launcher in C takes it, and only those are exchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.runtime import driver

from openmla.kernels.call import Call

MOST_ENCODED = 256
NO_NAN = 0  # what a bulk copy fills in outside the tensor: zeros
Launch = Callable[[int, int, list[Any]], None]


class Names(NamedTuple):
    """Which arguments of a kernel differ between launches, in the order in which `run` takes them.

    `described`: descriptors, and which of the tensors given to `run` each describes.
    """

    changing: tuple[str, ...]
    described: Mapping[str, int]


def hooked() -> bool:
    """Whether somebody, a profiler for one, wants to see every launch of Triton's."""
    runtime = knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def row_step(x: Tensor) -> tuple[int, int]:
    """(elements from a row to the next, elements from a row's first to just past its last)."""
    reach = sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.stride(0), reach + 1


def address(x: Tensor | None) -> int | None:
    """Where a tensor lies, if there is one."""
    return None if x is None else x.data_ptr()


def launcher(compiled: Any) -> Launch | None:
    """(programs, stream, flat arguments) -> a launch; None where this Triton has no such way."""
    outer = compiled.run
    wrapped = getattr(outer, "launch", None)
    raw = wrapped
    if inspect.isfunction(wrapped):  # around it: the encoding of descriptors
        raw = inspect.getclosurevars(wrapped).nonlocals.get("launcher")
    scratch = ("global_scratch_size", "profile_scratch_size")
    if raw is None or any(getattr(outer, name, 1) for name in scratch):
        return None
    function, packed = compiled.function, compiled.packed_metadata
    flags = (outer.launch_cooperative_grid, outer.launch_pdl)
    if hasattr(outer, "kernel_signature"):  # Triton 3.9
        kinds = (outer.arg_annotations, outer.kernel_signature)

        def launch_listed(programs: int, stream: int, flat: list[Any]) -> None:
            raw(programs, 1, 1, stream, function, *flags, packed, None, None, None, None, None,
                *kinds, tuple(flat))  # fmt: skip

        return launch_listed

    def launch(programs: int, stream: int, flat: list[Any]) -> None:
        raw(programs, 1, 1, stream, function, *flags, None, None, packed, None, None, None, *flat)

    return launch


def encoder() -> Callable[..., Any]:
    """What makes a descriptor, in C; Triton 3.9 has several kinds."""
    utils = driver.active.utils
    found: Callable[..., Any] = getattr(utils, "fill_tma_descriptor", None) or (
        utils.fill_tma_descriptor_tiled
    )
    return found


class Descriptor:
    """One descriptor argument: encoded for an address and a number of rows, and kept.

    An encoding is a function of these two alone, so what is kept never goes stale.
    """

    def __init__(self, place: int, tensor: int, value: Any, meta: Any) -> None:
        self.place, self.tensor = place, tensor
        self.stop = place + 1 + 2 * len(value.shape)
        kind = TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
        self._format = (meta["swizzle"], meta["elem_size"], kind, meta["block_size"])
        self._shape, self._strides = list(value.shape), list(value.strides)
        # The rows of a ragged descriptor (see descriptors.py) are not the tensor's.
        self._ragged = len(value.shape) == 5
        self._encoded: dict[tuple[int, int], list[Any]] = {}
        self._encoder = encoder()

    def encode(self, base: tuple[int, int]) -> list[Any]:
        """The flat arguments for (address, rows)."""
        found = self._encoded.get(base)
        if found is None:
            shape = self._shape if self._ragged else [base[1], *self._shape[1:]]
            encoded = self._encoder(base[0], *self._format, shape, self._strides, NO_NAN)
            found = [encoded, *shape, *self._strides]
            if len(self._encoded) >= MOST_ENCODED:
                self._encoded.clear()
            self._encoded[base] = found
        return found


class Repeat:
    """One compiled kernel, ready for other addresses and token counts."""

    def __init__(self, call: Call, compiled: Any, launch: Launch, names: Names) -> None:
        self._launch = launch
        self._flat: list[Any] = []
        self._changing: list[tuple[int, int]] = []
        self._descriptors: list[Descriptor] = []
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        for name in call.kernel.arg_names:
            value = call.arguments.get(name)
            place = len(self._flat)
            if hasattr(value, "block_shape"):
                tensor = names.described[name]
                self._descriptors.append(Descriptor(place, tensor, value, next(metas)))
                self._flat += [None] * (self._descriptors[-1].stop - place)
                continue
            if name in names.changing and value is not None:
                self._changing.append((place, names.changing.index(name)))
                value = None
            # Only what is compiled in may be left: a tensor here would keep its memory alive.
            assert not isinstance(value, Tensor), name
            self._flat.append(value)

    def run(
        self,
        programs: int,
        stream: int,
        changing: Sequence[int | None],
        bases: Sequence[tuple[int, int]],
    ) -> None:
        """Launch; `changing` and `bases`, (address, rows), in the order of the Names."""
        flat = self._flat.copy()
        for place, index in self._changing:
            flat[place] = changing[index]
        for descriptor in self._descriptors:
            flat[descriptor.place : descriptor.stop] = descriptor.encode(bases[descriptor.tensor])
        self._launch(programs, stream, flat)
