"""Absorbed queries over a paged FP8 cache: two requests share a pool of 656-byte rows.

    python examples/paged_fp8.py

The rows are DeepSeek-V3.2's: 512 e4m3 columns, four fp32 scales, 64 bf16 columns of rope.
"""

import torch

import openmla

HEADS, LATENT, ROPE, PAGE = 16, 512, 64, 64
LENGTHS, NEW = [200, 70], [5, 70]  # tokens in the cache, and how many of them are queries now


def main() -> None:
    torch.manual_seed(0)
    cache = openmla.LatentCache.allocate(num_pages=8, page_size=PAGE, format="fp8_656")
    exact = openmla.LatentCache.allocate(num_pages=8, page_size=PAGE, format="bf16")

    # Pages in no particular order; the second request needs two, and its table is padded.
    table = torch.tensor([[6, 1, 3, 0], [7, 2, 0, 0]], dtype=torch.int32)
    for row, length in zip(table, LENGTHS, strict=True):
        at = torch.arange(length)
        slots = row[at // PAGE].long() * PAGE + at % PAGE  # a slot is page * page_size + offset
        latent, rope = torch.randn(length, LATENT), torch.randn(length, ROPE)
        for pool in (cache, exact):
            pool.append(latent, rope, slot_mapping=slots)

    q = torch.randn(sum(NEW), HEADS, LATENT + ROPE).bfloat16()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    cu = torch.tensor([0, *NEW]).cumsum(0).int()
    scale = (128 + 64) ** -0.5  # of the model, not of the 576 columns: so it must be given

    def attend(pool: openmla.LatentCache) -> torch.Tensor:
        return openmla.mla_prefill_latent(q, pool, table, lengths, cu_seqlens_q=cu, scale=scale)

    out = attend(cache)
    error = (out - attend(exact)).float().norm() / attend(exact).float().norm()
    print(cache.layout)
    print(f"{cache.nbytes / exact.nbytes:.2f} of the memory, {error:.1%} off bf16 rows")


if __name__ == "__main__":
    main()
