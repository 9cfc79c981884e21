"""Scores over FP4 keys on Hopper, in the simulator: right, clean, and the bits of e4m3 keys of the
same values, whose exponents lie as close together as a model's or anywhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import openmla.kernels.hopper as hopper
from gluon_sim import Kind, Limits, intercept
from indexer import cases
from indexer.score_cases import SCHEDULES, UNWRITTEN, paged, width_of
from kernels.mutants import RUNS, Defect, assert_found, controls, load_mutant, once
from openmla import IndexCache
from openmla.indexer.operands import ScoresOperands
from openmla.kernels.hopper.indexer import launch as launcher
from openmla.lab.testing.indexer import score_problems
from openmla.planning import plan

LIMITS = Limits(steps=400_000)
MANY_QUERIES = {"shared_queries": 0, "consumers": 3, "stages": 4}
HIGHEST = 6  # shift of a key's largest exponent


def fp4(
    q_lens: list[int], k_lens: list[int], heads: int, page_size: int, share: float = 0.02
) -> ScoresOperands:
    """Requests over FP4 keys, a share of whose exponents are drawn anew."""
    op = paged(q_lens, k_lens, heads, page_size, "mxfp4")
    assert isinstance(op.keys, IndexCache)
    cases.spread(op.keys, share)
    return op


def near(
    q_lens: list[int], k_lens: list[int], heads: int, page_size: int = 64
) -> tuple[ScoresOperands, ScoresOperands]:
    """FP4 keys whose blocks lie 0 to 11 octaves below their key's largest, and the e4m3 keys that
    have the same values, shift by shift."""
    op = paged(q_lens, k_lens, heads, page_size, "mxfp4")
    keys = op.keys
    assert isinstance(keys, IndexCache)
    g = torch.Generator().manual_seed(5)
    exponents = keys.exponents_view
    below = torch.randint(0, 12, exponents.shape, generator=g)
    below[..., 1] = 0
    exponents.copy_(torch.randint(100, 150, below.shape[:2], generator=g)[..., None] - below)
    other = IndexCache.allocate(num_pages=keys.num_pages, page_size=page_size)
    values, _ = keys.read(torch.arange(keys.rows))
    scale = torch.exp2(exponents.float().amax(-1) - 127 - HIGHEST)
    scaled = values.view(*scale.shape, 128) / scale[..., None]
    other.values_view.copy_(scaled.to(torch.float8_e4m3fn))
    assert torch.equal(other.values_view.float(), scaled)
    other.scales_view.copy_(scale)
    return op, replace(op, keys=other)


CASES = {
    "many queries": fp4([5, 0, 4, 7], [300, 9, 70, 129], 64, 64),
    "many queries, all keys wide": fp4([5, 0, 4, 7], [300, 9, 70, 129], 64, 64, share=1.0),
    "many queries, no exponent moved": fp4([9, 3], [100, 290], 64, 32, share=0.0),
    "many queries, 32 heads": fp4([20, 1, 2], [100, 200, 2], 32, 96),
    "many queries, 128 heads": fp4([7], [333], 128, 64),
    "many queries, the ring turns twice": fp4([7], [1300], 64, 64),
    "no keys": fp4([3, 2], [0, 5], 64, 64),
    "one query": fp4([1] * 5, [300, 65, 0, 129, 64], 64, 64),
    "one query, all keys wide": fp4([1] * 3, [200, 65, 129], 64, 64, share=1.0),
    "one query, 32 heads": fp4([1] * 3, [100, 200, 129], 32, 64),
    "one query, 128 heads": fp4([1] * 3, [100, 200, 129], 128, 64),
    "one query, the ring turns twice": fp4([1], [1700], 64, 64),
    "two queries": fp4([2, 1, 2], [300, 129, 200], 64, 32),
    "two queries, 32 heads": fp4([2, 1, 2], [300, 129, 200], 32, 64),
}


def run(
    op: ScoresOperands,
    schedule: str = "random",
    seed: int = 1,
    module: ModuleType = launcher,
    **changes: int,
) -> tuple[set[Kind], torch.Tensor]:
    """What the simulator finds, and the scores. Two programs divide the work."""
    out = torch.full((op.q.shape[0], width_of(op)), UNWRITTEN)
    chosen = plan(op.problem(out), "h200", "hopper")
    config = replace(chosen.config, **{"sm_count": 2, "chunk": 256} | changes)
    with intercept(limits=LIMITS, schedule=schedule, seed=seed) as reports:
        for call in module.calls(replace(chosen, config=config), op, out):
            call.run()
    return {kind for report in reports for kind in report.kinds()}, out


@pytest.mark.parametrize("name", CASES)
def test_right_and_clean(name: str) -> None:
    op = CASES[name]
    every = name in ("many queries", "two queries")
    for schedule, seed in SCHEDULES if every else SCHEDULES[2:3]:
        found, out = run(op, schedule, seed)
        assert (found, score_problems(op, out, UNWRITTEN)) == (set(), [])


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("many")])
def test_few_queries_have_the_bits_of_many(name: str) -> None:
    op = CASES[name]
    assert torch.equal(run(op)[1], run(op, **MANY_QUERIES)[1])


@pytest.mark.parametrize(("queries", "heads"), [(7, 64), (1, 64), (2, 32), (1, 128)])
def test_the_bits_of_e4m3_keys_of_the_same_values(queries: int, heads: int) -> None:
    op, same = near([queries, queries], [300, 200], heads)
    assert torch.equal(run(op)[1], run(same, consumers=3, stages=6)[1])


@pytest.mark.parametrize("queries", [5, 1])
def test_bits_depend_on_a_key_alone(queries: int) -> None:
    """Wide keys beside a key, and how work is divided, change nothing about its scores."""
    op = paged([queries], [300], 64, 64, "mxfp4")
    _, calm = run(op)
    before = op.keys.exponents_view.clone()
    cases.spread(op.keys, 0.02)
    _, wild = run(op)
    table = op.block_table[0].long()
    changed = (before != op.keys.exponents_view).any(-1)[table].flatten()[: calm.shape[1]]
    assert 5 < int(changed[:300].sum()) < 100
    assert torch.equal(calm[:, ~changed], wild[:, ~changed])
    assert torch.equal(wild, run(op, sm_count=3, chunk=128)[1])


@pytest.mark.parametrize("queries", [5, 1])
def test_eleven_octaves_are_near_and_twelve_are_not(queries: int) -> None:
    """Also where the block that far below has codes of 0 alone."""
    op = paged([queries], [130], 64, 64, "mxfp4")
    table = op.block_table[0].long()
    exponents = op.keys.exponents_view[table].view(-1, 4)
    codes = op.keys.codes_view[table].view(-1, 64)
    exponents[:130] = 130
    exponents[3, 0], exponents[4, 3], exponents[5, 2], exponents[6, 2] = 119, 118, 20, 20
    codes[5, 32:48] = torch.tensor([0x80, 0x08, 0x00, 0x88] * 4)
    op.keys.exponents_view[table] = exponents.view(-1, 64, 4)
    op.keys.codes_view[table] = codes.view(-1, 64, 64)
    found, out = run(op)
    assert (found, score_problems(op, out, UNWRITTEN)) == (set(), [])


@pytest.mark.parametrize("queries", [5, 1])
def test_nan_stays_in_its_key(queries: int) -> None:
    op = paged([queries], [200], 64, 64, "mxfp4")
    table = op.block_table[0].long()
    exponents = op.keys.exponents_view[table].view(-1, 4)
    exponents[70, 2] = 255
    exponents[80] = torch.tensor([255, 3, 3, 3])
    op.keys.exponents_view[table] = exponents.view(-1, 64, 4)
    found, out = run(op)
    assert (found, score_problems(op, out, UNWRITTEN)) == (set(), [])
    assert out[-1].isnan().nonzero().flatten().tolist() == [70, 80]


KEYS, MANY, FEW = "indexer.fp4_keys", "indexer.scores", "indexer.decode_scores"
WAIT_TILE = "        mbarrier.wait(bars.k_empty.index(stage), phase ^ 1)\n"
WAIT_CODES = "        mbarrier.wait(loads.k_ready.index(stage), phase)\n"
RELEASE_CODES = "        mbarrier.arrive(loads.k_empty.index(stage), count=1)\n"
CONVERT = "        convert_block(smem, fp4, stage, CFG)\n"
RING = "one query, the ring turns twice"
DEFECTS = [
    Defect(
        "signs are lost",
        None,
        KEYS,
        "SIGN = gl.constexpr(-0x7F7F7F80)",
        "SIGN = gl.constexpr(0)",
        "one query",
    ),
    Defect(
        "signs of even columns are those of odd ones",
        None,
        KEYS,
        "moved = words << 4",
        "moved = words",
        "one query",
    ),
    Defect(
        "signs of upper columns are those of lower ones",
        None,
        KEYS,
        "gl.constexpr(0x3726)",
        "gl.constexpr(0x1504)",
        "one query",
    ),
    Defect("upper columns are lower ones", None, KEYS, "places >> 16", "places", "one query"),
    Defect(
        "1.5 is 1", None, KEYS, "gl.constexpr(0x3C383000)", "gl.constexpr(0x38383000)", "one query"
    ),
    Defect(
        "0 is moved by a shift",
        None,
        KEYS,
        "gl.constexpr(0x08080800)",
        "gl.constexpr(0x08080808)",
        "one query",
    ),
    Defect(
        "scales are those of a block without a shift",
        None,
        KEYS,
        "* 0.015625",
        "* 1.0",
        "one query",
    ),
    Defect(
        "no key is wide",
        None,
        KEYS,
        "highest - lowest > HIGHEST - LOWEST",
        "highest - lowest > 1000",
        "twelve octaves",
    ),
    Defect(
        "a key is wide from 13 octaves on",
        None,
        KEYS,
        "highest - lowest > HIGHEST - LOWEST",
        "highest - lowest > HIGHEST - LOWEST + 1",
        "twelve octaves",
    ),
    Defect(
        "blocks of a wide key keep their shifts",
        None,
        KEYS,
        "gl.where(is_wide[:, None], 0,",
        "gl.where((highest < 0)[:, None], 0,",
        "one query",
    ),
    Defect(
        "only the first warp's wide keys are found",
        None,
        KEYS,
        "return gl.max(fp4.any_wide.index(stage).load(ALL), 0) > 0",
        "return gl.min(fp4.any_wide.index(stage).load(ALL), 0) > 0",
        "one query",
    ),
    Defect(
        "wide keys are found and not told",
        None,
        KEYS,
        "gl.max(fp4.any_wide.index(stage).load(ALL), 0) > 0",
        "gl.max(fp4.any_wide.index(stage).load(ALL), 0) > 1",
        "one query",
    ),
    Defect(
        "wide keys have the exponents of their first block",
        None,
        KEYS,
        "powers((found >> (8 * b)) & EXPONENTS)",
        "powers(found & EXPONENTS)",
        "one query",
    ),
    Defect(
        "a block of a wide key is multiplied with the first columns of queries",
        None,
        KEYS,
        "columns = q.slice(b * BLOCK, BLOCK, dim=1)",
        "columns = q.slice(0, BLOCK, dim=1)",
        "one query",
    ),
    Defect(
        "wide keys have the weights of the first 32 heads",
        None,
        KEYS,
        "head + g * BLOCK",
        "head",
        "one query",
    ),
    Defect(
        "wide keys have the first query's scores",
        None,
        KEYS,
        "rows.index(n * GROUPS + g)",
        "rows.index(g)",
        "two queries",
    ),
    Defect(
        "wide keys see what the first query sees",
        None,
        KEYS,
        "low = gl.where(number == 0, windows.first.low, windows.second.low)\n",
        "number = number * 0\n    low = windows.first.low\n",
        "many queries",
    ),
    Defect(
        "wide keys are written outside of windows",
        None,
        KEYS,
        "inside = (found != 0) & (keys >= window.low) & (keys < window.high)",
        "inside = found != 0",
        "one query",
    ),
    Defect(
        "keys that are not wide are computed as if they were",
        None,
        KEYS,
        "inside = (found != 0) & ",
        "inside = ",
        "one query",
    ),
    Defect(
        "codes are overwritten while they are read",
        Kind.RACE,
        KEYS,
        CONVERT + "        fence_async_shared()\n" + RELEASE_CODES,
        RELEASE_CODES + CONVERT + "        fence_async_shared()\n",
        RING,
    ),
    Defect("codes are read before they are there", None, KEYS, WAIT_CODES, "", "one query"),
    Defect("tiles are overwritten while they are multiplied", Kind.RACE, KEYS, WAIT_TILE, "", RING),
    Defect(
        "tiles are not fenced",
        Kind.FENCE,
        KEYS,
        CONVERT + "        fence_async_shared()\n",
        CONVERT,
        "one query",
    ),
    Defect(
        "an item is announced over one that the converter reads",
        Kind.RACE,
        MANY,
        "NC + 1 if FP4 else NC",
        "NC",
        "many queries, the ring turns twice",
    ),
    Defect(
        "few: an item is announced over one that the converter reads",
        Kind.RACE,
        FEW,
        "NC + 2 if FP4 else NC",
        "NC",
        "short requests",
    ),
    Defect(
        "tiles are released twice, before and after their wide keys are finished",
        Kind.ARRIVE,
        MANY,
        "if j == SUB - 1 and fp4 is None:",
        "if j == SUB - 1:",
        "many queries, the ring turns twice",
    ),
    Defect(
        "few: the converter forgets the blocks of items before",
        None,
        FEW,
        "loads, it, blocks, WHO, 2, CFG)\n        it += blocks\n",
        "loads, it, blocks, WHO, 2, CFG)\n",
        "one query",
    ),
    Defect(
        "few: both converters convert the same blocks",
        Kind.RACE,
        FEW,
        "loads, it, blocks, WHO, 2, CFG)",
        "loads, it, blocks, 0, 2, CFG)",
        RING,
    ),
]


def octaves() -> ScoresOperands:
    """One key in four has a block twelve octaves below the others."""
    op = paged([1], [130], 64, 64, "mxfp4")
    op.keys.exponents_view[:, :, 1:] = 130
    op.keys.exponents_view[:, :, 0] = torch.tensor([118, 130, 125, 119]).repeat(16)
    op.q[:, :, 32:] = 0  # nothing but the low block counts
    return op


DEFECT_CASES = {
    **CASES,
    "twelve octaves": octaves(),
    "short requests": fp4([1] * 20, [65] * 20, 64, 64),
}


def judged(module: ModuleType, case: str, schedule: str, seed: int) -> tuple[set[Kind], bool]:
    op = DEFECT_CASES[case]
    found, out = run(op, schedule, seed, module, sm_count=1)
    return found, not score_problems(op, out, UNWRITTEN)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    edit = once(defect.old, defect.new)
    mutant = load_mutant(hopper, defect.file, edit, "indexer.launch", tmp_path)
    assert_found(defect.kind, partial(judged, mutant, defect.case))


@pytest.mark.parametrize("case", controls((d.case for d in DEFECTS), CASES))
def test_the_kernel_itself_is_clean_and_right(case: str) -> None:
    for schedule, seed in RUNS[:3]:
        assert judged(launcher, case, schedule, seed) == (set(), True)
