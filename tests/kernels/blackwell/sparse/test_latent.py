"""The latent form over pages on Blackwell: the list of a token follows from the block table."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from kernels.blackwell.simulated import run
from kernels.judging import on
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences

LATENT = Case(
    "latent",
    16,
    512,
    64,
    512,
    kv="bf16",
    page_size=64,
    q_lens=(2, 0, 1),
    k_lens=(66, 5, 129),
    scale=0.07,
    spare=1,
)
CASES = {
    "causal": LATENT,
    "full, sinks": replace(LATENT, causal=False, q_lens=(1, 1), k_lens=(65, 3), sink="mixed"),
    "fewer keys than queries": replace(LATENT, q_lens=(5,), k_lens=(2,), page_size=7, heads=40),
    "34 sequences": replace(LATENT, q_lens=(0,) * 33 + (1,), k_lens=(3,) * 34, heads=8),
    "no keys": replace(LATENT, q_lens=(1, 1), k_lens=(0, 1)),
    # Windows that begin inside of a page and a step; the last sees all keys of its sequence.
    "window": replace(LATENT, q_lens=(2, 0, 1), k_lens=(230, 5, 60), window=100, page_size=16),
    "window of one key": replace(LATENT, q_lens=(3,), k_lens=(70,), window=1, page_size=7),
    "window of a long table": replace(LATENT, q_lens=(1,), k_lens=(4200,), window=65),
    "window, fp8_656": replace(LATENT, kv="fp8_656", q_lens=(2,), k_lens=(150,), window=70),
    "fp8_656": replace(LATENT, kv="fp8_656", q_lens=(1,), k_lens=(70,)),
    "fp8 queries, fp8_token, scales": replace(
        LATENT, dtype="e4m3", kv="fp8_token", q_lens=(2, 1), k_lens=(70, 5), q_scale=True
    ),
    "fp8_block32, pages of 16": replace(
        LATENT, kv="fp8_block32", page_size=16, q_lens=(1,), k_lens=(70,)
    ),
}
V4 = replace(LATENT, d_rope=0, rope="none", kv="fp8_584")
CASES |= {
    "fp8_584": V4,
    "fp8_584, e4m3 queries": replace(V4, dtype="e4m3", q_lens=(2,), k_lens=(70,), page_size=2),
    "fp8_584, window": replace(V4, q_lens=(2,), k_lens=(230,), window=100, page_size=16),
}
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "0"))


def check(case: Case) -> None:
    runs = [("zero", "early"), ("nan", "late"), *[("zero", "random")] * SEEDS]
    outcomes = []
    for seed, (background, schedule) in enumerate(runs):
        outcome, reports = run(on(case, background), schedule=schedule, seed=seed)
        assert [str(f) for report in reports for f in report.findings] == []
        outcomes.append(outcome)
        assert not differences(outcome, outcomes[0])
    verdict = judge(on(case), outcomes[0])
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    check(CASES[name])
