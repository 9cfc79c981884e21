"""Ranges of keys on the latent CDNA4 kernel: right, a request's own, and defects are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from gluon_sim import Limits, intercept
from kernels.cdna4.defect import Defect, load_defect
from kernels.cdna4.simulated import plan_of, run
from kernels.judging import (
    assert_clean,
    assert_every_schedule_is_clean,
    assert_right_clean_and_deaf_to_poison,
    on,
)
from kernels.mutants import controls
from openmla.kernels.cdna4.sparse import launch as own_launch
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import LatentOperands
from openmla.planning import latent_split

# Ten ranges of 512 keys; a request that is not split; nine ranges, two slots of tokens in a tile.
SPLIT = Case(
    "latent",
    4,
    512,
    64,
    512,
    q_lens=(1, 1, 2),
    k_lens=(5000, 7, 4600),
    spare=3,
    scale=0.07,
    kv="bf16",
    page_size=48,
    sink="normal",
)
CASES = {
    "split": SPLIT,
    # Eighteen ranges: the merge adds them in two groups.
    "many ranges": replace(
        SPLIT, q_lens=(1,), k_lens=(8800,), spare=0, sink="none", values="rising"
    ),
    # Two tiles of rows, the second of 6 heads; three ranges and one.
    "70 heads": replace(
        SPLIT, heads=70, q_lens=(1, 0, 1), k_lens=(9000, 5, 300), spare=0, page_size=64
    ),
    # Four keys in the last range: half of the tokens see none of it.
    "causal": replace(SPLIT, q_lens=(8,), k_lens=(4100,), page_size=16, sink="mixed"),
    "full workspace": replace(
        SPLIT, heads=64, q_lens=(1,), k_lens=(4097,), spare=0, causal=False, page_size=64
    ),
    "no rope, no lse": replace(
        SPLIT, d_rope=0, rope="none", return_lse=False, q_lens=(1,), k_lens=(4200,)
    ),
    "656": replace(SPLIT, kv="fp8_656", q_lens=(1, 1), k_lens=(4200, 30), page_size=16),
    "block32": replace(SPLIT, kv="fp8_block32", q_lens=(2,), k_lens=(4200,), page_size=7),
    "token": replace(SPLIT, kv="fp8_token", q_lens=(1,), k_lens=(4200,), scale=-0.05),
    "256+64": replace(SPLIT, d_nope=256, d_v=256, q_lens=(1,), k_lens=(4200,)),
    "token, e4m3 queries": replace(
        SPLIT, dtype="e4m3", kv="fp8_token", q_lens=(1,), k_lens=(4200,), page_size=16
    ),
    "fp32 out": replace(
        SPLIT, q_lens=(1, 1), k_lens=(4200, 70), out="aligned", fp32_out=True, page_size=64
    ),
    "groups": replace(SPLIT, q_lens=(1, 1, 1), k_lens=(4100, 9, 4300), spare=5),
}
ONE_AT_A_TIME = 4 * (512 + latent_split.STATE) * 300
"""Bytes of the partial results of one request of "groups", and of less than two."""


@pytest.fixture(autouse=True)
def new_memory_is_full_of_nan() -> Iterator[None]:
    """Otherwise a part that nobody wrote may be one that a run before left there, and right."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that holds one request of "groups"."""
    monkeypatch.setattr(latent_split, "PARTIAL_CAP", ONE_AT_A_TIME)


# The rows of "token" are those of "token, e4m3 queries".
LONGER = ("token", "70 heads", "block32")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONGER else [])
        for name in CASES
        if name != "groups"
    ],
)
def test_accepted_clean_and_deaf_to_poison(name: str) -> None:
    assert plan_of(on(CASES[name])).variant.ranges.rows
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


def test_requests_of_several_launches(one_at_a_time: None) -> None:
    assert plan_of(on(CASES["groups"])).variant.ranges.group == 1
    assert_right_clean_and_deaf_to_poison(CASES["groups"], run)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "groups"])
def test_every_schedule_is_clean(name: str) -> None:
    assert_every_schedule_is_clean(CASES[name], run)


@pytest.mark.parametrize("name", ["split", "656"])
def test_a_request_alone_has_the_same_bits(name: str) -> None:
    built = on(CASES[name])
    op = built.operands
    assert isinstance(op, LatentOperands)
    together, _ = run(built)
    tokens = int(op.cu_seqlens_q[1])
    alone = replace(
        op,
        q=op.q[:tokens],
        block_table=op.block_table[:1],
        cache_lengths=op.cache_lengths[:1],
        cu_seqlens_q=op.cu_seqlens_q[:2],
    )
    case = replace(CASES[name], q_lens=(tokens,), k_lens=CASES[name].k_lens[:1], spare=0)
    outcome, reports = run(replace(built, operands=alone, case=case))
    assert_clean(reports)
    assert torch.equal(outcome.out[:tokens], together.out[:tokens])
    assert outcome.lse is not None and together.lse is not None
    assert torch.equal(outcome.lse[:tokens], together.lse[:tokens])


RANGES = "tables.ranges"
DEFECTS = [
    Defect(
        "ranges lie over each other",
        "sparse",
        "place + part * rows + first, -1)",
        "place + first, -1)",
        "split",
    ),
    Defect(
        "requests lie over each other",
        "sparse",
        f"place = (sequence - {RANGES}.first_sequence) * {RANGES}.part_rows",
        "place = sequence * 0",
        "split",
    ),
    Defect(
        "a range begins two blocks late",
        "sparse",
        "gl.where(has_range, part << bits, 0)",
        "gl.where(has_range, (part << bits) + part * 128, 0)",
        "split",
    ),
    Defect(
        "a range does not end",
        "sparse",
        "begin + gl.minimum(keys - begin, 1 << bits)",
        "keys",
        "70 heads",
    ),
    Defect(
        "what a row sees is counted from the first key of the range",
        "sparse",
        "seen=keys - tokens + 1",
        "seen=keys - tokens + 1 - begin",
        "causal",
    ),
    Defect(
        "a split request is computed whole as well",
        "sparse",
        "has_range == (parts > 1), rows",
        "(parts > 1) | (has_range == 0), rows",
        "split",
    ),
    Defect(
        "a request that is not split is left out",
        "sparse",
        "has_range == (parts > 1), rows",
        "has_range & (parts > 1), rows",
        "split",
    ),
    Defect(
        "tiles of a range lie over each other",
        "sparse",
        "place + part * rows + first, -1)",
        "place + part * rows, -1)",
        "70 heads",
    ),
    Defect(
        "a range has one tile",
        "sparse",
        "gl.where(has_range, slot // parts * BM, first)",
        "gl.where(has_range, slot * 0, first)",
        "70 heads",
    ),
    Defect(
        "a range is taken for a whole request",
        "sparse",
        "if work.part_row >= 0:",
        "if work.part_row > 0:",
        "full workspace",
    ),
    Defect(
        "every range walks from the first key",
        "sparse",
        "range(begin // KV, visits)",
        "range(0, visits)",
        "full workspace",
    ),
    Defect(
        "the first numbers are those of the first range",
        "sparse",
        "numbers_of(source, first, KV, HOW)",
        "numbers_of(source, 0, KV, HOW)",
        "full workspace",
    ),
    Defect(
        "the second numbers are those of the first range",
        "sparse",
        "numbers_of(source, first + KV, KV, HOW)",
        "numbers_of(source, KV, KV, HOW)",
        "full workspace",
    ),
    Defect(
        "the first block copied is that of the first range",
        "sparse",
        "copy_block(slot, parts, number_ring.index(0), first,",
        "copy_block(slot, parts, number_ring.index(0), 0,",
        "split",
    ),
    Defect(
        "the first block dequantized is that of the first range",
        "sparse",
        "fetch_block(slot, parts, number_ring.index(0), first,",
        "fetch_block(slot, parts, number_ring.index(0), 0,",
        "block32",
    ),
    Defect(
        "rows past the request are written",
        "softmax",
        "gl.store(here, O, mask=(row < rows)[:, None])",
        "gl.store(here, O)",
        "70 heads",
    ),
    Defect(
        "references of rows past the request are written",
        "softmax",
        "gl.store(state, shift, mask=row < rows)",
        "gl.store(state, shift)",
        "split",
    ),
    Defect(
        "sums are where references belong",
        "softmax",
        "gl.store(state + 1, row_sum, mask=row < rows)",
        "gl.store(state, row_sum, mask=row < rows)",
        "split",
    ),
    Defect(
        "columns of partial results are as far apart as rows of 256",
        "softmax",
        "((row + first) * O.shape[1])[:, None]",
        "((row + first) * 256)[:, None]",
        "split",
    ),
    Defect(
        "every group has the requests of the first",
        "sparse",
        f"sequence = {RANGES}.first_sequence + program // {RANGES}.slots",
        f"sequence = program // {RANGES}.slots",
        "groups",
    ),
    Defect(
        "every merge has the requests of the first group",
        "sparse.launch",
        '"cu_ptr": arguments["cu_ptr"][first:]',
        '"cu_ptr": arguments["cu_ptr"][0:]',
        "groups",
    ),
    Defect(
        "every merge has the lengths of the first group",
        "sparse.launch",
        '"lengths_ptr": arguments["lengths_ptr"][first:]',
        '"lengths_ptr": arguments["lengths_ptr"][0:]',
        "groups",
    ),
    Defect(
        "the last request has no programs",
        "sparse.launch",
        "programs = here * variant.slots",
        "programs = (here - 1) * variant.slots",
        "split",
    ),
    Defect(
        "tiles of whole requests run with every group",
        "sparse.launch",
        "programs + (0 if first else tiles)",
        "programs + tiles",
        "groups",
    ),
]
RUNS = [("random", 1, "zero"), ("late", 0, "nan"), ("early", 0, "zero")]


def wrong(launch: ModuleType, built: BuiltCase, schedule: str, seed: int) -> str:
    """What gives a defect away in one run; empty if nothing does."""
    results = new_results(built)
    outcome = Outcome(results.out, results.lse, None)
    options = {"seed": seed, "schedule": schedule, "limits": Limits(steps=100_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in launch.calls(plan_of(built), built.operands, results):
            call.run()
    found = [str(finding) for report in reports for finding in report.findings]
    verdict = judge(built, outcome)
    return found[0] if found else "" if verdict.ok else verdict.report()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if defect.case == "groups":
        monkeypatch.setattr(latent_split, "PARTIAL_CAP", ONE_AT_A_TIME)
    launch = load_defect(replace(defect, case="sparse"), tmp_path)
    assert any(
        wrong(launch, on(CASES[defect.case], background), schedule, seed)
        for schedule, seed, background in RUNS
    )


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), CASES))
def test_without_a_defect_nothing_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "groups":
        monkeypatch.setattr(latent_split, "PARTIAL_CAP", ONE_AT_A_TIME)
    assert wrong(own_launch, on(CASES[name]), "random", 1) == ""
