"""Rows past element 2^31 on the simulated Blackwell and CDNA4 kernels: right, or refused.

The Hopper kernels have theirs, and seeded 32-bit offsets, in hopper/test_far_rows.py, the latent
CDNA4 kernel in cdna4/sparse/test_far_rows.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import kernels.blackwell.simulated as blackwell
import kernels.cdna4.simulated as cdna4
from kernels.far_memory import FarMemory, with_far_keys, with_far_table
from kernels.judging import Run, assert_clean, definition_of, on
from openmla.errors import Unsupported
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge

DENSE = Case("dense", 4, 128, 64, 128, q_lens=(9, 7, 3), k_lens=(9, 70, 3))
PAGES = replace(DENSE, rope="cache", kv="bf16", page_size=64)
ROWS = Case("sparse", 8, 512, 64, 512, q_lens=(5,), k_lens=(150,), topk=70, scale=0.1)
PAGED = replace(ROWS, kv="bf16", page_size=16)
RUNS: dict[str, tuple[Run, Case]] = {
    "blackwell dense": (blackwell.run, DENSE),
    "blackwell dense, pages": (blackwell.run, PAGES),
    "blackwell dense, fp8 pages": (blackwell.run, replace(PAGES, kv="fp8_block32")),
    "blackwell rows": (blackwell.run, ROWS),
    "blackwell rows, pages": (blackwell.run, PAGED),
    "blackwell rows, fp8": (blackwell.run, replace(PAGED, kv="fp8_656")),
    "blackwell rows, fp8 and scales": (blackwell.run, replace(PAGED, kv="fp8_block32")),
    "blackwell rows, fp8_584": (
        blackwell.run,
        replace(PAGED, d_rope=0, rope="none", kv="fp8_584"),
    ),
    "cdna4 dense": (cdna4.run, DENSE),
    "cdna4 dense, pages": (cdna4.run, PAGES),
    "cdna4 rows": (cdna4.run, ROWS),
    "cdna4 rows, pages": (cdna4.run, PAGED),
}

# Rows that lie too far apart for the instructions that copy them.
REFUSED = [
    ("blackwell rows, fp8", 0),
    ("blackwell rows, fp8", 1),
    ("cdna4 dense", 0),
    ("cdna4 dense, pages", 0),
]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_right_and_clean_or_refused(name: str, axis: int) -> None:
    run, case = RUNS[name]
    built = build(case, memory=FarMemory(axis))
    if (name, axis) in REFUSED:
        with pytest.raises(Unsupported):
            run(built, seed=1)
        return
    outcome, reports = run(built, seed=1)
    assert reports
    assert_clean(reports)
    verdict = judge(definition_of(case), outcome)
    assert verdict.ok, verdict.report()


# Strides count 16 bytes, and a tile of keys spans less than 2 GiB: key 2100 is past 2^31 of them.
LONG = Case("dense", 1, 128, 64, 128, q_lens=(3, 5), k_lens=(2100, 70), rope="per_head")


@pytest.mark.parametrize("name", ["cdna4 dense"])
def test_keys_past_2_to_the_31_pieces(name: str) -> None:
    run, _ = RUNS[name]
    outcome, reports = run(with_far_keys(on(LONG), 2**23), seed=1)
    assert reports
    assert_clean(reports)
    verdict = judge(definition_of(LONG), outcome)
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("name", ["cdna4 dense"])
def test_heads_past_2_to_the_31_pieces(name: str) -> None:
    run, case = RUNS[name]
    case = replace(case, rope="per_head")
    outcome, reports = run(build(case, memory=FarMemory(1, pieces=True)), seed=1)
    assert reports
    assert_clean(reports)
    verdict = judge(definition_of(case), outcome)
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize(
    "name", ["blackwell dense, pages", "blackwell dense, fp8 pages", "cdna4 dense, pages"]
)
def test_a_far_line_of_the_block_table(name: str) -> None:
    run, case = RUNS[name]
    outcome, reports = run(with_far_table(build(case)), seed=1)
    assert reports
    assert_clean(reports)
    verdict = judge(definition_of(case), outcome)
    assert verdict.ok, verdict.report()
