"""Calls of vLLM's engine replayed on a GPU, and the sparse backend on its caches."""

from __future__ import annotations

import pytest
import torch

import formula
from gpu.on_device import DEVICE, on_gpu
from integrations.vllm import invariant, replay, selected, v4_replay
from integrations.vllm.replay import NAMES, error
from openmla import IndexCache
from openmla.integrations.vllm import slots

pytestmark = on_gpu
BF16 = 2.0**-8


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_prefill_is_as_exact_as_vllms_on_a_cpu(name: str):
    step, weight = replay.recorded(name)
    want, theirs = replay.exact_step(step, weight), step["output"].view(-1, replay.HEADS, replay.V)
    got = replay.run_layer(*replay.recorded(name, DEVICE)).cpu()
    assert error(got, want) <= 1.1 * error(theirs, want)
    assert (got - theirs).abs().max() <= 2 * BF16 * theirs.abs().max()


def test_a_layer_reads_its_pages_between_other_layers_and_a_table_wider_than_needed():
    want = replay.exact_step(*replay.recorded("context"))
    step, weight = replay.recorded("context", DEVICE)
    usual = error(replay.run_layer(step, weight).cpu(), want)
    pages, table = step["pages"], step["block_table"]
    both = torch.full((len(pages), 3, *pages.shape[1:]), torch.nan).to(pages)
    both[:, 1] = pages
    wide = torch.full((len(table) + 2, table.shape[1] + 5), -1, dtype=torch.int32, device=DEVICE)
    wide[: len(table), : table.shape[1]] = table
    changed = {**step, "pages": both[:, 1], "block_table": wide}
    assert error(replay.run_layer(changed, weight).cpu(), want) <= 1.01 * usual


@pytest.mark.parametrize("name", NAMES)
def test_the_prefill_backend_answers_as_vllms_does(name: str):
    here, there = replay.recorded(name)[0], replay.recorded(name, DEVICE)[0]
    for call, on_device in zip(here["attention"], there["attention"], strict=True):
        want = replay.exact_call(call, here["scale"])
        got = replay.run_backend(on_device, here["scale"])
        if call["lse"] is not None:
            got, lse = got[0], got[1].cpu()
            assert (lse - call["lse"]).abs().max() <= 1e-5 * call["lse"].abs().max()
        # Kernels round P to bf16, which vLLM's CPU code does not.
        assert error(got.cpu(), want.out) <= 3e-3


def test_a_context_of_one_scale_is_near_its_bf16_values():
    step, weight = replay.recorded("context", DEVICE)
    k_scale = torch.tensor([0.0211], device=DEVICE)
    rows = (step["pages"].float() / k_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    got = replay.run_layer({**step, "pages": rows}, weight, "fp8", k_scale)
    step["pages"] = (rows.float() * k_scale).bfloat16()
    assert error(got.cpu(), replay.run_layer(step, weight).cpu().double()) <= 3e-3


@pytest.mark.parametrize("heads", [12, 128])
def test_fp8_queries_over_a_cache_of_one_scale(heads: int):
    batch = selected.batch("fp8", heads, DEVICE).fp8_queries()
    out, lse = batch.attend()
    want = batch.exact()
    assert error(out.cpu(), want.out) <= 2 * BF16
    assert (lse.cpu().double() - want.lse)[want.lse.isfinite()].abs().max() <= 2e-2


@pytest.mark.parametrize("kind", selected.FORMATS)
@pytest.mark.parametrize("heads", [12, 128])
def test_the_sparse_backend_on_every_cache(kind: str, heads: int):
    batch = selected.batch(kind, heads, DEVICE)
    out, lse = batch.attend()
    want = batch.exact()
    assert error(out.cpu(), want.out) <= 3e-3
    formula.assert_close(lse.cpu(), want.lse)
    assert not out[7].any()


@pytest.mark.parametrize("kind", ["fp8_ds_mla", "fp8"])
def test_the_sparse_backend_can_be_captured(kind: str):
    batch = selected.batch(kind, 16, DEVICE)
    batch.attend()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = batch.attend()
    batch.tokens[7] = batch.tokens[8]
    want = batch.attend()
    graph.replay()
    torch.cuda.synchronize()
    assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_index_scores_in_deep_gemms_places():
    """What vLLM's wrappers call on SM80, SM86 and SM89, on whichever GPU this is."""
    torch.manual_seed(0)
    cache = IndexCache.allocate(num_pages=9, page_size=64, device=DEVICE)
    every = torch.arange(cache.rows, device=DEVICE)
    cache.append(torch.randn(cache.rows, 128, device=DEVICE), every)
    values, scales = cache.gather(every)
    q = torch.randn(6, 32, 128, device=DEVICE).to(torch.float8_e4m3fn)
    weights = torch.rand(6, 32, device=DEVICE)
    right = torch.relu(torch.einsum("thd,nd->thn", q.double(), values.double()))
    right = (right * weights.double()[..., None]).sum(1) * scales.double()
    ends = torch.tensor([1, 90, 300, 17, 576, 64], dtype=torch.int32, device=DEVICE)
    outside = every >= ends[:, None]
    table = torch.arange(9, dtype=torch.int32, device=DEVICE).expand(3, 9).contiguous()
    lens, pages = ends.view(3, 2), cache.data.view(9, 64, 1, 132)
    plan = slots.paged_mqa_logits_metadata(lens, 64, 108)
    pair, several = (values, scales), (q.view(3, 2, 32, 128), None)
    for logits in (
        slots.mqa_logits((q, None), pair, weights, torch.zeros_like(ends), ends),
        slots.paged_mqa_logits(several, pages, weights, lens, table, plan, cache.rows),
    ):
        assert (logits[outside] == -torch.inf).all()
        off = (logits.double() - right).masked_fill(outside, 0).abs().max()
        assert off <= 2**-11 * right.abs().max()  # a tensor core's sums of e4m3 products


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_batch_invariant_requests_keep_their_bits_however_they_are_served(name: str):
    with invariant.switched_on():
        invariant.check(invariant.Served(name, DEVICE))


@pytest.mark.parametrize("step", v4_replay.STEPS)
def test_deepseek_v4s_calls_are_answered_as_the_formula_says(step: str):
    for here, there in zip(v4_replay.replayed(step), v4_replay.replayed(step, DEVICE), strict=True):
        out, *rest = there.run()
        assert out.data_ptr() == there.arguments["out"].data_ptr()
        formula.assert_close(out.cpu().flatten(0, -3), here.want.out, bound=2**-7)
        if here.name == "flash_mla_with_kvcache":
            lse = rest[0].cpu()[..., 0]
            nothing = here.want.lse == -torch.inf
            want = here.want.lse.masked_fill(nothing, torch.inf)
            formula.assert_close(lse, want, bound=1e-4)
