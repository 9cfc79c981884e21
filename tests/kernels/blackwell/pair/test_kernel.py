"""The kernel of a CTA pair on the simulator: right, clean on every schedule, deaf to poison."""

from __future__ import annotations

import doctest
import os
from dataclasses import replace

import pytest

from gluon_sim import Report
from kernels.blackwell.simulated import plan_of, run
from kernels.judging import on
from openmla.kernels.blackwell.pair import plan as pair
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.triton_version import TRITON
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences

V32 = Case("sparse", 128, 512, 64, 512, q_lens=(1,), k_lens=(300,), topk=300, scale=0.07, spare=2)
LATENT = replace(V32, form="latent", kv="bf16", page_size=64, topk=0)
CASES = {
    "two steps": V32,
    "three tokens in turn": replace(
        V32, q_lens=(3,), topk_lengths="ragged", return_max_logits=True
    ),
    "lengths and wild indices": replace(
        V32,
        q_lens=(2,),
        topk_lengths="wild",
        index_kind="mixed",
        sink="mixed",
        return_max_logits=True,
    ),
    "no index counts": replace(V32, index_kind="invalid", sink="normal", topk=129),
    "rising, five steps": replace(V32, values="rising", scale=1.0, topk=1030, k_lens=(1100,)),
    "fp16, uneven tail": replace(V32, dtype="fp16", topk=257, return_lse=False),
    "100 heads": replace(V32, heads=100, sink="mixed", return_max_logits=True),
    "bf16 pages": replace(V32, kv="bf16", page_size=16, index_kind="duplicates"),
    "exact": replace(V32, values="exact", scale=0.125),
    "latent": replace(LATENT, q_lens=(1, 1), k_lens=(300, 1)),
    "latent, full": replace(LATENT, q_lens=(2,), k_lens=(70,), causal=False, page_size=7),
    "latent, rising": replace(LATENT, k_lens=(520,), values="rising", scale=1.0),
    "fp8_656": replace(V32, kv="fp8_656", page_size=64, q_lens=(2,), index_kind="mixed"),
    "fp8_block32, wild": replace(
        V32, kv="fp8_block32", page_size=16, index_kind="mixed", topk_lengths="wild", topk=100
    ),
    "latent, fp8_block64": replace(LATENT, kv="fp8_block64", q_lens=(1, 1), k_lens=(100, 5)),
    "latent, fp8_token": replace(LATENT, kv="fp8_token", page_size=7, k_lens=(40,)),
    "e4m3": replace(V32, dtype="e4m3", sink="mixed"),
    "fp8 queries, fp8_token, scales": replace(
        V32, dtype="e4m3", kv="fp8_token", page_size=64, q_lens=(3,), q_scale=True
    ),
    "latent, fp8 queries, fp8_656, scales": replace(
        LATENT, dtype="e4m3", kv="fp8_656", q_lens=(2, 1), k_lens=(100, 5), q_scale=True
    ),
    "window": replace(LATENT, q_lens=(2, 1), k_lens=(700, 5), window=300, page_size=16),
    "512+0, three tokens": replace(V32, d_rope=0, rope="none", q_lens=(3,), topk_lengths="wild"),
    "512+0, latent": replace(LATENT, d_rope=0, rope="none", q_lens=(1, 1), k_lens=(300, 1)),
    "512+0, fp8_block64": replace(V32, d_rope=0, rope="none", kv="fp8_block64", topk=100),
    # Nine ranges of 512 keys, seven, none; the third request is not split, the last has no tokens.
    "split": replace(
        LATENT,
        heads=8,
        q_lens=(2, 0, 1, 1),
        k_lens=(4500, 9000, 3300, 4100),
        sink="mixed",
        values="rising",
        scale=0.02,
    ),
    # The tokens after the last of 32 requests belong to one more, the first of a second chunk.
    "split, 32 requests": replace(
        LATENT, heads=8, q_lens=(0,) * 30 + (1, 1), k_lens=(3,) * 31 + (4200,), spare=3
    ),
    "split, 128 heads": replace(LATENT, q_lens=(1,), k_lens=(4700,), causal=False, page_size=16),
    "split, fp8_656": replace(LATENT, kv="fp8_656", heads=3, q_lens=(1, 1), k_lens=(4097, 5)),
    "e4m3, 16 heads": replace(V32, dtype="e4m3", heads=16, q_lens=(2,), topk_lengths="wild"),
}
QUICK = (
    "two steps",
    "three tokens in turn",
    "latent, rising",
    "window",
    "fp8_656",
    "e4m3, 16 heads",
    "512+0, three tokens",
    "split",
    "fp8 queries, fp8_token, scales",
)
# CI looks at the earliest and the latest schedule of these; a changed kernel needs
# OPENMLA_SIM_SEEDS=20, and then takes all.
ONE_PAIR = "sm_100:2x232448"  # a chip of two SMs
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "0"))
pytestmark = [  # these run with the second version of Triton
    pytest.mark.compile,
    pytest.mark.skipif(TRITON < FIRST_ROWS_PAIR, reason="no pairs in this Triton"),
]


def one_pair(built: BuiltCase, **options: object) -> tuple[Outcome, list[Report]]:
    """One pair takes all tokens in turn."""
    return run(built, replace(plan_of(built), target=ONE_PAIR), **options)


def test_examples() -> None:
    assert doctest.testmod(pair).failed == 0


@pytest.mark.parametrize("name", CASES if SEEDS else QUICK)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    runs = [("zero", "early"), ("nan", "late"), *[("zero", "random")] * SEEDS]
    outcomes = []
    for seed, (background, schedule) in enumerate(runs):
        outcome, reports = one_pair(on(CASES[name], background), schedule=schedule, seed=seed)
        assert [str(f) for report in reports for f in report.findings] == []
        outcomes.append(outcome)
        assert not differences(outcome, outcomes[0])
    verdict = judge(on(CASES[name]), outcomes[0])
    assert verdict.ok, verdict.report()


def test_tokens_that_take_turns_have_the_bits_of_those_alone() -> None:
    built = on(replace(V32, q_lens=(3,), topk_lengths="ragged"))
    assert not differences(one_pair(built)[0], run(built)[0])
