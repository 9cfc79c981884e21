"""Models of Transformers and the layer of our own on a GPU, in bf16 and with real widths.

bf16 rounds wherever one looks, so the bar is the model itself: openmla must be as close to float32
as the model's own attention is. No experts: a router turns a rounding into another expert.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu.on_device import DEVICE, on_gpu
from openmla import LatentCache
from openmla.nn import Batch, MLAAttention

transformers = pytest.importorskip("transformers", minversion="5.17")
from openmla.integrations.transformers import optimize  # noqa: E402

pytestmark = on_gpu

TOKENS = 300
CHUNKS = (200, 1, 99)
WIDTHS: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "initializer_range": 0.05,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
SPARSE = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}


def built(kind: str) -> Any:
    """In float32, with eager attention."""
    more = SPARSE if kind == "DeepseekV32" else {}
    config = getattr(transformers, f"{kind}Config")(**WIDTHS, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config)
    model.set_attn_implementation("eager")
    return model.eval().to(DEVICE)


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor, chunks: tuple[int, ...]) -> Tensor:
    cache, parts, seen = None, [], 0
    for part in ids.split(chunks, dim=1):
        seen += part.shape[1]
        out = model(part, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits.float())
    return torch.cat(parts, dim=1)[mask.bool()]


def error(got: Tensor, exact: Tensor) -> float:
    assert torch.isfinite(got).all()
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("padded", [0, 77])
@pytest.mark.parametrize("chunks", [(TOKENS,), CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("DeepseekV3", "auto"),
        ("DeepseekV3", "expanded"),
        ("DeepseekV3", "latent"),
        ("DeepseekV32", "auto"),
    ],
)
def test_a_model_is_as_close_to_float32_as_before(
    kind: str, form: str, chunks: tuple[int, ...], padded: int
):
    model = built(kind)
    ids = torch.randint(2, 256, (2, TOKENS), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    exact = logits(model, ids, mask, chunks)
    rounded = copy.deepcopy(model).bfloat16()
    before = error(logits(rounded, ids, mask, chunks), exact)
    optimize(rounded, form)
    # Another key near the cut may be selected after a rounding, so DSA gets some room.
    room = 1.5 if kind == "DeepseekV32" else 1.2
    assert error(logits(rounded, ids, mask, chunks), exact) <= room * before


@pytest.mark.parametrize("format", ["bf16", "fp8_656"])
def test_the_layer_over_pages(format: str):
    """Chunks in every dense form, against the same layer in float32 on the CPU."""
    config = transformers.DeepseekV3Config(**WIDTHS)
    exact = MLAAttention.from_config(config).requires_grad_(False)
    layer = copy.deepcopy(exact).bfloat16().to(DEVICE)
    x = torch.randn(2, TOKENS, WIDTHS["hidden_size"]).bfloat16()
    pools = [
        LatentCache.allocate(num_pages=24, page_size=64, format=format, device=device)
        for device in ("cpu", DEVICE)
    ]
    table, done, forms = torch.randperm(24).view(2, 12).int(), 0, set()
    for new in CHUNKS:
        part = x[:, done : done + new].flatten(0, 1)
        results = []
        for run, pool, dtype in zip((exact, layer), pools, (torch.float32, None), strict=True):
            batch = Batch.of([new, new], [done, done], table.to(pool.device))
            here = part.to(pool.device, dtype)
            results.append(run(here, batch.positions, pool, batch).float().cpu())
            forms.add(run.choose(batch).form)
        assert error(results[1], results[0]) <= 2e-2
        done += new
    assert forms == {"expanded", "latent"}
