"""One MLA layer over a paged FP8 cache: two prompts in chunks, then one token more for each.

    python examples/layer_over_fp8_pages.py

Rows are the 656 bytes of DeepSeek-V3.2, two sequences share one pool of pages, and the layer says
for every batch which form it chose and why.
"""

import torch

from openmla import LatentCache
from openmla.nn import Batch, MLAAttention, MLAConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims


def main() -> None:
    torch.manual_seed(0)
    # DeepSeek-V3's widths, with 4 heads of its 128. MLAAttention.from_config reads such a
    # configuration from Transformers.
    config = MLAConfig(
        hidden=256,
        heads=4,
        dims=LayerDims(latent=512, nope=128, rope=64, v=128),
        q_lora=128,
        rope=Rope(width=64, theta=10000.0),
        scale=192**-0.5,
    )
    layer = MLAAttention(config).requires_grad_(False)
    sequences = [torch.randn(n, config.hidden) for n in (700, 90)]

    # A pool of 24 pages, of which each sequence owns 12, in no particular order.
    cache = LatentCache.allocate(num_pages=24, page_size=64, format="fp8_656")
    pages = torch.randperm(24).view(2, 12).int()

    done = [0, 0]
    chunks: list[list[torch.Tensor]] = [[], []]
    for new in ([400, 60], [299, 29], [1, 1]):
        batch = Batch.of(new, context=done, block_table=pages)
        x = torch.cat([s[c : c + n] for s, c, n in zip(sequences, done, new, strict=True)])
        out = layer(x, batch.positions, cache, batch)
        print(f"{new} new tokens after {done}\n    {layer.choose(batch).reason}")
        for kept, part in zip(chunks, out.split(new), strict=True):
            kept.append(part)
        done = list(batch.keys)

    for sequence, kept in zip(sequences, chunks, strict=True):
        whole = layer(sequence, torch.arange(len(sequence)))
        error = (torch.cat(kept) - whole).norm() / whole.norm()
        print(f"{len(sequence)} tokens: {error:.2%} off the whole prompt without a cache")


if __name__ == "__main__":
    main()
