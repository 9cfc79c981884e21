"""Public calls on a GPU: repeated, captured, on two streams, without waiting, under other defaults.

A call like one that was made before skips checking and planning. What it skips must not show: not
with other lengths, not at other addresses, not under another default dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import openmla
from gpu.on_device import DEVICE, offsets, on, on_gpu
from openmla import LatentCache, Unsupported, cached, dispatch, reference
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.poison import differences

pytestmark = on_gpu

DENSE = Case("dense", 16, 128, 64, 128, q_lens=(200, 56), k_lens=(300, 100), spare=2)
LATENT = Case(
    "latent",
    16,
    512,
    64,
    512,
    q_lens=(40, 24),
    k_lens=(400, 200),
    scale=0.05,
    kv="bf16",
    page_size=64,
    spare=2,
)
SPARSE = Case("sparse", 64, 512, 64, 512, q_lens=(50,), k_lens=(900,), topk=130, scale=0.05)
CASES: dict[str, Case] = {
    "dense": DENSE,
    "dense out given": replace(DENSE, out="given", return_lse=False),
    "dense split": replace(DENSE, heads=4, q_lens=(40, 24), k_lens=(7000, 9000)),
    "dense rope from pages": replace(DENSE, rope="cache", kv="bf16", page_size=64),
    "dense sink": replace(DENSE, sink="mixed", dtype="fp16"),
    "dense fp8": replace(DENSE, dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3"),
    "dense fp8 scales": replace(
        DENSE, dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3", q_scale=True, k_scale=True
    ),
    "dense fp8 values": replace(DENSE, dtype="e4m3", q_scale=True, k_scale=True),
    "dense fp8 values split": replace(
        DENSE, dtype="e4m3", heads=4, q_lens=(40, 24), k_lens=(7000, 9000)
    ),
    "dense odd widths": replace(DENSE, d_nope=72, d_rope=24, d_v=72),
    "latent": LATENT,
    "latent fp8 pages": replace(LATENT, kv="fp8_656"),
    "latent odd widths": replace(LATENT, d_nope=96, d_rope=16, d_v=96),
    "sparse": replace(SPARSE, return_max_logits=True),
    "sparse pages": replace(SPARSE, kv="bf16", page_size=64, topk_lengths="ragged"),
    "sparse fp8 rows": replace(SPARSE, kv="fp8_656", page_size=64),
    "sparse few fp8 rows": replace(SPARSE, kv="fp8_656", page_size=64, q_lens=(3,), topk=600),
    "sparse many fp8 rows": replace(SPARSE, kv="fp8_656", page_size=64, q_lens=(2000,), topk=500),
    "sparse fp8 queries": replace(SPARSE, dtype="e4m3", q_scale=True, k_scale=True),
    "sparse fp8 queries pages": replace(
        SPARSE, dtype="e4m3", kv="fp8_token", page_size=64, q_scale=True, topk_lengths="ragged"
    ),
    "sparse odd widths": replace(SPARSE, d_nope=96, d_rope=16, d_v=96),
}


def other_lengths(case: Case) -> Case:
    """The same tensors' shapes, other numbers in them: sequences change places."""
    return replace(case, q_lens=case.q_lens[::-1], k_lens=case.k_lens[::-1], seed=case.seed + 1)


def fewer_tokens(case: Case) -> Case:
    """Other token counts, too."""
    q_lens = tuple(q - q // 3 for q in case.q_lens)
    return replace(case, q_lens=q_lens, seed=case.seed + 2)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any torch operation that waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_right(built: BuiltCase, outcome: Outcome) -> None:
    verdict = judge(built, outcome)
    assert verdict.ok, f"{built.case}\n{verdict.report()}"


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_gives_what_the_first_gave(name: str):
    """At other addresses, and after calls with other lengths, which are right themselves."""
    case = CASES[name]
    built, elsewhere = on(case), on(case)
    first = built.run()
    if case.total_q < 1000:
        assert_right(built, first)
    for changed in (other_lengths(case), fewer_tokens(case)):
        other = on(changed)
        outcome = other.run()
        assert differences(other.run(), outcome) == []
        if changed.total_q < 1000:
            assert_right(other, outcome)
        for again in (built, elsewhere):
            assert differences(again.run(), first) == []


@pytest.mark.parametrize("name", CASES)
def test_a_repeated_call_is_not_planned_again(name: str, monkeypatch: pytest.MonkeyPatch):
    """It takes a fifteenth of the host's time; also at other addresses."""
    case, planned = CASES[name], []
    built, elsewhere = on(case), on(case)
    cached.forget()
    plan_call = dispatch.plan_call
    monkeypatch.setattr(dispatch, "plan_call", lambda *args: planned.append(1) or plan_call(*args))
    first = built.run()
    for again in (built, elsewhere):
        assert differences(again.run(), first) == []
    assert len(planned) == 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "defaults",
    [
        {"default_dtype": "bf16"},
        {"default_dtype": "fp16", "default_device": "same"},
        {"default_device": "meta"},
    ],
    ids=str,
)
def test_other_defaults_of_torch_change_nothing(name: str, defaults: dict[str, str]):
    """Neither those of a first call, nor those of a repeated one, with either defaults before."""
    case = CASES[name]
    cached.forget()
    for plain in (case, fewer_tokens(case)):
        changed, usual = on(replace(plain, **defaults)), on(plain)
        outcomes = [changed.run(), changed.run(), usual.run(), usual.run(), changed.run()]
        for outcome in outcomes:
            assert all(x.dtype == torch.float32 for n, x in outcome.tensors().items() if n != "out")
            assert differences(outcome, outcomes[2]) == []


@pytest.mark.parametrize("name", CASES)
def test_no_call_waits_for_the_gpu(name: str):
    case = CASES[name]
    built, unseen = on(case), on(fewer_tokens(case))
    want = built.run(), unseen.run()  # compiles
    again, unseen_again = on(replace(case, heads=case.heads // 2)), on(other_lengths(case))
    again.run()
    with no_waiting():
        outcomes = built.run(), unseen.run()
        again.run()
        unseen_again.run()
    for outcome, first in zip(outcomes, want, strict=True):
        assert differences(outcome, first) == []


def test_no_append_gather_or_merge_waits_for_the_gpu():
    cache = LatentCache.allocate(num_pages=8, page_size=16, format="fp8_656", device=DEVICE)
    rows, slots = torch.randn(40, 576, device=DEVICE), torch.randperm(128, device=DEVICE)[:40]
    outs = torch.randn(3, 5, 2, 6, device=DEVICE).bfloat16()
    lses = torch.randn(3, 5, 2, device=DEVICE)
    for context in (nullcontext(), no_waiting()):  # the first time compiles
        with context:
            cache.append(rows[:, :512], rows[:, 512:], slots)
            read = cache.gather(slots)
            openmla.merge_many(outs, lses)
            openmla.merge_states(outs[0], lses[0], outs[1], lses[1])
    assert float((read.float() - rows).norm() / rows.norm()) < 0.04


@pytest.mark.parametrize("name", [n for n in CASES if n != "dense out given"])
def test_a_captured_graph_replays_with_other_lengths_and_numbers(name: str):
    case = CASES[name]
    built, others = on(case), [on(other_lengths(case)), on(replace(case, seed=7))]
    wants = [other.run() for other in others]
    inputs = list(built.memory.buffers)
    built.run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = built.run()
    for other, want in zip(others, wants, strict=True):
        for mine, theirs in zip(inputs, other.memory.buffers, strict=True):
            mine.copy_(theirs)
        for result in captured.tensors().values():
            result.fill_(torch.nan)
        graph.replay()
        assert differences(captured, want) == []


@pytest.mark.parametrize("name", ["dense", "dense split", "latent", "sparse", "sparse fp8 rows"])
def test_two_streams_at_once(name: str):
    """They do not share a counter or a workspace."""
    both = [on(replace(CASES[name], seed=seed)) for seed in range(2)]
    wants = [built.run() for built in both]
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for _ in range(50):
        outcomes = []
        for built, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                outcomes.append(built.run())
        torch.cuda.synchronize()
        for outcome, want in zip(outcomes, wants, strict=True):
            assert differences(outcome, want) == []


def test_sequences_of_a_batch_change_from_call_to_call():
    """One batch of 640 tokens cut anywhere, by offsets that change on the device alone."""
    q, k, v = (torch.randn(640, 8, width, device=DEVICE).bfloat16() for width in (192, 128, 128))
    rope, cu = torch.randn(640, 64, device=DEVICE).bfloat16(), offsets(320, 320)
    options: dict[str, Any] = {"return_lse": True}
    openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, **options)
    for cut in (1, 63, 64, 65, 129, 320, 511, 639):
        cu.copy_(offsets(cut, 640 - cut))
        out, lse = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, **options)
        for part in (slice(0, cut), slice(cut, 640)):
            length = part.stop - part.start
            alone, own = openmla.mla_prefill(
                q[part], k[part], rope[part], v[part], cu_seqlens_q=offsets(length), **options
            )
            assert torch.equal(alone, out[part]) and torch.equal(own, lse[part]), cut


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_merge_many(dtype: torch.dtype):
    outs, lses = torch.randn(16, 300, 8, 128).to(dtype), 3 * torch.randn(16, 300, 8)
    outs[3, :50], lses[3, :50] = torch.nan, -torch.inf
    lses[:, 7] = torch.inf
    out, lse = openmla.merge_many(outs.to(DEVICE), lses.to(DEVICE))
    want, want_lse = reference.merge(list(outs), list(lses))
    unit = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert bool(((out.cpu().double() - want).abs() <= unit * want.abs() + 1e-5).all())
    assert torch.allclose(lse.cpu().double(), want_lse, rtol=1e-6, atol=1e-6)
    assert not out[7].any() and bool((lse[7] == -torch.inf).all())


def small_sparse_call() -> tuple[torch.Tensor, dict[str, Any]]:
    numbers = torch.Generator(DEVICE).manual_seed(3)
    made = {"generator": numbers, "device": DEVICE}
    q = torch.randn(9, 64, 576, **made).bfloat16()
    rows = torch.randn(700, 576, **made).bfloat16()
    lists = torch.randint(0, 700, (9, 130), dtype=torch.int32, **made)
    return q, {"kv": rows, "indices": lists, "scale": 0.05}


def test_a_view_with_the_negative_bit_is_read_right_whenever_it_comes():
    q, options = small_sparse_call()
    for _ in range(2):
        cached.forget()
        for given in (torch._neg_view(-q), q, torch._neg_view(-q), torch._neg_view(-q)):
            expected = openmla.mla_prefill_sparse(q.clone(), **options)
            assert openmla.mla_prefill_sparse(given, **options).equal(expected)


def test_a_tangent_is_refused_on_a_repeated_call():
    q, options = small_sparse_call()
    expected = openmla.mla_prefill_sparse(q, **options)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        for _ in range(2):
            with pytest.raises(Unsupported, match="q has a tangent"):
                openmla.mla_prefill_sparse(dual, **options)
    assert openmla.mla_prefill_sparse(q, **options).equal(expected)
