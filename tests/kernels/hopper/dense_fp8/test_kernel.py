"""The dense FP8 kernel on the simulator: right, clean under every schedule, deaf to poison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gluon_sim import Limits, Report
from kernels.far_memory import FarMemory
from kernels.hopper.simulated import plan_of, run
from kernels.judging import (
    assert_clean,
    assert_every_schedule_is_clean,
    assert_right_clean_and_deaf_to_poison,
    definition_of,
    on,
)
from kernels.shared_keys import with_shared_keys
from openmla.kernels.hopper.dense.merge import merge_kernel
from openmla.kernels.hopper.dense_fp8.kernel import dense_fp8_kernel
from openmla.kernels.hopper.dense_fp8.launch import calls
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import Verdict, judge
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import new_results
from openmla.operands import DenseOperands

MIXED = Case(
    "dense",
    2,
    128,
    64,
    128,
    q_lens=(70, 33, 5),
    k_lens=(70, 300, 2),
    spare=3,
    dtype="e4m3",
    side_dtype="bf16",
    rope_dtype="e4m3",
)
SCALES: dict[str, Any] = {"q_scale": True, "k_scale": True}
PAGED = replace(MIXED, rope="cache", kv="bf16", page_size=64)
# A range has 4096 keys or more.
SPLIT = replace(
    MIXED, heads=1, d_nope=64, d_rope=32, d_v=64, q_lens=(20, 50), k_lens=(300, 8300), sink="normal"
)
CASES = {
    "causal": MIXED,
    "scales": replace(MIXED, **SCALES),
    "scales, negative": replace(MIXED, **SCALES, scale=-0.1),
    "q_scale": replace(MIXED, q_scale=True),
    "k_scale, full": replace(MIXED, k_scale=True, causal=False),
    "rope bf16": replace(MIXED, rope_dtype="bf16"),
    "rope fp16, scales": replace(MIXED, rope_dtype="fp16", **SCALES),
    "rope bf16 per head": replace(MIXED, rope_dtype="bf16", rope="per_head"),
    "rope per head": replace(MIXED, rope="per_head"),
    "v fp16, sink": replace(MIXED, side_dtype="fp16", sink="mixed", return_lse=False),
    "pages of 64": PAGED,
    "pages of 16, scales": replace(PAGED, page_size=16, **SCALES),
    "edges": replace(MIXED, heads=1, q_lens=(3, 65, 129), k_lens=(129, 65, 257), spare=0),
    "more queries than keys": replace(MIXED, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64)),
    "scale 0": replace(MIXED, scale=0.0, **SCALES),
    "rising": replace(MIXED, values="rising", q_lens=(140,), k_lens=(520,)),
    "falling": replace(MIXED, values="rising", q_lens=(140,), k_lens=(520,), scale=-0.07),
    "peaky": replace(MIXED, values="peaky", q_lens=(20,), k_lens=(410,)),
    "exact": replace(MIXED, values="exact", scale=0.125),
    "192+64": replace(MIXED, d_nope=192, d_v=256),
    "192+64 rope bf16, scales": replace(MIXED, d_nope=192, d_v=256, rope_dtype="bf16", **SCALES),
    "96+0": replace(MIXED, d_nope=96, d_rope=0, rope="none", rope_dtype=""),
    "256+0, scales": replace(
        MIXED, d_nope=256, d_rope=0, d_v=256, rope="none", rope_dtype="", **SCALES
    ),
    "40 requests": replace(MIXED, heads=1, q_lens=(1,) * 40, k_lens=(3,) * 40),
    "64+32, 5 heads": replace(MIXED, d_nope=64, d_rope=32, d_v=64, heads=5, **SCALES),
    "32+128, d_v 16": replace(MIXED, d_nope=32, d_rope=128, d_v=16),
    "split": SPLIT,
    "split, scales": replace(SPLIT, **SCALES),
}
LONG = ("split", "split, scales", "rising", "falling", "peaky", "40 requests", "64+32, 5 heads")
# What e4m3 values change: V is a copy.
FP8_NAMES = (
    "causal",
    "scales",
    "rope bf16",
    "pages of 64",
    "more queries than keys",
    "rising",
    "192+64",
    "64+32, 5 heads",
    "32+128, d_v 16",
    "split, scales",
)
FP8 = {
    name: replace(CASES[name], side_dtype="", rope_dtype=CASES[name].rope_dtype)
    for name in FP8_NAMES
}
FP8["rope bf16"] = replace(FP8["rope bf16"], rope_dtype="bf16")
# What an H200 demands of copies, and keeps of sums of FP8 products.
H200 = Limits(load_alignment=16, fp8_bits=13)


def chip(case: Case) -> int:
    return 6 if 8300 in case.k_lens else 2


def planned(num_qo: int = 0) -> Any:
    def planned_run(built: BuiltCase, **options: Any) -> tuple[Outcome, list[Report]]:
        return run(built, plan_of(built, chip(built.case), num_qo), limits=H200, **options)

    return planned_run


def by_query_tiles(cases: Iterable[str]) -> list[Any]:
    """Every case with one and with two query tiles; of those that take long, `make test` has two
    tiles only."""
    return [
        pytest.param(name, num_qo, marks=[pytest.mark.long] if name in LONG and num_qo == 1 else [])
        for name in cases
        for num_qo in (1, 2)
    ]


@pytest.mark.parametrize(("name", "num_qo"), by_query_tiles(CASES))
def test_right_clean_and_deaf_to_poison(name: str, num_qo: int) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], planned(num_qo), seed=num_qo, fp8_sums=True)


@pytest.mark.parametrize(
    "case",
    [CASES["scales"], pytest.param(CASES["split"], marks=pytest.mark.long), FP8["causal"]],
    ids=str,
)
def test_requests_may_share_keys(case: Case) -> None:
    change = partial(with_shared_keys, seed=1, all_keys=case is CASES["split"])
    assert_right_clean_and_deaf_to_poison(case, planned(2), 1, change, fp8_sums=True)


def judged(case: Case, outcome: Outcome) -> Verdict:
    """By the acceptance rule for this kernel."""
    return judge(definition_of(case), outcome, fp8_sums=True)


@pytest.mark.parametrize(("name", "num_qo"), by_query_tiles(FP8))
def test_fp8_throughout(name: str, num_qo: int) -> None:
    outcomes = []
    for background in ("zero", "nan"):
        built = on(FP8[name], background)
        outcome, reports = planned(num_qo)(built, seed=num_qo)
        assert_clean(reports)
        outcomes.append(outcome)
    assert not differences(outcomes[1], outcomes[0])
    verdict = judged(FP8[name], outcomes[0])
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cases", [CASES, FP8], ids=["values of 16 bits", "of 8"])
def test_rows_past_element_2_to_the_31(cases: dict[str, Case], axis: int) -> None:
    case = cases["64+32, 5 heads"]
    outcome, reports = planned()(build(case, memory=FarMemory(axis)), seed=1)
    assert_clean(reports)
    verdict = judged(case, outcome)
    assert verdict.ok, verdict.report()


# Of "falling" the weights of some rows are computed again.
FALLING = replace(CASES["scales"], values="rising", scale=-0.1)


@pytest.mark.parametrize("case", [FALLING, FP8["scales"], FP8["64+32, 5 heads"]], ids=str)
def test_a_request_does_not_see_its_neighbors(case: Case) -> None:
    """Nor do its bits depend on how many query tiles a block has."""
    built = on(case)
    together = run(built, plan_of(built, 2, 2))[0]
    op = built.operands
    assert isinstance(op, DenseOperands) and op.k_rope is not None
    by = op.weights
    assert by.q_scale is not None and by.k_scale is not None
    q_first = k_first = 0
    for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True):
        rows, keys = slice(q_first, q_first + q_len), slice(k_first, k_first + k_len)
        alone = replace(
            op,
            q=op.q[rows],
            k_nope=op.k_nope[keys],
            v=op.v[keys],
            k_rope=op.k_rope[keys],
            cu_seqlens_q=torch.tensor([0, q_len]).int(),
            cu_seqlens_k=torch.tensor([0, k_len]).int(),
            weights=replace(by, q_scale=by.q_scale[rows], k_scale=by.k_scale[keys]),
        )
        single = replace(
            built, operands=alone, case=replace(case, q_lens=(q_len,), k_lens=(k_len,))
        )
        out = run(single, plan_of(single, 2, 1))[0].out
        assert torch.equal(out, together.out[rows])
        q_first, k_first = q_first + q_len, k_first + k_len


def test_long_requests_are_split() -> None:
    built = on(SPLIT)
    results = new_results(built)
    kernels = [c.kernel for c in calls(plan_of(built, chip(SPLIT)), built.operands, results)]
    assert kernels == [dense_fp8_kernel, merge_kernel]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), *FP8.values()], ids=str)
def test_every_schedule_is_clean(case: Case) -> None:
    assert_every_schedule_is_clean(case, planned())
