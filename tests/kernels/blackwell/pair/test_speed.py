"""Copies of the pair's kernel are in flight products ahead, and shared memory is what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gluon_sim import intercept
from kernels.blackwell.pair.test_kernel import ONE_PAIR
from openmla.aot.operands import operands_of
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.launch import launch
from openmla.kernels.triton_version import TRITON
from openmla.lab.prediction import CHIPS, predict
from openmla.planning import plan
from openmla.problem import Problem

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(TRITON < FIRST_ROWS_PAIR, reason="no pairs in this Triton"),
]
V32 = Problem(
    form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=2048, total_q=4096, total_k=65536
)


def test_shared_memory_bounds_it_at_60_percent_of_the_peak_or_more() -> None:
    found = predict(plan(V32, "b200"))
    assert found is not None and found.share_of_peak >= 0.60
    assert found.bound_by == "smem" and found.busy["smem"] > 0.99


def test_every_copy_is_issued_products_before_it_is_waited_for() -> None:
    """A slot has one copy and one product, in the same order. Two tokens of 6 steps of 17 slots: in
    the middle a copy begins five products before its own; where the next token's Q and this one's
    output are copied too, two."""
    chosen = replace(
        plan(replace(V32, topk=1536, total_q=2, total_k=1536), "b200"), target=ONE_PAIR
    )
    with intercept(schedule="timed", resident=1, rates=CHIPS["blackwell"].rates()) as reports:
        launch(chosen, *operands_of(chosen.problem, "cpu"))
    (report,) = reports
    report.raise_if_bad()
    assert report.timeline is not None
    events = [e for e in report.timeline.events if e.lane.startswith("cta0.0 ")]
    copies = [e.start for e in events if e.kind == "copy" and "ring" in e.label]
    products = [e.start for e in events if e.kind == "mma" and "tcgen05 MMA" in e.label]
    assert len(copies) == len(products) == 2 * 6 * 17
    ahead = [n - sum(p < start for p in products) for n, start in enumerate(copies)]
    assert min(ahead[17:100]) >= 5 and min(ahead[17:]) >= 2, ahead
