"""Ways to run the dense Hopper kernel that neither its planner nor a Case comes up with.

| setup | what is special |
|---|---|
| short ranges | requests of a few hundred keys are split; as planned a range has 1024 or more |
| groups | likewise, and the workspace holds one request: every request is a launch of its own |
| strided | K and V are the halves of one tensor, out and lse have gaps |
| two launches | one after the other on the same work counter, which the host does not clear |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from types import ModuleType
from unittest.mock import patch

import torch
from torch import Tensor

import openmla.kernels.hopper.dense.plan as planning
from gluon_sim import Kind, Limits, intercept
from kernels.hopper.simulated import plan_of
from openmla.kernels.hopper.dense.plan import HopperDenseConfig
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.planning.split import SplitRule

SPLITTING_SMS = 6
GAP = 8  # elements of 16 bytes: rows still begin where the kernel wants them


@dataclass(frozen=True)
class Setup:
    """A case and how it is run."""

    case: Case
    short_ranges: bool = False
    group: int = 0
    """Most split requests of a launch; 0: as many as there are."""
    strided: bool = False
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class ShortRanges(HopperDenseConfig):
    """Splits requests into ranges of at least 256 keys, still multiples of 128.

    One head, 65 queries and 769 keys on 6 SMs: 2 tiles of 64 rows, 769 // 256 = 3 ranges, of
    ceil(769 / 3) = 257 keys rounded up to 384. The last range has a single key.
    """

    @property
    def split(self) -> SplitRule:
        return replace(super().split, min_keys=256)


def planned(setup: Setup, built: BuiltCase, num_qo: int) -> Plan:
    """For a chip of 2 SMs, so that blocks do several work items; of 6, to split requests."""
    if not setup.short_ranges:
        return plan_of(built, 2, num_qo)
    chosen = plan_of(built, SPLITTING_SMS, num_qo)
    known = {field.name: getattr(chosen.config, field.name) for field in fields(chosen.config)}
    return replace(chosen, config=ShortRanges(**known))


def operands_of(setup: Setup, built: BuiltCase) -> DenseOperands:
    """As built, or with K and V as the halves of one tensor [tokens, heads, d_nope + d_v]."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    if not setup.strided:
        return op
    joint = torch.cat([op.k_nope, op.v], dim=2)
    nope = op.k_nope.shape[2]
    return replace(op, k_nope=joint[..., :nope], v=joint[..., nope:])


def results_of(setup: Setup, built: BuiltCase) -> Results:
    """Full of NaN; strided, heads of out lie 8 elements apart and lse is [heads, tokens + 8]."""
    tokens, heads = built.operands.q.shape[:2]
    d_v, gap = built.case.d_v, GAP if setup.strided else 0
    out = torch.full((tokens, heads, d_v + gap), torch.nan, dtype=built.operands.q.dtype)
    lse = torch.full((heads, tokens + gap), torch.nan)[:, :tokens].T
    return Results(out[..., :d_v], lse if setup.strided else lse.contiguous())


@contextmanager
def hosted(launch: ModuleType, setup: Setup, num_qo: int, counter: Tensor) -> Iterator[None]:
    """The launcher draws its work from `counter`; the plan's workspace is as small as the setup
    says."""
    one = 4 * 64 * (setup.case.d_v + 2) * 2 * SPLITTING_SMS * num_qo
    cap = setup.group * one or planning.PARTIAL_CAP
    with (
        patch.object(launch, "launch_counter", lambda device: counter),
        patch.object(planning, "PARTIAL_CAP", cap),
    ):
        yield


def run(
    launch: ModuleType, setup: Setup, num_qo: int, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right.

    `launch` is kernels/hopper/launch.py, or that of a mutant. Around the operands is NaN.
    """
    kinds: set[Kind] = set()
    right = True
    counter = torch.zeros(1, dtype=torch.int32)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
    for _ in range(setup.launches):
        built = build(setup.case, memory=Memory("cpu", "nan"))
        op, results = operands_of(setup, built), results_of(setup, built)
        outcome = Outcome(results.out, results.lse)
        with (
            hosted(launch, setup, num_qo, counter),
            intercept(outputs=outcome.tensors(), **options) as reports,
        ):
            for call in launch.calls(planned(setup, built, num_qo), op, results):
                call.run()
        kinds |= {kind for report in reports for kind in report.kinds()}
        right &= judge(build(setup.case), outcome).ok
    return kinds, right
