"""mla_attend on a Hopper GPU: lists and spans of DeepSeek-V4's rows and of bf16 rows, one or two in
one softmax."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import openmla
from gpu.on_device import DEVICE, on_hopper
from openmla import reference
from openmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from openmla.dispatch import plan_call
from openmla.kernels.launch import launch
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.operands import AttendOperands, Weights
from openmla.sources import Listed, Source
from two_sources import Setup, new_results, on_device, operands, read_by, some_tokens

pytestmark = on_hopper

EDGES = Setup(heads=64)
DECODE = Setup(first=(128, 128, 1, 128), second=(512, 512, 3, 500), heads=64)
# 40 tokens of every length around a block.
MANY = Setup(
    first=tuple(7 * t % 130 for t in range(40)),
    second=tuple(11 * t % 193 for t in range(40)),
    heads=16,
)
SETUPS = {
    "two lists": EDGES,
    "two lists without lengths": replace(EDGES, lengths=False, pages=(256, 2)),
    "two lists, 128 heads": replace(EDGES, heads=128, sink=False),
    "two lists, 8 heads": replace(EDGES, heads=8, pages=(64, 64), scale=0.3),
    "span and list": replace(EDGES, kinds=("span", "list"), seed=1),
    "span and list, 96 heads": replace(EDGES, kinds=("span", "list"), heads=96, pages=(256, 64)),
    "list and span": replace(EDGES, kinds=("list", "span"), pages=(2, 64), seed=2),
    "two spans": replace(EDGES, kinds=("span", "span"), pages=(64, 2), seed=3),
    "span": replace(EDGES, kinds=("span",), seed=4),
    "decode": DECODE,
    "decode, 128 heads": replace(DECODE, heads=128, second=(1024, 1000, 0, 960)),
    "decode, 8 heads, span": replace(DECODE, heads=8, kinds=("span", "list"), lengths=False),
    "decode, two spans": replace(DECODE, kinds=("span", "span"), pages=(64, 2), seed=5),
    "bf16 span and V4's list": replace(
        EDGES, kinds=("span", "list"), formats=("bf16", "fp8_584"), seed=8
    ),
    "V4's span and bf16 list, 128 heads": replace(
        MANY, kinds=("span", "list"), formats=("fp8_584", "bf16"), heads=128, seed=9
    ),
    "bf16": replace(MANY, formats=("bf16", "bf16"), pages=(24, 2), seed=10),
    "bf16 span": replace(EDGES, kinds=("span",), formats=("bf16",), pages=(2,), seed=11),
    "many": MANY,
    "many, spans": replace(MANY, kinds=("span", "span"), pages=(64, 2), seed=6),
    "many, 128 heads": replace(MANY, kinds=("span", "list"), heads=128, seed=7),
    "span and list, turned back": replace(EDGES, kinds=("span", "list"), turned=64, seed=12),
    "one list, turned back": replace(MANY, kinds=("list",), turned=64, seed=13),
    "bf16, turned back": replace(MANY, formats=("bf16", "bf16"), pages=(24, 2), turned=64, seed=14),
    "decode, turned back": replace(DECODE, kinds=("span", "list"), turned=64, seed=15),
}


def attend(op: AttendOperands, few: bool = True, way: str = "") -> Outcome:
    """On the Hopper kernel; in one launch, if few queries shall not be spread over the chip. way:
    how quantized rows are read, unless the plan decides."""
    results = new_results(op)
    chosen = plan_call(op, results, "hopper")
    assert chosen.kernel_name == "attend"
    if not few:
        chosen = replace(chosen, config=replace(chosen.config, few=None))
    if way:
        chosen = read_by(chosen, way)
    launch(chosen, op, results)
    return Outcome(results.out, results.lse)


def assert_right(op: AttendOperands, outcome: Outcome) -> None:
    """By the rule; `op` on the CPU."""
    lse = None if outcome.lse is None else outcome.lse.cpu()
    verdict = compare(Outcome(outcome.out.cpu(), lse), reference.of(op), columns=512)
    assert verdict.ok, verdict.report()


@pytest.mark.parametrize("name", SETUPS)
def test_right_and_deaf_to_poison(name: str) -> None:
    """In one launch and in three, where the plan has them; and in a second run."""
    op = operands(SETUPS[name])
    here = on_device(op, DEVICE)
    outcome = attend(here)
    assert_right(op, outcome)
    assert not differences(attend(here), outcome)
    for way in ("in_kernel", "whole"):
        assert not differences(attend(here, few=False, way=way), outcome)
    clean = on_device(operands(SETUPS[name], poisoned=False), DEVICE)
    assert not differences(attend(clean), outcome)


@pytest.mark.parametrize("name", ["decode", "span and list, 96 heads", "many, spans"])
def test_bits_of_a_row_are_its_own(name: str) -> None:
    here = on_device(operands(SETUPS[name]), DEVICE)
    whole = attend(here)
    assert whole.lse is not None
    for first, stop in ((0, 1), (1, 4), (3, 4)):
        some = slice(first, stop)
        alone = attend(some_tokens(here, some))
        assert not differences(alone, Outcome(whole.out[some], whole.lse[some]))


@pytest.mark.parametrize("kinds", [("list", "list"), ("span", "list")])
def test_a_prompt(kinds: tuple[str, str]) -> None:
    """2048 queries of 64 heads over 128 + 512 rows, of which some are looked at."""
    setup = Setup(kinds=kinds, first=(128,) * 2048, second=(512,) * 2048, heads=64, lengths=False)
    op = operands(setup)
    outcome = attend(on_device(op, DEVICE))
    assert outcome.lse is not None
    for some in (slice(0, 2), slice(1000, 1003), slice(2046, 2048)):
        assert_right(some_tokens(op, some), Outcome(outcome.out[some], outcome.lse[some]))


def public(op: AttendOperands, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    weights = {"scale": op.weights.scale, "sink": op.weights.sink}
    given = {**weights, "turn_back": op.turn_back, "out": out}
    return openmla.mla_attend(op.q, list(op.sources), return_lse=True, **given)


def elsewhere(op: AttendOperands) -> AttendOperands:
    """The same call with all tensors at other addresses."""
    return on_device(op, DEVICE)


@pytest.mark.parametrize(
    "name",
    ["decode", "span and list", "two spans", "many", "bf16", "decode, turned back"],
)
def test_repeated_calls_at_other_addresses(name: str) -> None:
    """The second is launched without being planned; `out` may be the caller's."""
    op = on_device(operands(SETUPS[name]), DEVICE)
    expected = attend(op)
    for again in (op, op, elsewhere(op), elsewhere(op)):
        out = torch.full_like(expected.out, torch.nan)
        for found in (public(again), public(again, out)):
            assert not differences(Outcome(*found), expected)


@pytest.mark.parametrize("name", ["decode", "span and list", "two lists"])
def test_in_a_graph(name: str) -> None:
    """Replayed over other numbers in the same places."""
    op = on_device(operands(SETUPS[name]), DEVICE)
    for _ in range(2):
        public(op)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = public(op)
    op.q.copy_(op.q.flip(0))
    graph.replay()
    assert not differences(Outcome(out, lse), attend(op))


def pages_of(source: Source) -> Tensor:
    """Pages as FlashMLA's caller has them, [pages, page_size, 1, 584]."""
    assert isinstance(source, Listed) and isinstance(source.rows, openmla.LatentCache)
    data = source.rows.data
    pages, size, _ = data.shape
    raw = data.as_strided((pages, size, 1, 584), (data.stride(0), 584, 584, 1))
    return raw.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("name", ["decode", "decode, 128 heads", "two lists, 8 heads"])
def test_flash_mla_over_two_caches(name: str) -> None:
    op = operands(SETUPS[name])
    here = on_device(op, DEVICE)
    first, second = here.sources
    assert isinstance(first, Listed) and isinstance(second, Listed)
    out, lse = flash_mla_with_kvcache(
        here.q[:, None],
        pages_of(first),
        None,
        None,
        512,
        get_mla_metadata()[0],
        None,
        softmax_scale=op.weights.scale,
        is_fp8_kvcache=True,
        indices=first.indices[:, None],
        attn_sink=here.weights.sink,
        extra_k_cache=pages_of(second),
        extra_indices_in_kvcache=second.indices[:, None],
        topk_length=first.lengths,
        extra_topk_length=second.lengths,
    )
    natural = lse[:, :, 0].masked_fill(lse[:, :, 0] == torch.inf, -torch.inf)
    assert not differences(Outcome(out[:, 0], natural), attend(here))
    assert_right(op, Outcome(out[:, 0], natural))


@pytest.mark.parametrize("way", ["in_kernel", "whole"])
def test_every_byte_with_every_scale(way: str) -> None:
    """A query of zeros that sees one row returns that row: bf16(e4m3 * 2^(x - 127)), to the bit."""
    exponents = torch.arange(246)  # from 246 on 448 times the scale is infinite
    page, count = 64, 256
    page_bytes = page * 584
    raw = torch.zeros(count // page, page_bytes, dtype=torch.uint8)
    data = raw.as_strided((count // page, page, 576), (page_bytes, 576, 1))
    scales = raw.as_strided((count // page, page, 8), (page_bytes, 8, 1), page * 576)
    codes = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    columns = codes[(torch.arange(448) + 7 * torch.arange(count)[:, None]) % codes.numel()]
    data[..., :448] = columns.view(count // page, page, 448)
    of_rows = torch.nn.functional.pad(exponents, (0, count - len(exponents)), value=127)
    scales[..., :7] = of_rows.to(torch.uint8).view(count // page, page, 1)
    there = raw.to(DEVICE)
    cache = openmla.LatentCache(
        there.as_strided(data.shape, data.stride()),
        there.as_strided(scales.shape, scales.stride(), page * 576),
        512,
        0,
        "fp8_584",
    )
    indices = torch.arange(len(exponents), dtype=torch.int32, device=DEVICE)[:, None]
    q = torch.zeros(len(exponents), 64, 512, dtype=torch.bfloat16, device=DEVICE)
    nothing = torch.full_like(indices, -1)
    sources = (Listed(cache, indices), Listed(cache, nothing))
    op = AttendOperands(q=q, sources=sources, d_v=512, weights=Weights(0.1))
    out = attend(op, few=False, way=way).out[:, 0, :448].cpu()
    values = columns[: len(exponents)].view(torch.float8_e4m3fn).double()
    wanted = (values * torch.exp2(exponents.double() - 127)[:, None]).to(torch.bfloat16)
    normal = wanted.double().abs() >= 2.0**-126
    assert out[normal].equal(wanted[normal])
    assert (out.double() - wanted.double()).abs().max() <= 2.0**-126
