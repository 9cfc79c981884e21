"""Attention as a formula: float64 einsums over a full mask, sharing no code with the package.

`attend` is the whole definition. The three forms differ in the mask and in where K and V come from.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Expected(NamedTuple):
    """float64 results: out [T, H, d_v]; lse and max_logits [T, H]."""

    out: Tensor
    lse: Tensor
    max_logits: Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, sink: Tensor | None = None
) -> Expected:
    """q [T, H, d], k [S, H, d], v [S, H, d_v], visible bool [T, S]."""
    scores = torch.einsum("thd,shd->ths", q.double(), k.double()) * scale
    scores = scores.masked_fill(~visible[:, None, :], -torch.inf)
    nothing = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    lse = torch.logsumexp(scores, dim=-1) if k.shape[0] else nothing
    p = torch.where(visible[:, None, :], torch.softmax(scores, dim=-1), 0.0)
    if sink is not None:
        denominator = torch.logaddexp(lse, sink.double().expand_as(lse))
        p = p * torch.where(lse == -torch.inf, 0.0, torch.exp(lse - denominator))[..., None]
    out = torch.einsum("ths,shv->thv", p, v.double())
    return Expected(out, lse, scores.amax(-1) if k.shape[0] else nothing)


def bottom_right(q_len: int, k_len: int, causal: bool = True) -> Tensor:
    """visible [q_len, k_len]: query i is at position k_len - q_len + i."""
    if not causal:
        return torch.ones(q_len, k_len, dtype=torch.bool)
    position = torch.arange(q_len)[:, None] + k_len - q_len
    return torch.arange(k_len)[None, :] <= position


def last_keys(q_len: int, k_len: int, window: int) -> Tensor:
    """visible [q_len, k_len]: the last `window` keys up to a query."""
    position = torch.arange(q_len)[:, None] + k_len - q_len
    return bottom_right(q_len, k_len) & (torch.arange(k_len)[None, :] > position - window)


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: list[int],
    k_lens: list[int],
    scale: float,
    causal: bool = True,
    sink: Tensor | None = None,
    window: int = 0,
) -> Expected:
    """A batch laid end to end; k and v already have one row per head."""
    starts = zip(_starts(q_lens), _starts(k_lens), q_lens, k_lens, strict=True)
    parts = [
        attend(
            q[q_at : q_at + m],
            k[k_at : k_at + n],
            v[k_at : k_at + n],
            scale,
            last_keys(m, n, window) if window else bottom_right(m, n, causal),
            sink,
        )
        for q_at, k_at, m, n in starts
    ]
    return Expected(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def listed(
    q: Tensor,
    rows: Tensor,
    lists: list[list[int]],
    d_v: int,
    scale: float,
    sink: Tensor | None = None,
) -> Expected:
    """Sparse form: query t sees the rows lists[t], each as often as it is listed."""
    parts = []
    for t, chosen in enumerate(lists):
        k = rows[chosen][:, None, :].expand(-1, q.shape[1], -1)
        everything = torch.ones(1, len(chosen), dtype=torch.bool)
        parts.append(attend(q[t : t + 1], k, k[..., :d_v], scale, everything, sink))
    return Expected(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def cu_seqlens(lens: list[int]) -> Tensor:
    """int32 offsets of sequences laid end to end."""
    return torch.tensor([*_starts(lens), sum(lens)], dtype=torch.int32)


def assert_close(got: Tensor, want: Tensor, bound: float = 2e-5) -> None:
    """Equal infinities, and elsewhere within `bound` times max(1, |want|); no NaN."""
    assert got.shape == want.shape
    infinite = want.isinf()
    assert torch.equal(got.double()[infinite], want[infinite])
    error = (got.double() - want)[~infinite].abs() / want[~infinite].abs().clamp_min(1)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= bound, f"worst error {worst:.3g}, allowed {bound:.3g}"


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor, so that NaNs and the sign of zero count in comparisons."""
    return t.contiguous().flatten().view(torch.uint8)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def _starts(lens: list[int]) -> list[int]:
    return [sum(lens[:i]) for i in range(len(lens))]
