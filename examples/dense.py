"""Dense prefill of a ragged batch, checked against the float64 reference.

    python examples/dense.py

K is never concatenated: its nope columns and V are two views of one projection, and one rope row
serves all heads.
"""

import torch

import openmla

HEADS, NOPE, ROPE, V = 16, 128, 64, 128  # DeepSeek-V3, on one of 8 ranks
LENGTHS = [300, 41, 1]


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = sum(LENGTHS)
    cu = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16()

    q, kv, k_rope = (
        draw(tokens, HEADS, NOPE + ROPE),
        draw(tokens, HEADS, NOPE + V),
        draw(tokens, ROPE),
    )
    k_nope, v = kv[..., :NOPE], kv[..., NOPE:]

    out, lse = openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=cu, return_lse=True)

    given = [x.cpu() for x in (q, k_nope, k_rope, v)]
    exact = openmla.mla_prefill(*given, cu_seqlens_q=cu.cpu(), backend="reference")
    error = (out.cpu() - exact).float().norm() / exact.float().norm()
    print(
        f"{tokens} tokens of {len(LENGTHS)} requests: out {list(out.shape)}, lse {list(lse.shape)}"
    )
    print(f"off the reference by {error:.1e}, both rounded to bf16")


if __name__ == "__main__":
    main()
