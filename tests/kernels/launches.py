"""What calls of every kind launch, kept in launches.json: one line for each.

    python tests/kernels/launches.py           which lines no longer hold
    python tests/kernels/launches.py --write   after a change of plans or launchers that is meant
    python tests/kernels/launches.py --show "h200 latent 512+64, bf16 pages, 128 heads, 100 tokens"

Plans and launchers decide numbers that no small case shows: programs, ranges and workspaces of long
requests, strides of tensors that are far larger than what a simulator runs. Here they are made for
problems of real sizes, on the device "meta", and nothing is launched. A line has the family, the
kernels with their numbers of programs, and a hash of all their arguments: constants, integers, and
of every tensor which operand it is or that it is memory of the launch's own, its shape, strides and
offset. Operands of every other line lie with gaps of their own between rows, heads and pages, so
that every stride is told from every other.

Read the file's diff when a plan or a launcher changes, as that of tests/compiled: a line that
should not have changed is a defect.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import triton
from torch import Tensor

from openmla.aot.operands import operands_of
from openmla.arithmetic import round_up
from openmla.backward.problem import BackwardProblem
from openmla.errors import InvalidArgument, Unsupported
from openmla.explain.support import FEATURES
from openmla.kernels.call import Call
from openmla.kernels.launch import calls
from openmla.planning import NEWEST_TRITON, cached_plan, target_by_name
from openmla.planning.problems import AnyProblem
from openmla.problem import Problem

FILE = Path(__file__).with_name("launches.json")
TARGETS = ("h200", "b200", "mi355x", "a100")
SIZES = ((16, 1), (128, 100), (128, 8192))
"""Heads and queries."""
DRAWN = (5, 15)
"""Variants of every feature, and of gradients: several of these have options that no family of a
chip's own serves together."""
FLAGS = (
    "has_sink",
    "has_topk_lengths",
    "wants_lse",
    "wants_max_logits",
    "wants_counts",
    "add_starts",
    "keeps",
    "has_d_lse",
    "wants_gradients",
)
MOST_QUERIES, MOST_KEYS = 2**15, 2**22
GAP = 64
"""Elements: gaps are different multiples, so rows stay aligned for wide copies."""
LAUNCHED = ("hopper", "blackwell", "cdna4", "portable")
HASHED = 12


def problems() -> Iterator[tuple[str, AnyProblem]]:
    """Their names and themselves: every feature at a few sizes, and drawn ones."""
    for feature, problem in FEATURES.items():
        for heads, queries in SIZES:
            if heads % getattr(problem, "group", 1) == 0:
                name = f"{feature}, {heads} heads, {queries} tokens"
                yield name, dataclasses.replace(problem, heads=heads, total_q=queries)
    for feature, problem in FEATURES.items():
        for number in range(DRAWN[isinstance(problem, BackwardProblem)]):
            rng = random.Random(f"launches {feature} {number}")
            try:
                yield f"{feature}, drawn {number}", varied(problem, rng)
            except InvalidArgument:
                continue  # what is drawn must not fit together


def varied(problem: AnyProblem, rng: random.Random) -> AnyProblem:
    """Other sizes and options of a feature: lengths at powers of two and one beside them."""

    def near(most: int) -> int:
        power = 1 << rng.randrange(most.bit_length())
        return max(1, min(power + rng.choice((-1, 0, 1)), most))

    group = getattr(problem, "group", 1)
    drawn: dict[str, Any] = {
        "heads": group * rng.choice((1, 2, 3, 5, 8, 12, 16)) if group > 1 else near(128),
        "batch": near(300),
        "total_q": near(MOST_QUERIES),
        "total_k": near(MOST_KEYS),
        "width": 4 * near(2**18),
        "table_keys": near(2**17) * bool(getattr(problem, "table_keys", 0)),
        "topk": near(4096) * bool(getattr(problem, "topk", 0)),
        "page_size": rng.choice((1, 16, 48, 64, 256)) * bool(problem.page_size),
        "causal": rng.random() < 0.7 or bool(getattr(problem, "window", 0)),
    }
    drawn |= {flag: rng.random() < 0.4 for flag in FLAGS}
    if isinstance(problem, Problem) and problem.form != "sparse":
        drawn |= {"has_topk_lengths": False, "wants_max_logits": False}
    if isinstance(problem, BackwardProblem):
        drawn |= {"wants_lse": True, "wants_max_logits": False}
    if getattr(problem, "form", "") == "latent":  # its rows are those of whole pages
        drawn["total_k"] = round_up(drawn["total_k"], drawn["page_size"])
    own = {field.name for field in dataclasses.fields(problem)}
    return dataclasses.replace(problem, **{n: x for n, x in drawn.items() if n in own})


def apart(value: Any, gaps: Iterator[int]) -> Any:
    """Operands whose tensors on "meta" have gaps of their own between rows, heads and pages."""
    if isinstance(value, Tensor):
        if value.device.type != "meta" or value.dim() < 2 or value.stride(-1) != 1:
            return value
        strides, step = [1], value.shape[-1]
        for size in reversed(value.shape[:-1]):
            step = -(-step // GAP) * GAP + GAP * next(gaps)
            strides.insert(0, step)
            step *= max(size, 1)
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        moved = {name: apart(x, gaps) for name, x in found.items()}
        changed = {name: x for name, x in moved.items() if x is not found[name]}
        return dataclasses.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        parts = [apart(x, gaps) for x in value]
        same = all(x is y for x, y in zip(parts, value, strict=True))
        return value if same else type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of operands, with their places."""
    if isinstance(value, Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from tensors_of(part, f"{name}.{i}")


class Names:
    """Names of memory: what it is of the operands, or that it is a launch's own, in turn."""

    def __init__(self, operands: Any, results: Any) -> None:
        found = [*tensors_of(operands, "given"), *tensors_of(results, "results")]
        self._kept = found  # or another tensor could lie where one of these was
        self._names: dict[int, str] = {}
        for name, x in found:
            self._names.setdefault(storage(x), name)

    def of(self, x: Tensor) -> str:
        """A tensor: whose memory it is, and where and how it lies in it."""
        place = storage(x)
        if place not in self._names:
            self._names[place] = f"own {len(self._names)} of {x.untyped_storage().nbytes()} bytes"
            self._kept.append(("", x))
        dtype = str(x.dtype).removeprefix("torch.")
        layout = f"{list(x.shape)} {list(x.stride())} at {x.storage_offset()}"
        return f"{self._names[place]}: {dtype} {layout}"

    def text(self, value: Any) -> str:
        """Any argument of a launch."""
        if isinstance(value, Tensor):
            return self.of(value)
        if hasattr(value, "block_shape"):
            sizes = f"{list(value.shape)} {list(value.strides)} boxes {list(value.block_shape)}"
            layout = getattr(value, "layout", "")  # a plain Triton kernel's has none
            return f"descriptor of {self.of(value.base)}: {sizes} {layout!r}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(self.text, value))})"
        if hasattr(value, "fn"):
            return str(value.fn.__qualname__)
        return repr(value)


def storage(x: Tensor) -> int:
    """What tells the memory of tensors apart, on "meta" too."""
    return int(x.untyped_storage()._cdata)


def shown(launched: list[Call], names: Names) -> Iterator[str]:
    """All that launches are made with, a line for each argument."""
    for call in launched:
        yield f"{call.kernel.__name__} x {call.programs}"
        if call.sources:
            yield f"  sources {sorted(call.sources.items(), key=str)}"
        for name, value in sorted(call.arguments.items()):
            yield f"  {name} = {names.text(value)}"


def launched_by(
    problem: AnyProblem, target: str, gaps: bool
) -> tuple[str, list[Call], Names] | None:
    """The family and the launches of a problem's plan; None where nothing is launched."""
    try:
        plan = cached_plan(problem, target_by_name(target), "auto", NEWEST_TRITON)
        if plan.backend not in LAUNCHED:
            return None
        operands, results = operands_of(problem)
        if gaps:
            counted = iter(range(1, 1000))
            operands, results = apart(operands, counted), apart(results, counted)
        return plan.backend, list(calls(plan, operands, results)), Names(operands, results)
    except (InvalidArgument, Unsupported):
        return None  # formats of caches do not take all widths that are drawn


def lines(begin: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """The name, the line and all arguments of every call whose name begins so."""
    for target in TARGETS:
        for number, (name, problem) in enumerate(problems()):
            if not f"{target} {name}".startswith(begin):
                continue
            found = launched_by(problem, target, gaps=bool(number % 2))
            if found is not None:
                family, launched, names = found
                text = list(shown(launched, names))
                kernels = ", ".join(f"{c.kernel.__name__} x {c.programs}" for c in launched)
                digest = hashlib.sha256("\n".join(text).encode()).hexdigest()[:HASHED]
                yield f"{target} {name}", f"{family}: {kernels or 'nothing'}; {digest}", text


def version() -> str:
    """The version of Triton, whose layouts are among the arguments."""
    return ".".join(str(triton.__version__).split(".")[:2])


def kept() -> Mapping[str, str]:
    """The lines of the file, and the Triton that they were written with."""
    found: dict[str, str] = json.loads(FILE.read_text())
    return found


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines that are not as they were."""
    changed = [
        f"{name}\n  - {before.get(name, '')}\n  + {now.get(name, '')}"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    return changed


def present() -> dict[str, str]:
    """The lines as they are."""
    return {"Triton": version(), **{name: line for name, line, _ in lines()}}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="what calls of every kind launch")
    parser.add_argument("--write", action="store_true", help="keep what is launched now")
    parser.add_argument("--show", metavar="NAME", help="all arguments of one of the calls")
    options = parser.parse_args()
    if options.show:
        for name, line, text in lines(options.show):
            print("\n".join([name, line, *text]))
        return 0
    now = present()
    changed = differences(kept(), now) if FILE.exists() else []
    print("\n".join([*changed[:40], f"{len(changed)} of {len(now)} lines differ"]))
    if options.write:
        FILE.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
