"""Steps of a DSA model in vLLM's real engine, replayed through openmla's indexer and attention.

`selected_calls.pt` has two steps of the first layer of a tiny DeepSeek-V3.2, over pages of
fp8_ds_mla: `prefill`, of a request with a cached prefix and of fresh ones, and `drafted`, where a
request has up to four tokens to check. It was made by `make record-vllm` with vLLM 0.32 on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm
from openmla import LatentCache

CALLS = Path(__file__).with_name("selected_calls.pt")
STEPS = torch.load(CALLS, weights_only=True)
BF16 = 2.0**-8
LATENT, ROPE = 512, 64
every_step = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def requests(step: dict[str, Any]) -> list[tuple[int, int]]:
    """The request of every token, and how many keys it sees."""
    new, lengths = step["starts"].diff().tolist(), step["lengths"].tolist()
    return [
        (request, length - count + i + 1)
        for request, (count, length) in enumerate(zip(new, lengths, strict=True))
        for i in range(count)
    ]


def test_the_recording_has_what_it_should():
    prefill, drafted = STEPS["prefill"], STEPS["drafted"]
    context = prefill["lengths"] - prefill["starts"].diff()
    assert (context == 0).any() and (context >= 64).any()
    assert 1 < drafted["starts"].diff().max() <= 4 and len(drafted["lengths"]) > 1
    for step in STEPS.values():
        assert max(sees for _, sees in requests(step)) > step["selected"].shape[1]
    assert CALLS.stat().st_size < 1_500_000


@every_step
@pytest.mark.parametrize("cut", [False, True], ids=["as it came", "request by request"])
def test_the_indexer_selects_what_it_did_in_the_engine(
    step: dict[str, Any], cut: bool, monkeypatch: pytest.MonkeyPatch
):
    """Rows of new tokens are gone, and come back by the op; a loop over keys chooses the same."""
    pages = step["index_pages"].clone()
    size = pages.shape[1]
    page, place = step["index_slots"] // size, step["index_slots"] % size
    gone = place[:, None] * 128 + torch.arange(128)
    pages.view(len(pages), -1)[page[:, None], gone] = 0xFF
    with fake_vllm.installed():
        from openmla.integrations.vllm import indexer

        buffer = torch.full_like(step["selected"], -7)
        k_cache = SimpleNamespace(kv_cache=pages, prefix="layer")
        op = indexer.OpenMLAIndexer(k_cache, step["scale_format"], buffer.shape[1], buffer)
    every = range(len(step["lengths"]))
    for part in [[r] for r in every] if cut else [list(every)]:
        first, last = int(step["starts"][part[0]]), int(step["starts"][part[-1] + 1])
        batch = indexer.IndexMetadata(
            step["starts"][part[0] : part[-1] + 2] - first,
            step["lengths"][part],
            step["index_table"][part],
            step["index_slots"][first:last],
            int(step["lengths"][part].max()),
            last - first,
        )
        op.topk_indices_buffer = buffer[first:last]
        context = SimpleNamespace(attn_metadata={"layer": batch})
        monkeypatch.setattr(indexer, "get_forward_context", lambda found=context: found)
        tokens = slice(first, last)
        op.forward_cpu(None, step["q"][tokens], step["k"][tokens], step["weights"][tokens])
    assert torch.equal(pages, step["index_pages"])
    assert torch.equal(buffer, step["selected"])
    cache = op._cache()
    for t, (request, sees) in enumerate(requests(step)):
        keys, scales = cache.gather(rows_of(step["index_table"][request], size, sees))
        dots = torch.relu(step["q"][t].double() @ keys.double().T)
        score = (dots * step["weights"][t].double()[:, None]).sum(0) * scales.double()
        best = score.topk(min(sees, buffer.shape[1])).indices.sort().values
        assert buffer[t][: len(best)].tolist() == best.tolist()
        assert (buffer[t][len(best) :] == -1).all()


@every_step
@pytest.mark.parametrize("name", ["fp8_ds_mla", "auto"])
def test_the_attention_is_float64s_over_what_was_selected(step: dict[str, Any], name: str):
    """Over the pages that the engine had, and over bf16 ones with the same values."""
    pages, size = step["pages"], step["pages"].shape[1]
    cache = LatentCache(pages, None, LATENT, ROPE, "fp8_656")
    values = cache.gather(torch.arange(cache.rows))
    if name == "auto":
        pages = values.bfloat16().view(len(pages), size, -1)
    with fake_vllm.installed():
        from openmla.integrations.vllm.sparse import OpenMLASparseImpl

        layer = OpenMLASparseImpl(
            scale=step["scale"],
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            kv_cache_dtype=name,
            topk_indices_buffer=step["selected"],
        )
    metadata = SimpleNamespace(
        block_size=size,
        req_id_per_token=step["requests"],
        block_table=step["table"],
        cp_kv_cache_interleave_size=1,
    )
    out, lse = layer.forward_mqa(step["absorbed"], pages, metadata, None)
    lists = [
        rows_of(step["table"][request], size, sees)[chosen[chosen >= 0].long()].tolist()
        for (request, sees), chosen in zip(requests(step), step["selected"], strict=True)
    ]
    want = formula.listed(step["absorbed"], values, lists, LATENT, step["scale"])
    for got, its_lse in ((out, lse), (step["out"], step["lse"])):
        formula.assert_close(got, want.out, bound=BF16)
        formula.assert_close(its_lse, want.lse)


def rows_of(table: Tensor, size: int, count: int) -> Tensor:
    """Rows of a request's first keys."""
    place = torch.arange(count)
    return table[place // size].long() * size + place % size
