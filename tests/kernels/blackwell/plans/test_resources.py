"""What the dense Blackwell kernel cannot run goes elsewhere, with the reason."""

from __future__ import annotations

import doctest
from dataclasses import replace
from itertools import pairwise, product
from types import ModuleType

import pytest

from openmla.errors import Unsupported
from openmla.explain.support import FEATURES
from openmla.kernels.blackwell import chip
from openmla.kernels.blackwell.chip import Partitioned
from openmla.kernels.blackwell.dense import resources
from openmla.kernels.blackwell.dense.resources import DenseKernel
from openmla.kernels.blackwell.pair.plan import PairKernel
from openmla.kernels.blackwell.sparse import plan as sparse_plan
from openmla.kernels.blackwell.sparse.plan import SparseKernel
from openmla.planning import NEWEST_TRITON, cached_plan, plan, target_by_name
from openmla.planning.models import MODELS, problem_for_model
from openmla.problem import Problem

V3 = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=1024, total_k=4096)
FP8 = replace(V3, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
SPARSE = replace(V3, form="sparse", heads=128, d_nope=512, d_v=512, page_size=64, topk=2048)
B200 = target_by_name("b200")


def kernel_of(problem: Problem) -> Partitioned:
    config = plan(problem, B200, "blackwell").config
    if problem.form == "dense":
        return DenseKernel(config, problem)
    return (PairKernel if config.ctas == 2 else SparseKernel)(config, problem)


def cached(problem: Problem, rope_dtype: str, page_size: int = 64) -> Problem:
    return replace(problem, rope="cache", rope_dtype=rope_dtype, page_size=page_size)


REFUSED = {
    "d_nope 192, d_v 192: 64/64, 64/128": replace(V3, d_nope=192, d_v=192),
    "page_size 4: pages of 8, 16, 32 or a multiple of 64 rows are served": cached(V3, "bf16", 4),
    "rope_dtype fp8_block64": cached(FP8, "fp8_block64"),
    "rope_dtype fp8_token": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "fp8_token"
    ),
    "q_dtype fp16, kv_dtype fp16, v_dtype fp16, rope_dtype bf16": cached(
        replace(V3, q_dtype="fp16", kv_dtype="fp16", v_dtype="fp16"), "bf16"
    ),
    "rope_dtype fp16": replace(V3, rope_dtype="fp16"),
    "d_rope 16: 32 or 64 are served": replace(V3, d_nope=64, d_rope=16, d_v=64),
    "d_rope 32 of fp8_block64 rows: 64 is served": replace(cached(V3, "fp8_block64"), d_rope=32),
    "d_rope 32: 64 is served": replace(FP8, d_rope=32),
}


@pytest.mark.parametrize("module", [resources, chip, sparse_plan])
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


@pytest.mark.parametrize(
    ("problem", "registers", "threads"),
    [
        (V3, [184, 184, 96, 48], 512),
        (replace(V3, total_q=64, total_k=64), [224, 48, 128, 112], 512),
        (replace(V3, d_nope=192, d_v=256), [216, 144, 144], 384),
        (replace(SPARSE, heads=64), [256, 96, 96, 48], 512),
    ],
    ids=["2Q", "1Q", "one accumulator", "sparse"],
)
def test_registers_are_divided_among_warp_groups(
    problem: Problem, registers: list[int], threads: int
) -> None:
    made = kernel_of(problem)
    assert [made.first_registers, *made._group_registers] == registers
    assert made.threads == threads and 128 * sum(registers) <= made.block_registers <= 65536


@pytest.mark.parametrize("name", FEATURES)
def test_regions_do_not_overlap_and_no_kernel_outgrows_the_chip(name: str) -> None:
    try:
        chosen = plan(FEATURES[name], B200, "blackwell")
    except Unsupported:
        pytest.skip("not Blackwell's")
    block = chosen.block
    assert block is not None
    regions = block.memory.regions
    assert all(a.offset + a.size <= b.offset for a, b in pairwise(regions))
    assert block.memory.used <= block.memory.limit


def test_what_a_problem_does_not_need_is_not_there() -> None:
    """Each of these adds arguments of partitions, buffers or barriers to a block."""
    more = [
        replace(V3, wants_lse=True),
        replace(V3, has_sink=True),
        cached(V3, "bf16"),
        cached(V3, "fp8_block64"),
        replace(FP8, has_k_scale=True),
    ]
    for problem in more:
        plain = FP8 if problem.q_dtype == "e4m3" else V3
        assert kernel_of(problem).arguments > kernel_of(plain).arguments
    assert "k_raw" in kernel_of(cached(V3, "fp8_block64")).barriers()
    assert "k_raw" not in kernel_of(cached(V3, "fp8_656")).barriers()
    names = {tile.name for tile in kernel_of(V3).tiles() if tile.size}
    assert names == {"Q", "Q rope", "K rope", "K and V in turn"}


@pytest.mark.parametrize(
    ("problem", "lines"),
    [
        (V3, ["correction factors go through tensor memory", "more than 2^8"]),
        (
            FP8,
            [
                "1Q's own, 230628 bytes, is not there",
                "V and the weights are bfloat16, not float8_e4m3fn",
                "V is upcast to bf16 by a kernel before",
                "more than 2^8",
            ],
        ),
        (
            replace(V3, d_nope=192, d_v=256),
            ["K and V take their own widths", "128 columns of tensor memory more"],
        ),
        (SPARSE, ["all of Q stays in shared memory", "a step is 256 keys", "before Triton 3.8"]),
        (replace(SPARSE, d_rope=0, rope="none"), ["rows have no rope, K is eight tiles"]),
        (
            replace(SPARSE, kv_dtype="fp8_656"),
            ["rows come as bf16", "dequantized once", "than 2^6"],
        ),
    ],
    ids=["2Q", "fp8", "one accumulator", "pair", "no rope", "fp8_656"],
)
def test_differences_from_the_original_are_named(problem: Problem, lines: list[str]) -> None:
    text = plan(problem, B200, "blackwell").explain()
    assert all(line in text for line in lines)
    assert f"compiled: {kernel_of(problem).block.memory.used} bytes" in text


@pytest.mark.parametrize("reason", REFUSED)
def test_the_portable_kernel_takes_over_and_says_why(reason: str) -> None:
    instead = cached_plan(REFUSED[reason], B200, "auto", NEWEST_TRITON)
    assert instead.backend == "portable"
    assert any(reason in line for line in instead.passed_over)


@pytest.mark.parametrize(
    "name", [m.name for m in MODELS.values() if m.rope == 64 and not m.one_row]
)
@pytest.mark.parametrize("dtype", ["bf16", "e4m3"])
def test_every_model_with_rope_64_runs_on_blackwell(name: str, dtype: str) -> None:
    for tokens in (64, 8192):
        problem = problem_for_model(name, tokens=tokens, form="dense", dtype=dtype)
        chosen = plan(problem, B200)
        assert chosen.backend == "blackwell" and chosen.runs_today


@pytest.mark.parametrize("v_dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("rope_dtype", ["e4m3", "bf16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_runs_unasked(v_dtype: str, rope_dtype: str, scaled: bool) -> None:
    """Also where shared memory is full: 128 + 0 columns have rings of four stages."""
    for d_rope, rope in ((64, "shared"), (0, "none")):
        problem = replace(
            *(FP8,),
            **{"d_rope": d_rope, "rope": rope, "v_dtype": v_dtype, "rope_dtype": rope_dtype},
            **{"has_q_scale": scaled, "has_k_scale": scaled, "wants_lse": True, "has_sink": True},
        )
        chosen = cached_plan(problem, B200, "auto", NEWEST_TRITON)
        assert chosen.backend == "blackwell" and chosen.block is not None
        assert chosen.block.memory.used <= chosen.block.memory.limit
        assert chosen.config.pv_dtype == "bfloat16"


def test_every_fp8_width_fits_beside_16_bit_values() -> None:
    """Tiles of 128 keys where two of them fit, else of 64."""
    for d_nope, d_v, rope_dtype in product(range(64, 385, 64), (64, 128, 256), ("e4m3", "bf16")):
        wide = replace(FP8, d_nope=d_nope, d_v=d_v, rope_dtype=rope_dtype, has_k_scale=True)
        keys = set()
        for problem in (wide, replace(wide, heads=1, total_q=64, total_k=64)):
            chosen = plan(problem, B200)
            assert chosen.backend == "blackwell" and chosen.block is not None
            assert chosen.block.memory.used <= chosen.block.memory.limit
            keys.add(chosen.config.BN)
        assert keys == {128} or (d_nope >= 192 and len(keys) == 1)  # bits depend on it


@pytest.mark.parametrize("rope_dtype", ["bf16", "fp8_656", "fp8_block32", "fp8_token"])
@pytest.mark.parametrize("page_size", [16, 64, 128, 256])
def test_rope_pages_run_on_blackwell(rope_dtype: str, page_size: int) -> None:
    assert plan(cached(V3, rope_dtype, page_size), B200).backend == "blackwell"


def test_one_query_tile_only_where_no_request_can_be_long() -> None:
    """Of 8 requests with 1016 tokens one may have 1009, whatever the mean is."""
    few = replace(V3, heads=1, total_q=120, batch=8)
    wide = replace(few, heads=128, total_q=1016)
    assert plan(few, B200).config.num_qo == 1
    assert plan(wide, B200).config.num_qo == 2
    assert "follows from all tokens" in plan(few, B200).explain()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_656"])
def test_keys_of_long_requests_of_few_queries_are_split(heads: int, kv_dtype: str) -> None:
    """By a pair of CTAs, where Triton has pairs. By the width of the table alone: a request's
    kernel does not follow from its neighbors."""
    rows = {"kv_dtype": kv_dtype, "v_dtype": kv_dtype, "rope_dtype": kv_dtype}
    pages = {"form": "latent", "topk": 0, "heads": heads, "total_k": 10**5} | rows
    long = replace(SPARSE, **pages, table_keys=32768)
    short = replace(long, table_keys=4096)
    for total_q, batch in ((1, 1), (32, 32), (4096, 1)):
        split, kept = (
            cached_plan(replace(p, total_q=total_q, batch=batch), B200, "auto", NEWEST_TRITON)
            for p in (long, short)
        )
        assert split.backend == kept.backend == "blackwell"
        assert split.config.ctas == 2 and split.variant.ranges.rows
        assert kept.config.ctas == (2 if heads > 64 else 1)
        before = cached_plan(split.problem, B200, "auto", (3, 7))
        assert before.backend == "portable"


@pytest.mark.parametrize("heads", [16, 128])
def test_rows_that_no_pair_reads_go_where_keys_are_split(heads: int) -> None:
    """By the width of the table alone: a request's kernel does not follow from its neighbors."""
    short = replace(
        *(SPARSE,),
        **{"form": "latent", "topk": 0, "heads": heads, "total_k": 10**6, "table_keys": 4096},
        **{"d_nope": 256, "d_v": 256},
    )
    long = replace(short, table_keys=32768)
    for total_q, batch in ((1, 1), (32, 32), (4096, 1)):
        kept, other = (
            cached_plan(replace(p, total_q=total_q, batch=batch), B200, "auto", NEWEST_TRITON)
            for p in (short, long)
        )
        assert (kept.backend, other.backend) == ("blackwell", "portable")
        why = "runs when named, a request may have 32768 keys"
        assert any(why in reason for reason in other.passed_over)
    assert cached_plan(long, B200, "blackwell", NEWEST_TRITON).backend == "blackwell"


def test_a_pool_whose_named_rows_may_exceed_a_workspace_is_dequantized_whole() -> None:
    # No other kernel reads FP8 rows: a workspace that they do not fit would stay empty.
    fp8 = replace(SPARSE, kv_dtype="fp8_656", v_dtype="fp8_656", rope_dtype="fp8_656", total_q=4096)
    problems = [replace(fp8, total_k=rows) for rows in (65536, 1_000_000)]
    small, large = (PairKernel(plan(p, B200).config, p).cache_read for p in problems)
    assert (small.rows, small.mapped) == (65536, 65536)
    assert (large.rows, large.mapped) == (1_000_000, 0)
