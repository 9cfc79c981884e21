"""The dense Blackwell kernel as a pair of CTAs, on the simulator: as right and clean as one CTA."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kernels.blackwell.dense.test_kernel import EDGES, FALLING, LONG, PEAKY, V3
from kernels.blackwell.simulated import PAIR, plan_of, run
from kernels.judging import on
from openmla.kernels.blackwell.dense.plan import FIRST_DENSE_PAIR, following, original_plan
from openmla.kernels.triton_version import TRITON
from openmla.lab.prediction import predict
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences
from openmla.planning import plan
from openmla.planning.models import problem_for_model
from openmla.problem import Problem

# 600 rows are a whole work item of 512 and one whose second query tile has no rows.
LARGE = replace(V3, q_lens=(600,), k_lens=(610,))
CASES = {
    "causal": LARGE,
    "three requests": V3,
    "edges": replace(EDGES, q_lens=(257, 513, 385), k_lens=(129, 514, 513)),
    "full, sink": replace(LARGE, causal=False, sink="normal"),
    "ring turns": LONG,
    "falling": replace(FALLING, q_lens=(300,)),
    "peaky": replace(PEAKY, q_lens=(300,)),
    "rope per head": replace(V3, rope="per_head", heads=2, q_lens=(300,), k_lens=(150,)),
    "fp16, no lse": replace(V3, dtype="fp16", return_lse=False),
    "empty rows": replace(V3, q_lens=(400, 0, 3), k_lens=(50, 10, 0)),
    "exact": replace(LARGE, values="exact", scale=0.125),
    "negative scale": replace(V3, scale=-0.1),
    "128+32": replace(V3, d_rope=32),
    "window": replace(LARGE, k_lens=(1100,), window=420),
    "window, groups, fp32 out": replace(
        V3, heads=2, group=2, window=100, k_lens=(140, 520, 2), out="given", fp32_out=True
    ),
}
QUICK = ("edges", "falling", "128+32", "window, groups, fp32 out")
# CI looks at the earliest and the latest schedule of these; a changed kernel needs
# OPENMLA_SIM_SEEDS=20, and then takes all.
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "0"))
pytestmark = [  # these run with the second version of Triton
    pytest.mark.compile,
    pytest.mark.skipif(TRITON < FIRST_DENSE_PAIR, reason="no pairs in this Triton"),
]


@pytest.mark.parametrize("name", CASES if SEEDS else QUICK)
def test_right_clean_and_the_bits_of_one_cta(name: str) -> None:
    runs = [("zero", "early"), ("nan", "late"), *[("zero", "random")] * SEEDS]
    built = on(CASES[name])
    alone = run(built, plan_of(built, 2))[0]
    for seed, (background, schedule) in enumerate(runs):
        built = on(CASES[name], background)
        outcome, reports = run(built, plan_of(built, PAIR), schedule=schedule, seed=seed)
        assert [str(f) for report in reports for f in report.findings] == []
        assert not differences(outcome, alone)
    verdict = judge(on(CASES[name]), alone)
    assert verdict.ok, verdict.report()


def test_what_bounds_a_long_prompt() -> None:
    """The tensor cores, where one CTA is bound by shared memory; see docs/prediction.md."""
    chosen = plan(problem_for_model("deepseek-v3", tokens=8192), "b200")
    alone = replace(chosen, config=following(original_plan(chosen.problem)))
    pair, one = predict(chosen), predict(alone)
    assert pair is not None and one is not None
    assert pair.share_of_peak >= 0.84 and pair.bound_by == "mma"
    assert one.share_of_peak <= 0.78 and one.bound_by == "smem"


def test_long_prompts_are_pairs() -> None:
    problem = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_k=4096)
    lengths = {(1, 2047): False, (1, 2048): True, (2, 4094): False, (2, 4096): True}
    for (batch, rows), pair in lengths.items():
        chosen = plan(replace(problem, batch=batch, total_q=rows), "b200")
        assert chosen.config.pair_cta == pair
    # A work item of 512 rows would mask most of what it multiplies.
    for window, pair in ((2047, False), (2048, True)):
        long = replace(problem, total_q=4096, window=window)
        assert plan(long, target="b200").config.pair_cta == pair
    few = plan(replace(problem, heads=1, total_q=2048), "b200")
    assert few.config.num_qo == 1
