"""Backward kernels compiled and executed here: right, and the same bits in all schedules.

A key pass was wrong on an H200 and right in the simulator, which then knew nothing of where the
compiler puts the elements of a tile; its first execution here shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from executed.cases import QUICK_TRITON
from gluon_sim.compiled import SCHEDULES
from kernels import gradients as dense
from kernels.blackwell.backward.simulated import BLACKWELL
from kernels.cdna4.backward.simulated import CDNA4
from kernels.hopper.backward.simulated import HOPPER
from kernels.hopper.sparse_backward import simulated as sparse
from openmla.backward.operands import EVERY, Gradients
from openmla.backward.sparse_operands import EVERY as EVERY_ROW
from openmla.backward.sparse_operands import RowGradients
from openmla.dispatch import triton_version
from openmla.kernels.cdna4.chip import FIRST_TRITON
from openmla.kernels.launch import calls
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.executed.calls import compiled_calls
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.row_gradients import judge_rows_twice

_NARROW = Case("dense", 1, 64, 32, 64, q_lens=(3, 65), k_lens=(129, 70), spare=2)
_V3 = replace(_NARROW, heads=2, d_nope=128, d_rope=64, d_v=128, q_lens=(40, 5), k_lens=(150, 2))
DENSE = {
    "64+32->64": GradientCase(_NARROW),
    "128+64->128": GradientCase(_V3),
    "full, sinks": GradientCase(replace(_V3, causal=False, sink="mixed")),
    "full, gradient of lse": GradientCase(replace(_V3, causal=False), d_lse=True),
    "rope per head": GradientCase(replace(_V3, rope="per_head", heads=1)),
    "128+0": GradientCase(replace(_V3, d_rope=0, rope="none", heads=1)),
}
_ONE_HEAD = replace(_V3, heads=1)
OF_HOPPER = {
    "key mask, 64+32->64": GradientCase(replace(_NARROW, key_mask="half")),
    "key mask, 128+64->128": GradientCase(replace(_V3, key_mask="half", k_lens=(290, 40))),
    "few bits, full, sinks": GradientCase(
        replace(_ONE_HEAD, key_mask="few", causal=False, sink="mixed")
    ),
    "192+64->256": GradientCase(replace(_ONE_HEAD, d_nope=192, d_v=256)),
    "192+64->256, key mask": GradientCase(
        replace(_ONE_HEAD, d_nope=192, d_v=256, key_mask="half", k_lens=(290, 40))
    ),
}
OF_CDNA4 = {
    "64+64->64": GradientCase(replace(_V3, heads=1, d_nope=64, d_v=64, q_lens=(3, 65))),
    "128+64->128": GradientCase(_V3),
    "edges": GradientCase(
        replace(_ONE_HEAD, q_lens=(129, 63), k_lens=(129, 65), d_rope=0, rope="none")
    ),
    "full, sinks": GradientCase(replace(_ONE_HEAD, causal=False, sink="mixed")),
    "rope per head, gradient of lse": GradientCase(replace(_ONE_HEAD, rope="per_head"), d_lse=True),
}
_LISTS = Case(
    "sparse",
    5,
    128,
    64,
    128,
    q_lens=(2,),
    k_lens=(100,),
    topk=65,
    index_kind="mixed",
    scale=0.1,
    spare=2,
)
SPARSE = {
    "128+64": GradientCase(_LISTS),
    "128+0": GradientCase(replace(_LISTS, d_rope=0, rope="none")),
    "lengths, sinks": GradientCase(replace(_LISTS, topk_lengths="ragged", sink="mixed")),
    "512+64": GradientCase(replace(_LISTS, d_nope=512, d_v=512, q_lens=(1,), scale=0.05)),
}


def executed(
    built: Any, plan: Any, operands: Any, gradients: Any, schedules: int, chip: str
) -> list[Any]:
    """The gradients of every schedule, which have the same bits."""
    for x in gradients.tensors().values():
        x.fill_(torch.nan)
    inputs = [*built.built.memory.buffers, built.d_out, operands.out, operands.lse]
    inputs += [x for x in (built.d_lse,) if x is not None]
    outputs = gradients.tensors().values()
    run = compiled_calls(calls(plan, operands, gradients), chip, inputs, outputs)
    found = []
    for schedule in SCHEDULES[:schedules]:
        assert [str(report) for report in run(schedule) if not report.ok] == []
        found.append({name: x.clone() for name, x in gradients.tensors().items()})
    assert all(dense.same_bits(got, found[0]) for got in found[1:])
    return found


def check_dense(passes: dense.Passes, case: GradientCase, schedules: int) -> None:
    built = dense.on(case, "nan")
    saved = dense.forward(built)
    op = built.backward(saved)
    gradients = Gradients.allocate(op.forward, EVERY)
    found = executed(built, passes.plan_of(built, saved), op, gradients, schedules, passes.chip)
    for verdict in judge_twice(dense.on(case), found[0], saved):
        assert verdict.ok, verdict.report()


def check_sparse(case: GradientCase, schedules: int) -> None:
    built = sparse.on(case, "nan")
    saved = sparse.forward(built)
    op = built.backward(saved)
    gradients = RowGradients.allocate(op.forward, EVERY_ROW)
    found = executed(built, sparse.plan_of(built, saved), op, gradients, schedules, "h200")
    for verdict in judge_rows_twice(sparse.on(case), found[0], saved):
        assert verdict.ok, verdict.report()


@pytest.mark.compile
def test_a_dense_and_a_sparse_backward_pass() -> None:
    if triton_version()[:2] != QUICK_TRITON["h200"]:
        pytest.skip("executed with the other Triton")
    check_dense(HOPPER, DENSE["64+32->64"], 1)
    check_sparse(SPARSE["128+64"], 1)


@pytest.mark.compile
def test_a_dense_backward_pass_on_cdna4() -> None:
    if triton_version()[:2] != QUICK_TRITON["mi355x"]:
        pytest.skip("executed with the other Triton")
    check_dense(CDNA4, OF_CDNA4["64+64->64"], 1)


@pytest.mark.executed
@pytest.mark.parametrize("name", OF_CDNA4)
def test_cdna4(name: str) -> None:
    if triton_version()[:2] < FIRST_TRITON:
        pytest.skip("this Triton does not compile them")
    check_dense(CDNA4, OF_CDNA4[name], len(SCHEDULES))


@pytest.mark.executed
@pytest.mark.parametrize("passes", [HOPPER, BLACKWELL], ids=lambda passes: passes.backend)
@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str, passes: dense.Passes) -> None:
    check_dense(passes, DENSE[name], len(SCHEDULES))


@pytest.mark.executed
@pytest.mark.parametrize("name", OF_HOPPER)
def test_hoppers_own(name: str) -> None:
    check_dense(HOPPER, OF_HOPPER[name], len(SCHEDULES))


@pytest.mark.executed
@pytest.mark.parametrize("name", SPARSE)
def test_sparse(name: str) -> None:
    check_sparse(SPARSE[name], len(SCHEDULES))
