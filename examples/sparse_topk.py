"""DeepSeek sparse attention: the indexer names the best rows of each query, attention reads those.

    python examples/sparse_topk.py

`index_topk` returns physical rows of the cache, which is what `mla_prefill_sparse` takes.
"""

import torch

import openmla

HEADS, INDEX_HEADS, LATENT, ROPE, PAGE = 16, 64, 512, 64, 64
CONTEXT, NEW, TOPK = 600, 8, 128


def main() -> None:
    torch.manual_seed(0)
    pages = -(-CONTEXT // PAGE)
    table = torch.randperm(pages).int()[None]  # one request, pages in no particular order
    at = torch.arange(CONTEXT)
    slots = table[0, at // PAGE].long() * PAGE + at % PAGE

    cache = openmla.LatentCache.allocate(num_pages=pages, page_size=PAGE, format="fp8_656")
    cache.append(torch.randn(CONTEXT, LATENT), torch.randn(CONTEXT, ROPE), slot_mapping=slots)
    keys = openmla.IndexCache.allocate(num_pages=pages, page_size=PAGE)
    keys.append(torch.randn(CONTEXT, 128), slot_mapping=slots)

    # The last 8 tokens are the queries; weights carry the scale of q and every other factor.
    cu = torch.tensor([0, NEW], dtype=torch.int32)
    lengths = torch.tensor([CONTEXT], dtype=torch.int32)
    index_q = torch.randn(NEW, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
    weights = torch.rand(NEW, INDEX_HEADS)
    indices, counts = openmla.index_topk(
        index_q,
        keys,
        weights,
        TOPK,
        cu_seqlens_q=cu,
        block_table=table,
        cache_lengths=lengths,
        return_counts=True,
    )

    q, scale = torch.randn(NEW, HEADS, LATENT + ROPE).bfloat16(), 192**-0.5
    out, lse = openmla.mla_prefill_sparse(q, cache, indices, scale=scale, return_lse=True)

    _, whole = openmla.mla_prefill_latent(
        q, cache, table, lengths, cu_seqlens_q=cu, scale=scale, return_lse=True
    )
    kept = (lse - whole).exp().mean()
    print(f"{counts.tolist()} rows of {CONTEXT} for each query, out {list(out.shape)}")
    print(f"{kept:.0%} of the softmax weight is on them; random keys: a model's are better chosen")
    assert (indices[:, 1:] != indices[:, :-1]).all() and (lse <= whole + 1e-5).all()


if __name__ == "__main__":
    main()
