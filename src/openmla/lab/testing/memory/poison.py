"""Poisons: memory that a problem does not use must not matter, whatever it holds.

The same case is built on four backgrounds (zeros, NaN, +Inf, 0xFF bytes), which fill spare tokens,
gaps of strided views, unused pages and columns, table tails, rows that no index names and entries
past topk_lengths. All results must be equal bit for bit, inputs must be left as they were, and the
gaps of a strided `out` must not be written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory import BACKGROUNDS, Memory, fill

Implementation = Callable[[BuiltCase], Outcome]


def run_public(built: BuiltCase) -> Outcome:
    """The public call with its default backend."""
    return built.run()


def poison_problems(
    case: Case, run: Implementation = run_public, device: torch.device | str = "cpu"
) -> list[str]:
    """What unused memory changed; nothing, for a correct implementation."""
    clean: Outcome | None = None
    problems: list[str] = []
    for background in BACKGROUNDS:
        built = build(case, memory=Memory(device, background))
        outcome, written = run_watched(built, run)
        problems += [f"with {background} around: {problem}" for problem in written]
        if clean is None:
            clean = outcome
            continue
        problems += [
            f"with {background} around: {difference}" for difference in differences(outcome, clean)
        ]
    return problems


def run_watched(built: BuiltCase, run: Implementation) -> tuple[Outcome, list[str]]:
    """Run, and say which memory was written that should not have been."""
    inputs = list(built.memory.buffers)
    before = [buffer.clone() for buffer in inputs]
    outcome = run(built)
    problems = [
        f"input buffer {number} was written"
        for number, (buffer, copy) in enumerate(zip(inputs, before, strict=True))
        if not torch.equal(buffer, copy)
    ]
    for buffer in built.memory.buffers[len(inputs) :]:
        if _gaps_written(buffer, outcome.out, built.memory.background):
            problems.append("memory between the rows of out was written")
    return outcome, problems


def differences(outcome: Outcome, clean: Outcome) -> list[str]:
    """Where two results differ in any bit."""
    found = []
    for name, expected in clean.tensors().items():
        got = outcome.tensors().get(name)
        if got is None or got.shape != expected.shape:
            found.append(f"{name} is missing or has another shape")
            continue
        wrong = (_bits(got) != _bits(expected)).nonzero()
        if len(wrong):
            place = tuple(wrong[0].tolist())
            found.append(
                f"{name} differs in {len(wrong)} of {expected.numel()} elements, first at {place}: "
                f"{float(got[place])!r} instead of {float(expected[place])!r}"
            )
    return found


def _bits(values: Tensor) -> Tensor:
    """Elements as integers, so that NaN equals NaN and -0 differs from +0."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.element_size()])


def _gaps_written(buffer: Tensor, out: Tensor, background: str) -> bool:
    """Blank out the elements of `out` in its buffer; what remains must be background."""
    if buffer.data_ptr() != out.data_ptr() or not out.numel():
        return False
    now, expected = buffer.clone(), torch.empty_like(buffer)
    fill(expected, out.dtype, background)
    for raw in (now, expected):
        raw.view(out.dtype).as_strided(out.shape, out.stride()).zero_()
    return not torch.equal(now, expected)
