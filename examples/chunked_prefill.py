"""A long prompt in chunks: new tokens in dense form, their context in latent form, merged by lse.

    python examples/chunked_prefill.py

Each chunk attends to itself causally, to everything before it fully, and `merge_states` makes one
softmax of the two. The result is that of the whole prompt at once.
"""

import torch

import openmla

HEADS, NOPE, ROPE, V, LATENT, PAGE = 4, 128, 64, 128, 512, 64
TOKENS, CHUNK, SCALE = 320, 128, 192**-0.5


def main() -> None:
    torch.manual_seed(0)
    latent, rope = torch.randn(TOKENS, LATENT).bfloat16(), torch.randn(TOKENS, ROPE).bfloat16()
    q = torch.randn(TOKENS, HEADS, NOPE + ROPE).bfloat16()
    kv_b = torch.randn(LATENT, HEADS, NOPE + V) * LATENT**-0.5  # k_nope and v of a latent row
    up_k, up_v = kv_b[..., :NOPE], kv_b[..., NOPE:]

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv = torch.einsum("tl,lhd->thd", rows.float(), kv_b).bfloat16()
        return kv[..., :NOPE], kv[..., NOPE:]

    cache = openmla.LatentCache.allocate(num_pages=-(-TOKENS // PAGE), page_size=PAGE)
    table = torch.arange(cache.num_pages).int()[None]
    parts = []
    for first in range(0, TOKENS, CHUNK):
        new = slice(first, min(first + CHUNK, TOKENS))
        cu = torch.tensor([0, new.stop - first], dtype=torch.int32)
        k_nope, v = expand(latent[new])
        state = openmla.mla_prefill(q[new], k_nope, rope[new], v, cu_seqlens_q=cu, return_lse=True)
        if first:
            # Absorbed: q goes through W_uk, and what comes out of attention through W_uv.
            low = torch.einsum("thd,lhd->thl", q[new, :, :NOPE].float(), up_k).bfloat16()
            low = torch.cat([low, q[new, :, NOPE:]], -1)
            past, lse = openmla.mla_prefill_latent(
                low,
                cache,
                table,
                torch.tensor([first]).int(),
                cu_seqlens_q=cu,
                scale=SCALE,
                causal=False,
                return_lse=True,
            )
            values = torch.einsum("thl,lhd->thd", past.float(), up_v).bfloat16()
            state = openmla.merge_states(values, lse, *state)
        parts.append(state[0])
        cache.append(latent[new], rope[new], slot_mapping=torch.arange(new.start, new.stop))

    k_nope, v = expand(latent)
    cu = torch.tensor([0, TOKENS], dtype=torch.int32)
    whole = openmla.mla_prefill(q, k_nope, rope, v, cu_seqlens_q=cu)
    error = (torch.cat(parts) - whole).float().norm() / whole.float().norm()
    print(f"{len(parts)} chunks of {CHUNK}: {error:.1e} off the whole prompt, in bf16")


if __name__ == "__main__":
    main()
