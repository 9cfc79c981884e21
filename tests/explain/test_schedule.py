"""The pipeline model keeps its own rules on every kind of plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from openmla.explain.schedule import BLOCKS, Step, busy_share, schedule
from openmla.explain.support import FEATURES, TABLE_TARGETS, support_of
from openmla.planning import Plan, plan
from openmla.problem import FORMS

PLANS = [
    plan(problem, target)
    for problem in FEATURES.values()
    for target in TABLE_TARGETS
    if target != "cpu" and problem.form in FORMS and support_of(problem, target).family
]


def find(steps: list[Step], kind: str, block: int) -> list[Step]:
    return [step for step in steps if step.kind == kind and step.block == block]


@pytest.mark.parametrize("chosen", PLANS, ids=lambda p: f"{p.target}-{p.problem}")
def test_rules(chosen: Plan) -> None:
    assert chosen.block is not None
    steps, pipeline = schedule(chosen), chosen.block.pipeline
    per_block = pipeline.groups if pipeline.shares_keys else 1
    for block in range(BLOCKS):
        loaded = max(step.end for step in find(steps, "load K", block))
        qk, softmax, pv = (find(steps, kind, block) for kind in ("qk", "softmax", "pv"))
        assert len(qk) == len(softmax) == len(pv) == per_block
        assert min(step.start for step in qk) >= loaded
        assert min(step.start for step in softmax) >= min(step.end for step in qk)
        assert min(step.start for step in pv) >= min(step.end for step in softmax)
        if pipeline.v_slots:
            assert min(step.start for step in pv) >= find(steps, "load V", block)[0].end
    for worker in {step.worker for step in steps}:
        mine = sorted((s for s in steps if s.worker == worker), key=lambda s: s.start)
        assert all(a.end <= b.start for a, b in pairwise(mine)), worker
        assert 0 < busy_share(steps, worker) <= 1


def test_a_slot_is_not_overwritten_before_its_use() -> None:
    chosen = plan(FEATURES["dense 128+64 → 128, bf16"], "h200")
    steps, stages = schedule(chosen), chosen.config.num_kv_stages
    for block in range(stages, BLOCKS):
        reader = max(step.end for step in find(steps, "qk", block - stages))
        assert find(steps, "load K", block)[0].start >= reader
        reader = max(step.end for step in find(steps, "pv", block - stages))
        assert find(steps, "load V", block)[0].start >= reader


def test_a_deeper_ring_never_waits_longer() -> None:
    chosen = plan(FEATURES["dense 64+32 → 64, bf16 (MiniCPM3)"], "h200")
    ends = []
    for stages in (1, 2, 3, 4):
        config = replace(chosen.config, num_kv_stages=stages)
        ends.append(max(step.end for step in schedule(replace(chosen, config=config))))
    assert ends == sorted(ends, reverse=True) and ends[0] > ends[-1]


def test_nothing_to_show_on_a_cpu() -> None:
    chosen = plan(FEATURES["dense 128+64 → 128, bf16"], "cpu")
    assert schedule(chosen) == [] and busy_share([], "load") == 0.0


@pytest.mark.parametrize("name", ["index scores, 64 heads, pages of 64", "selection of 2048"])
def test_the_indexer_has_no_softmax_to_draw(name: str) -> None:
    chosen = plan(FEATURES[name], "h200")
    assert chosen.block is not None and schedule(chosen) == []
