"""Lists of rows for few queries on the simulator: three launches with the bits of one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gluon_sim import Report
from kernels.hopper.simulated import plan_of, run
from openmla.kernels.hopper.few.plan import RINGS, STEP, FewQueries
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.poison import differences
from openmla.planning import Plan

LISTS = Case(
    "sparse",
    12,
    512,
    64,
    512,
    q_lens=(2,),
    k_lens=(400,),
    topk=270,
    scale=0.05,
    spare=2,
    index_kind="mixed",
    values="rising",
)
FP8 = replace(LISTS, kv="fp8_656", page_size=16)
V4 = replace(LISTS, kv="fp8_584", page_size=16, d_rope=0, rope="none")
NARROW = replace(LISTS, d_nope=128, d_rope=32, d_v=128)
CASES = {
    "70 heads, sink, logits": (replace(LISTS, heads=70, sink="mixed", return_max_logits=True), 64),
    "fp16, wild lengths": (
        replace(LISTS, dtype="fp16", topk_lengths="wild", index_kind="duplicates", q_lens=(3,)),
        32,
    ),
    "pages with gaps": (replace(LISTS, kv="bf16", page_size=24, topk=133), 128),
    "all invalid": (replace(LISTS, index_kind="invalid", sink="high", topk=70), 32),
    "512+0, peaky": (replace(LISTS, d_rope=0, rope="none", values="peaky", topk=500), 64),
    "128+32, negative scale": (replace(NARROW, scale=-0.05), 64),
    "fp8_584": (replace(V4, topk=133), 32),
    "fp8_584, 128 heads, wild lengths": (
        replace(V4, heads=128, topk_lengths="wild", q_lens=(3,), page_size=2),
        64,
    ),
    "fp8_528_v32": (replace(V4, kv="fp8_528_v32", topk=133), 64),
    "fp8_656": (FP8, 32),
    "fp8_656, 128 heads": (replace(FP8, heads=128, q_lens=(1,), sink="low"), 128),
    "fp8_token": (replace(FP8, kv="fp8_token", topk=130), 64),
    "fp8_block32 256+32": (replace(FP8, kv="fp8_block32", d_nope=256, d_rope=32, d_v=256), 64),
    "fp8_block64 128+32, lengths": (
        replace(NARROW, kv="fp8_block64", page_size=16, topk_lengths="ragged", q_lens=(3,)),
        128,
    ),
    "fp8_block64 128+0": (
        replace(NARROW, d_rope=0, rope="none", kv="fp8_block64", page_size=16, topk=133),
        64,
    ),
}
# The ring of every width turns twice, and begins a third time.
CASES |= {
    f"ring of {slots}": (
        replace(NARROW, q_lens=(1,), topk=2 * slots * STEP + 1, index_kind="duplicates"),
        width,
    )
    for width, slots in RINGS.items()
}


QUICK = {"fp16, wild lengths", "all invalid", "128+32, negative scale", "fp8_token", "fp8_584"}
NAMES = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES]


def on(case: Case, background: str = "zero") -> BuiltCase:
    return build(case, memory=Memory("cpu", background))


def few_plan(chosen: Plan, width: int) -> Plan:
    """The plan in three launches, whatever the number of queries."""
    config, problem = chosen.config, chosen.problem
    columns, span = (config.latent, config.rope), 32 if width == 32 else 64
    few = FewQueries(problem.total_q, problem.heads, problem.topk, *columns, width, span)
    return replace(chosen, config=replace(config, few=few))


def findings(reports: list[Report]) -> list[str]:
    return [str(f) for report in reports for f in report.findings]


@pytest.mark.parametrize("name", NAMES)
def test_right_clean_and_the_bits_of_one_launch(name: str) -> None:
    case, width = CASES[name]
    whole, _ = run(on(case), seed=1)
    poisoned = on(case, "nan")  # where no list points
    few = few_plan(plan_of(poisoned), width)
    outcome, reports = run(poisoned, few, seed=1, schedule="unfair")
    assert findings(reports) == []
    verdict = judge(on(case), outcome)
    assert verdict.ok, verdict.report()
    assert not differences(outcome, whole)


def test_launches_that_do_not_overlap() -> None:
    built = on(NARROW)
    chosen = few_plan(plan_of(built), 64)
    assert chosen.config.few is not None
    apart = replace(chosen.config, few=replace(chosen.config.few, overlap=False))
    outcomes = []
    for plan in (chosen, replace(chosen, config=apart)):
        outcome, reports = run(on(NARROW), plan, seed=1)
        assert findings(reports) == []
        outcomes.append(outcome)
    assert not differences(outcomes[1], outcomes[0])
