"""mla_attend on Hopper, on the simulator: lists and spans, one or two sources in one softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from gluon_sim import intercept
from kernels.judging import assert_clean
from openmla import dispatch, reference
from openmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from openmla.errors import Unsupported
from openmla.kernels.gluon.dequantize.launch import Filling, dequantized_sources
from openmla.kernels.hopper.latent.plan import most_places
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.lab.testing.sources import CACHES
from openmla.operands import AttendOperands, SparseOperands, Weights
from openmla.planning import Plan, plan, target_by_name
from openmla.planning.dequantize import Workspace
from openmla.problem import Problem, RowSource
from openmla.sources import Listed
from two_sources import Setup, as_lists, new_results, one_token, operands, read_by

FEW = Setup(first=(100,), second=(210,), lengths=False)
SETUPS = {
    "two lists": Setup(),
    "two lists without lengths, 70 heads": Setup(
        lengths=False, heads=70, first=(1, 128, 65), second=(130, 64, 0), pages=(256, 64)
    ),
    "span and list": Setup(kinds=("span", "list"), pages=(64, 2), seed=1),
    "list and span": Setup(kinds=("list", "span"), pages=(2, 64), sink=False, seed=2),
    "two spans": Setup(kinds=("span", "span"), pages=(16, 2), seed=3),
    "span": Setup(kinds=("span",), pages=(64,), first=(65, 0, 63, 64, 130, 1), seed=4),
    "bf16 span and V4's list": Setup(
        kinds=("span", "list"), formats=("bf16", "fp8_584"), pages=(16, 2), seed=5
    ),
    "V4's list and bf16 list": Setup(formats=("fp8_584", "bf16"), seed=6),
    "two lists, bf16": Setup(formats=("bf16", "bf16"), seed=7),
    "span and list, bf16": Setup(
        kinds=("span", "list"), formats=("bf16", "bf16"), pages=(2, 64), heads=70, seed=8
    ),
    "span, bf16": Setup(
        kinds=("span",), formats=("bf16",), pages=(24,), first=(65, 0, 63, 64, 130, 1), seed=9
    ),
}
QUICK = {"two lists", "span and list", "span", "an empty first source", "bf16 span and V4's list"}
QUICK |= {"span, bf16", "two lists, bf16"}
FEW_SETUPS = {
    "two lists": replace(FEW, pages=(64, 256)),
    "two lists, lengths, 70 heads": replace(
        FEW, heads=70, lengths=True, first=(65, 128), second=(192, 201)
    ),
    "span and list": replace(FEW, kinds=("span", "list"), seed=1),
    "two spans": replace(FEW, kinds=("span", "span"), pages=(64, 2), seed=2),
    "an empty first source": replace(FEW, first=(0,), second=(257,), seed=3),
    "an empty second source": replace(FEW, first=(300,), second=(0,), seed=4),
    "span": Setup(kinds=("span",), pages=(16,), first=(300,), seed=5),
}


def names(setups: dict[str, Setup]) -> list[Any]:
    """Those that show something else than the others come first; the rest takes longer."""
    return [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in setups]


def plan_of(op: AttendOperands, sm_count: int = 2) -> Plan:
    """In one launch: on so few SMs that no call has few queries, and that programs do several."""
    found = plan_on("h200", op, new_results(op), sm_count)
    assert found.kernel_name == "attend" and found.variant.few is None
    return read_by(found, "in_kernel")


def few_plan_of(op: AttendOperands) -> Plan:
    """In three launches, as the H200's plan is."""
    found = plan_on("h200", op, new_results(op))
    assert found.kernel_name == "attend" and found.variant.few is not None
    return found


def attend(op: AttendOperands, chosen: Plan | None = None, **options: object) -> Outcome:
    outcome, reports = simulated(chosen or plan_of(op), op, new_results(op), **options)
    assert_clean(reports)
    return outcome


def assert_right(op: AttendOperands, outcome: Outcome) -> None:
    verdict = compare(outcome, reference.of(op), columns=512)
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("name", names(SETUPS))
def test_right_and_deaf_to_poison(name: str) -> None:
    """Programs do several work items, each of which ends elsewhere in its blocks."""
    op = operands(SETUPS[name])
    outcome = attend(op, seed=1, schedule="unfair")
    assert_right(op, outcome)
    assert not differences(attend(operands(SETUPS[name], poisoned=False)), outcome)
    empty = reference.of(op).keys == 0
    assert bool(empty.any()) == ("without" not in name)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_query_that_sees_no_key_is_not_read_into_its_result(value: float) -> None:
    """Entries that do not count hide its scores, which are NaN."""
    op = operands(SETUPS["two lists"])
    token = int((reference.of(op).keys == 0).nonzero()[-1])
    op.q[token, 1, 3] = value
    assert_right(op, attend(op, seed=1))


V41 = ("fp8_528_v41", "fp4_288")
V41_SPLIT = ("fp8_528_v41_split", "fp4_288_split")
V41_SETUPS = {
    "V4.1, span and list": Setup(kinds=("span", "list"), formats=V41, pages=(32, 64)),
    "V4.1, split, 70 heads": Setup(formats=V41_SPLIT, pages=(64, 2), heads=70, seed=1),
    "V4.1, FP4 first": Setup(
        kinds=("list", "span"), formats=("fp4_288_split", "fp8_528_v41"), pages=(16, 24), seed=2
    ),
    "V4.1 window and V4 rows": Setup(
        kinds=("span", "list"), formats=("fp8_528_v41_split", "fp8_584"), seed=3
    ),
    "bf16 window and FP4 rows": Setup(
        kinds=("span", "span"), formats=("bf16", "fp4_288"), pages=(24, 64), seed=4
    ),
    "V4.1, window alone": Setup(
        kinds=("span",), formats=("fp8_528_v41",), first=(65, 0, 63, 64, 130, 1), seed=5
    ),
    "FP4 rows alone": Setup(
        kinds=("span",), formats=("fp4_288",), first=(65, 0, 63, 64, 130, 1), seed=6
    ),
    "two windows": Setup(formats=("fp8_528_v41", "fp8_528_v41_split"), lengths=False, seed=7),
    "FP4 rows, in both arrangements": Setup(formats=("fp4_288_split", "fp4_288"), seed=8),
    "V4 window and FP4 rows": Setup(
        kinds=("span", "list"), formats=("fp8_584", "fp4_288"), pages=(64, 16), seed=9
    ),
    "FP4 rows and V4's list": Setup(formats=("fp4_288_split", "fp8_584"), seed=10),
    "FP4 rows and bf16 list": Setup(formats=("fp4_288", "bf16"), sink=False, seed=11),
}
V41_QUICK = ("V4.1, span and list", "V4.1, split, 70 heads", "FP4 rows alone")
V41_FEW = {
    "V4.1, span and list": replace(FEW, kinds=("span", "list"), formats=V41, pages=(32, 64)),
    "V4.1, split, 70 heads": replace(
        FEW, formats=V41_SPLIT, heads=70, lengths=True, first=(65, 128), second=(192, 201)
    ),
    "FP4 rows and V4's list": replace(FEW, formats=("fp4_288", "fp8_584"), seed=1),
    "V4's list and V4.1 window": replace(FEW, formats=("fp8_584", "fp8_528_v41"), seed=2),
    "V4.1, window alone": Setup(
        kinds=("span",), formats=("fp8_528_v41",), pages=(16,), first=(300,), seed=3
    ),
    "FP4 rows alone": Setup(
        kinds=("span",), formats=("fp4_288_split",), pages=(16,), first=(300,), seed=4
    ),
}


def quick_first(setups: dict[str, Setup]) -> list[Any]:
    """V4.1's real pair, and rows of e2m1 alone; the others take longer."""
    quick = {*V41_QUICK}
    return [pytest.param(n, marks=() if n in quick else pytest.mark.long) for n in setups]


def over_bf16_rows(op: AttendOperands) -> AttendOperands:
    """The same rows, in bf16."""
    sources = []
    for source in op.sources:
        pool = source.rows
        rows = pool.gather(torch.arange(pool.rows)).bfloat16()
        wide = openmla.LatentCache(rows.view(pool.num_pages, -1, 512), None, 512, 0, "bf16")
        name = "rows" if isinstance(source, Listed) else "cache"
        sources.append(replace(source, **{name: wide}))
    return replace(op, sources=tuple(sources))


@pytest.mark.parametrize("name", quick_first(V41_SETUPS))
def test_rows_of_v41_are_read_where_they_lie(name: str) -> None:
    """In one launch, deaf to poison, with the bits of pools that are dequantized whole before: a
    launch for each quantized one, then one that has the bits of the same rows in bf16."""
    op = operands(V41_SETUPS[name])
    planned = plan_on("h200", op, new_results(op), 2)
    assert planned.kernel_name == "attend" and planned.word == "simulated" and planned.runs_today
    outcome, reports = simulated(plan_of(op), op, new_results(op), seed=1, schedule="unfair")
    assert_clean(reports)
    assert len(reports) == 1
    assert_right(op, outcome)
    clean = operands(V41_SETUPS[name], poisoned=False)
    assert not differences(attend(clean, seed=2), outcome)
    once = read_by(planned, "whole")
    wide, reports = simulated(once, op, new_results(op), seed=2, schedule="random")
    assert_clean(reports)
    assert len(reports) == 1 + sum(x.kv_dtype != "bf16" for x in once.problem.sources)
    assert not differences(wide, outcome)
    assert not differences(attend(over_bf16_rows(clean)), outcome)


@pytest.mark.parametrize("name", quick_first(V41_FEW))
def test_few_queries_over_rows_of_v41_have_the_bits_of_one_launch(name: str) -> None:
    op = operands(V41_FEW[name])
    few = attend(op, few_plan_of(op), seed=1, schedule="unfair")
    assert_right(op, few)
    assert not differences(attend(operands(V41_FEW[name], poisoned=False)), few)


def wild_pool(name: str) -> openmla.LatentCache:
    """48 rows of drawn bytes: all elements beside all scales, NaN and the smallest."""
    pool = CACHES[name](3, 16, False)
    draw = torch.Generator().manual_seed(0)
    for x in (pool.data, pool.scales):
        if x is not None:
            bytes_of = x.view(torch.uint8)
            drawn = torch.randint(0, 256, bytes_of.shape, generator=draw, dtype=torch.uint8)
            bytes_of.copy_(drawn)
    scales = pool.field("scales")
    assert scales is not None
    scales.view(torch.uint8)[0, :, 0] = torch.tensor([0, 1, 254, 255] * 4, dtype=torch.uint8)
    return pool


V41_NAMES = [*V41, *V41_SPLIT]


@pytest.mark.parametrize("name", V41_NAMES)
def test_every_byte_of_v41_has_its_value(name: str) -> None:
    """As `gather` has it, bit by bit, where pools are dequantized whole."""
    pool = wild_pool(name)
    listed = Listed(pool, torch.zeros(1, 1, dtype=torch.int32))
    op = AttendOperands(torch.zeros(1, 3, 512).bfloat16(), (listed, listed), 512, Weights(0.05))
    found = dequantized_sources(Filling(Workspace(False, pool.rows, False), (512, 0), 2), op)
    wide = found.operands.sources[0].rows
    assert isinstance(wide, openmla.LatentCache)
    with intercept(outputs={"wide": wide.data}, seed=1) as reports:
        found.calls[0].run()
    assert_clean(reports)
    want, got = pool.gather(torch.arange(pool.rows)).bfloat16(), wide.data.view(-1, 512)
    assert torch.equal(want.isnan(), got.isnan())
    assert torch.equal(*(x.nan_to_num(0, posinf=1, neginf=-1) for x in (want, got)))
    assert want.isnan().any() and (want == 0).any()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        if (name, way) in (("fp8_528_v41", "in one launch"), ("fp4_288_split", "few queries"))
        else pytest.param(name, way, marks=pytest.mark.long)
        for name in V41_NAMES
        for way in ("in one launch", "few queries")
    ],
)
def test_every_byte_of_v41_has_its_value_in_the_kernel(name: str, way: str) -> None:
    """A query that sees one row has that row as its output, bit by bit."""
    pool = wild_pool(name)
    codes = pool.data.view(torch.uint8)[1:, :, :512]
    if name in ("fp8_528_v41", "fp8_528_v41_split"):
        codes[codes & 0x7F == 0x7F] = 0x7E  # or every row would have a NaN
    few = way == "few queries"
    lists = torch.full((pool.rows, 260 if few else 1), -1, dtype=torch.int32)
    lists[:, 0] = torch.arange(pool.rows)
    none = torch.full((pool.rows, 1), -1, dtype=torch.int32)
    q = torch.zeros(pool.rows, 1, 512).bfloat16()
    got = []
    for rows in torch.arange(pool.rows).split(4 if few else pool.rows):
        sources = (Listed(pool, lists[rows]), Listed(pool, none[rows]))
        op = AttendOperands(q[rows], sources, 512, Weights(0.05))
        chosen = few_plan_of(op) if few else plan_of(op)
        got.append(attend(op, chosen).out[:, 0])
        if few:
            break
    whole = torch.cat(got)
    want = pool.gather(torch.arange(len(whole))).bfloat16()
    finite = want.isfinite().all(1)
    assert finite.any() or (few and "fp8" in name)
    # What is not finite makes the score, and so all columns, NaN.
    assert whole[~finite].isnan().all()
    assert torch.equal(whole[finite], want[finite])


@pytest.mark.parametrize("name", V41_NAMES)
def test_one_list_of_v41_rows_is_a_sparse_call(name: str) -> None:
    """`mla_prefill_sparse` reads them in the kernel too, with the bits of the same rows in bf16."""
    setup = Setup(kinds=("list",), formats=(name,), pages=(24,), seed=12)
    outcome = in_kernel(operands(setup))
    assert_right(operands(setup), outcome)
    plain = over_bf16_rows(operands(setup, poisoned=False))
    assert not differences(in_kernel(plain), outcome)


def test_large_pools_of_v41_are_read_where_they_lie() -> None:
    """As V4's are: a workspace for the pools of one prompt, none for those of a server."""
    rows = dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), "fp8_528_v41")
    entries = RowSource(kv_dtype="fp4_288_split", page_size=64, topk=512, total_k=10**7)
    server = plan(v4(**rows, second=entries, total_k=10**6), "h200")
    assert (server.backend, server.kernel_name) == ("hopper", "attend")
    assert server.config.cache_read.mode == "in_kernel" and server.variant.workspace is None
    few = plan(v4(**rows, second=entries, total_k=10**6, total_q=4, table_keys=1024), "h200")
    assert few.backend == "hopper" and few.variant.few is not None
    prompt = plan(v4(**rows, second=None, total_k=2176), "h200")
    assert prompt.config.cache_read.mode == "workspace"
    for form in ({"form": "sparse", "topk": 2048}, {"form": "latent", "page_size": 64}):
        one: dict[str, Any] = {"heads": 64, "d_nope": 512, "d_rope": 0, "d_v": 512, "total_q": 64}
        alone = Problem(**form, **one, **rows, rope="none", total_k=10**7)
        read = plan(alone, "h200").config.cache_read
        same = replace(alone, **dict.fromkeys(rows, "fp8_584"))
        assert read == plan(same, "h200").config.cache_read


ONCE = ("two lists", "span", "bf16 span and V4's list")


@pytest.mark.parametrize("name", ONCE)
def test_pools_that_are_dequantized_once_have_the_bits_of_one_launch(name: str) -> None:
    """A launch for each pool of V4's rows, and one over bf16 rows."""
    op = operands(SETUPS[name])
    once = read_by(plan_of(op), "whole")
    outcome, reports = simulated(once, op, new_results(op), seed=1, schedule="unfair")
    assert_clean(reports)
    quantized = sum(x.kv_dtype == "fp8_584" for x in once.problem.sources)
    assert len(reports) == quantized + 1
    assert not differences(attend(op), outcome)


def test_neighbors_share_what_is_dequantized() -> None:
    """2048 queries of a prompt see few rows often; of 2048 requests each has rows of its own."""
    prompt = v4(second=None, total_k=2176)
    assert plan(prompt, "h200").config.cache_read.mode == "workspace"
    own = plan(v4(second=None, total_k=2048 * 256), "h200").config.cache_read
    assert own.mode == "in_kernel"
    assert "16 steps of a program are worth 96000 rows, not 524288" in own.explain()
    assert plan(replace(prompt, total_q=128), "h200").config.cache_read.mode == "in_kernel"


@pytest.mark.parametrize("name", names(FEW_SETUPS))
def test_few_queries_have_the_bits_of_one_launch(name: str) -> None:
    setup = FEW_SETUPS[name]
    op = operands(setup)
    few = attend(op, few_plan_of(op), seed=1, schedule="unfair")
    assert_right(op, few)
    assert not differences(attend(operands(setup, poisoned=False)), few)


@pytest.mark.long
@pytest.mark.parametrize("kinds", [("list", "list"), ("span", "list")])
def test_the_ring_of_values_turns_twice_and_a_source_ends_in_it(kinds: tuple[str, str]) -> None:
    """With 32 columns of V to a program, eight steps are on their way."""
    setup = Setup(kinds=kinds, first=(1090,), second=(1025,), pages=(64, 64))
    op = operands(setup)
    chosen = few_plan_of(op)
    assert chosen.variant.few.width == 32 and chosen.variant.few.steps >= 17
    few = attend(op, chosen, seed=1)
    assert_right(op, few)
    assert not differences(attend(op), few)


@pytest.mark.parametrize("name", ["span and list", "two lists"])
def test_bits_of_a_row_are_its_own(name: str) -> None:
    op = operands(SETUPS[name])
    whole = attend(op)
    for token in (1, 5):
        alone = attend(one_token(op, token))
        here = slice(token, token + 1)
        assert whole.lse is not None
        assert not differences(alone, Outcome(whole.out[here], whole.lse[here]))


@pytest.mark.parametrize("name", names({n: SETUPS[n] for n in SETUPS if "span" in n}))
def test_a_span_has_the_bits_of_the_list_of_its_rows(name: str) -> None:
    """Positions that name no row keep their places."""
    op = operands(SETUPS[name])
    lists = as_lists(op)
    expected = in_kernel(lists) if len(lists.sources) == 1 else attend(lists)
    assert not differences(attend(op), expected)


def in_kernel(op: AttendOperands) -> Outcome:
    """One list as `mla_prefill_sparse` computes it, in one launch that reads the cache itself."""
    [only] = op.sources
    assert isinstance(only, Listed)
    sparse = SparseOperands(op.q, only.rows, only.indices, only.lengths, 512, op.weights)
    chosen = plan_on("h200", sparse, new_results(op), 2)
    read = chosen.config.cache_read
    if read.mode != "plain":
        read = read.by("in_kernel", only.count, only.count)
    chosen = replace(chosen, config=replace(chosen.config, few=None, cache_read=read))
    outcome, reports = simulated(chosen, sparse, new_results(op))
    assert_clean(reports)
    return outcome


def test_two_lists_that_meet_at_a_block_are_one_list() -> None:
    """Of 64 and 70 rows of one cache: the bits of one list of 134."""
    op = operands(Setup(first=(64, 64), second=(70, 3), pages=(16, 16), lengths=False))
    first, second = op.sources
    assert isinstance(first, Listed) and isinstance(second, Listed)
    both = replace(op, sources=(first, replace(second, rows=first.rows)))
    pool = first.rows
    assert isinstance(pool, openmla.LatentCache)
    every = torch.arange(pool.rows)
    pool.append(torch.randn(len(every), 512), None, every)
    lists = torch.cat([first.indices, second.indices], 1)
    whole = replace(op, sources=(Listed(pool, lists),))
    assert not differences(attend(both), in_kernel(whole))


def test_rows_of_a_tensor_beside_rows_of_a_cache() -> None:
    """A tensor has no pages."""
    op = operands(SETUPS["V4's list and bf16 list"])
    first, second = op.sources
    assert isinstance(second, Listed) and isinstance(second.rows, openmla.LatentCache)
    tensor = second.rows.data.reshape(-1, 512)
    changed = replace(op, sources=(first, replace(second, rows=tensor)))
    assert not differences(attend(changed), attend(op))


def test_sources_without_rows() -> None:
    """Pools, tables and lists of nothing: alone, they clear the results."""
    op = operands(Setup(first=(65, 3), second=(1, 1), pages=(64, 64)))
    first, second = op.sources
    assert isinstance(first, Listed) and isinstance(second, Listed)
    nothing = replace(second, indices=second.indices[:, :0], lengths=None)
    expected = attend(replace(op, sources=(first, nothing)))
    assert_right(replace(op, sources=(first, nothing)), expected)
    table = torch.zeros(0, 3, dtype=torch.int32)
    zeros = torch.zeros(2, dtype=torch.int32)
    assert isinstance(second.rows, openmla.LatentCache)
    no_request = openmla.Span(second.rows, table, zeros, zeros, zeros + 99)
    for sources in ((first, no_request), (no_request, first)):
        assert not differences(attend(replace(op, sources=sources)), expected)
    cleared = attend(replace(op, sources=(no_request, nothing)))
    assert not cleared.out.view(torch.int16).any()
    assert cleared.lse is not None and bool((cleared.lse == -torch.inf).all())


def v4(**changes: object) -> Problem:
    window: dict[str, object] = {
        "kv_dtype": "fp8_584",
        "page_size": 64,
        "span": True,
        "table_keys": 16384,
        "total_k": 10**6,
    }
    entries = RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=10**6)
    sizes = {"heads": 64, "d_nope": 512, "d_rope": 0, "d_v": 512, "total_q": 2048}
    fields: dict[str, Any] = {**sizes, "second": entries, **window, **changes}
    return Problem("sparse", has_sink=True, **fields)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"second": None},
        {"heads": 8},
        {"heads": 128, "wants_lse": True},
        {"second": RowSource(kv_dtype="fp8_584", page_size=2, span=True, table_keys=8192)},
        {"page_size": 1000},
        {"second": RowSource(topk=512)},
        {"kv_dtype": "bf16"},
    ],
)
def test_what_is_served(changes: dict[str, object]) -> None:
    chosen = plan(v4(**changes), "h200")
    assert (chosen.backend, chosen.kernel_name) == ("hopper", "attend")
    assert Plan.from_json(chosen.to_json()) == chosen
    assert chosen.config.cache_read.mode == "in_kernel"


def test_bf16_sources_are_read_as_they_are() -> None:
    plain = v4(kv_dtype="bf16", second=RowSource(topk=512, total_k=4096), total_q=4)
    chosen = plan(plain, "h200")
    assert (chosen.backend, chosen.kernel_name) == ("hopper", "attend")
    assert chosen.config.cache_read.mode == "plain"
    assert chosen.variant.few is None and not chosen.variant.rows[0].dynamic


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"second": RowSource(kv_dtype="fp8_656", page_size=64, topk=512)}, "of a second source"),
        (
            {"kv_dtype": "fp8_656"},
            "kernel attend has spans and second sources, of bf16, V4 and V4.1 rows",
        ),
        ({"d_rope": 64, "d_nope": 448, "d_v": 448}, "d_nope 448"),
        ({"aligned_16": False}, "16 bytes"),
        ({"wants_max_logits": True}, "wants_max_logits True: not served"),
    ],
)
def test_what_is_left_to_the_portable_kernel(changes: dict[str, object], reason: str) -> None:
    chosen = plan(v4(**changes), "h200")
    assert chosen.backend == "portable"
    assert reason in " ".join(chosen.passed_over)


def test_tables_whose_positions_cannot_be_counted_are_refused() -> None:
    """By both: a block past the last position would be past 2^31."""
    with pytest.raises(Unsupported, match=r"places of a query.*positions or rows"):
        plan(v4(table_keys=2**31 - 64), "h200")


@pytest.mark.parametrize("which", [0, 1])
def test_scales_that_are_no_words_are_left_to_the_portable_kernel(which: int) -> None:
    """Of either source: the kernel reads four exponents at once."""
    op = operands(Setup(first=(1,), second=(1,), pages=(2, 2)))
    source = op.sources[which]
    assert isinstance(source, Listed) and isinstance(source.rows, openmla.LatentCache)
    pages, size, _ = source.rows.data.shape
    scales = torch.zeros(pages, size, 10, dtype=torch.uint8)[..., 2:]
    odd = replace(source, rows=replace(source.rows, scales=scales))
    sources = tuple(odd if i == which else x for i, x in enumerate(op.sources))
    changed = replace(op, sources=sources)
    assert op.problem(new_results(op)).aligned_16
    assert plan(changed.problem(new_results(op)), "h200").backend == "portable"


def test_few_queries_by_the_places_of_both_sources() -> None:
    window = {"span": False, "table_keys": 0, "topk": 100}
    few = plan(v4(total_q=4, **window), "h200").variant.few
    assert few.topk == most_places(v4(**window)) == 640 and few.steps == 5
    assert plan(v4(total_q=2048), "h200").variant.few is None
    assert plan(v4(total_q=4, table_keys=2**20), "h200").variant.few is None  # a large workspace


@pytest.mark.parametrize(
    ("formats", "kv_format"),
    [(("fp8_584", "fp8_584"), None), (V41_SPLIT, "V41"), (V41, None)],
    ids=["V4", "V4.1, older", "V4.1, newest"],
)
@pytest.mark.parametrize("queries", [1, 9])
def test_flash_mla_over_two_caches_on_an_h200(
    queries: int,
    formats: tuple[str, str],
    kv_format: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FlashMLA's call reaches the Hopper kernels by itself: three launches, or one."""
    second = (260 if queries == 1 else 1,) * queries
    setup = Setup(first=(70,) * queries, second=second, heads=16, formats=formats)
    if formats != ("fp8_584", "fp8_584"):
        setup = replace(setup, spare=4096)  # too many rows to dequantize them all
    op = operands(setup)
    first, second = op.sources
    assert isinstance(first, Listed) and isinstance(second, Listed)
    target = target_by_name("h200")
    monkeypatch.setattr(dispatch, "device_target", lambda device: replace(target, sm_count=6))
    caches = []
    for source in (first, second):
        assert isinstance(source.rows, openmla.LatentCache)
        data, row = source.rows.data.view(torch.uint8), source.rows.layout.row_bytes
        pages, size, _ = data.shape
        raw = data.as_strided((pages, size, 1, row), (data.stride(0), row, row, 1))
        caches.append(raw.view(torch.float8_e4m3fn))
    with intercept(resident=2) as reports:
        out, lse = flash_mla_with_kvcache(
            op.q[:, None],
            caches[0],
            None,
            None,
            512,
            get_mla_metadata()[0],
            None,
            softmax_scale=op.weights.scale,
            is_fp8_kvcache=True,
            indices=first.indices[:, None],
            attn_sink=op.weights.sink,
            extra_k_cache=caches[1],
            extra_indices_in_kvcache=second.indices[:, None],
            topk_length=first.lengths,
            extra_topk_length=second.lengths,
            kv_format=kv_format,
        )
    assert_clean(reports)
    assert len(reports) == (3 if queries == 1 else 1)
    assert_right(op, Outcome(out[:, 0], lse[:, :, 0]))
