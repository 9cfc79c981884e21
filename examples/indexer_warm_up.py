"""Warm up the indexer of a DSA layer on a CPU: it learns which keys attention looks at.

    python examples/indexer_warm_up.py

The first stage of DeepSeek-V3.2's training: attention is dense and frozen, and the indexer alone
learns, from KL(p || softmax(its scores)), where p is what the heads look at together. Then it may
select: how much of attention's weight its best 16 of up to 96 keys catch says what it learned.
"""

import torch

import openmla
from openmla.nn import Batch, IndexerConfig, MLAAttention, MLAConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

HIDDEN, WORDS, TOPK, STEPS = 64, 32, 16, 40
ROPE = Rope(width=8, theta=100.0)
CONFIG = MLAConfig(
    hidden=HIDDEN,
    heads=4,
    dims=LayerDims(latent=32, nope=16, rope=8, v=16),
    q_lora=32,
    rope=ROPE,
    scale=4 * 24**-0.5,  # attention of random weights is even; a trained one is not
    topk=TOPK,
    indexer=IndexerConfig(hidden=HIDDEN, q_lora=32, heads=8, topk=TOPK, rope=ROPE),
)


@torch.no_grad()
def caught(layer: MLAAttention, x: torch.Tensor, batch: Batch) -> float:
    """Share of attention's weight that lies on the keys which the indexer selects."""
    compressed = layer.compress_queries(x)
    q, latent, rope = layer.project(x, batch.positions, compressed)
    k_nope, v = layer.expand(latent)
    _, bits = layer.indexer(x, compressed, batch.positions, batch, return_mask=True)
    options = {"cu_seqlens_q": batch.cu_seqlens, "scale": CONFIG.scale, "return_lse": True}
    _, everything = openmla.mla_prefill(q, k_nope, rope, v, **options)
    _, selected = openmla.mla_prefill(q, k_nope, rope, v, key_mask=bits, **options)
    return (selected - everything).exp().mean().item()


def main() -> None:
    torch.manual_seed(0)
    layer, batch = MLAAttention(CONFIG).requires_grad_(False), Batch.of([96, 96, 96])
    torch.nn.init.normal_(layer.kv_b_proj.weight, std=0.5)
    layer.indexer.requires_grad_(True)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=1e-2)
    words = torch.randn(WORDS, HIDDEN)  # the hidden states of a small language
    asked = words[torch.randint(WORDS, (batch.tokens,))]
    before = caught(layer, asked, batch)
    for step in range(STEPS):
        x = words[torch.randint(WORDS, (batch.tokens,))]
        _, loss = layer.forward_and_loss(x, batch.positions, batch)  # dense: over all keys
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.mean().item():.2f}")
    after = caught(layer, asked, batch)
    print(f"{TOPK} keys catch {before:.0%} of the weight before, {after:.0%} after")


if __name__ == "__main__":
    main()
