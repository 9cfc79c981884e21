"""Cases in FlashMLA's conventions, checked through `openmla.compat.flash_mla`.

They cover what that library's users rely on: few and many queries, pools of odd sizes, indices
anywhere from the smallest to the largest int32, lists whose tail is cut off, sinks of both
infinities, rows that name no key at all. The definition is spelled out here once more, in float64,
with FlashMLA's answers for empty rows: out 0, max_logits -inf, lse +inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from openmla.compat.flash_mla import flash_mla_sparse_fwd
from openmla.lab.testing.values import FLOAT

INT32 = torch.iinfo(torch.int32)
OUT_LIMIT = 8e-3  # relative to the norm of a row of the result: bf16 rounds weights and output
STAT_LIMIT = 1e-4  # of max_logits and lse, absolute
CHUNK = 64  # queries whose definition is evaluated together


@dataclass(frozen=True)
class FlashCase:
    """One call of flash_mla_sparse_fwd."""

    s_q: int
    s_kv: int
    topk: int
    heads: int = 64
    d_qk: int = 576
    d_v: int = 512
    lengths: bool = False
    sink: bool = False
    empty_rows: bool = False
    """Every third row names no key."""
    seed: int = 0


def cases() -> Iterator[FlashCase]:
    """The list, from small to large."""
    sizes = product((1, 62, 213), ((128, 128), (1840, 256), (1592, 384), (1521, 512)), (64, 128))
    for seed, (s_q, (s_kv, topk), heads) in enumerate(sizes):
        options = {"lengths": seed % 2 == 1, "sink": seed % 3 > 0, "empty_rows": seed % 4 == 2}
        d_qk = 512 if seed % 5 == 4 else 576
        yield FlashCase(s_q, s_kv, topk, heads, d_qk, seed=seed, **options)
    yield FlashCase(70000, 1023, 128, heads=64, sink=True, lengths=True, empty_rows=True, seed=99)


def problems(case: FlashCase, device: torch.device | str) -> list[str]:
    """What is wrong with openmla's answer, in words; nothing when all is right."""
    q, kv, indices, lengths, sink = _draw(case, device)
    scale = case.d_qk**-0.5
    got = flash_mla_sparse_fwd(
        q, kv, indices, scale, d_v=case.d_v, attn_sink=sink, topk_length=lengths
    )
    found: list[str] = []
    checked = min(case.s_q, 4 * CHUNK)  # of 70000 queries, the first and the last
    starts = {*range(0, checked, CHUNK), max(case.s_q - CHUNK, 0)}
    for start in sorted(starts):
        rows = slice(start, min(start + CHUNK, case.s_q))
        cut = None if lengths is None else lengths[rows]
        want = _definition(q[rows], kv[:, 0], indices[rows, 0], cut, sink, scale, case.d_v)
        found += [f"queries from {start}: {p}" for p in _compare([x[rows] for x in got], want)]
    return found


def _draw(
    case: FlashCase, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, **FLOAT)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cpu")

    q = (normal(case.s_q, case.heads, case.d_qk) / 2).bfloat16().to(device)
    kv = (normal(case.s_kv, 1, case.d_qk) / 2).bfloat16().to(device)
    indices = integers(0, case.s_kv, case.s_q, 1, case.topk)
    # A fifth of them anywhere in int32, of which hardly any names a row.
    anywhere = integers(INT32.min, INT32.max + 1, *indices.shape)
    indices = torch.where(integers(0, 5, *indices.shape) == 0, anywhere, indices)
    edges = torch.tensor([INT32.min, -1, case.s_kv, INT32.max], device="cpu")
    count = min(len(edges), case.topk)
    indices[..., :count] = edges[:count]
    if case.empty_rows:
        indices[::3] = -1
    lengths = sink = None
    if case.lengths:
        lengths = integers(0, case.topk + 1, case.s_q).int().to(device)
    if case.sink:
        sink = normal(case.heads)
        sink[0], sink[-1] = -torch.inf, torch.inf
        sink = sink.to(device)
    return q, kv, indices.int().to(device), lengths, sink


def _definition(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    sink: Tensor | None,
    scale: float,
    d_v: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, max_logits, lse), float64."""
    counts = (indices >= 0) & (indices < kv.shape[0])
    if lengths is not None:
        counts &= torch.arange(indices.shape[1], device=q.device) < lengths[:, None]
    rows = kv.double()[torch.where(counts, indices, 0).long()]
    scores = scale * (q.double() @ rows.transpose(1, 2))
    scores = scores.masked_fill(~counts[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    empty = lse == -torch.inf
    denominator = lse if sink is None else torch.logaddexp(lse, sink.double())
    weights = torch.exp(scores - denominator.masked_fill(empty, 0.0)[..., None])
    out = (weights @ rows[..., :d_v]).masked_fill(empty[..., None], 0.0)
    return out, scores.amax(-1), lse.masked_fill(empty, torch.inf)


def _compare(got: list[Tensor], want: tuple[Tensor, Tensor, Tensor]) -> list[str]:
    found = []
    error = (got[0].double() - want[0]).norm(dim=-1)
    limit = OUT_LIMIT * want[0].norm(dim=-1)
    wrong = ~(error <= limit)  # a NaN is wrong, and so is anything but 0 in an empty row
    if wrong.any():
        found.append(f"out: {int(wrong.sum())} of {wrong.numel()} rows")
    for name, mine, theirs in zip(("max_logits", "lse"), got[1:], want[1:], strict=True):
        same = (mine.double() - theirs).abs() <= STAT_LIMIT
        wrong = ~(same | (mine.double() == theirs))  # infinities are equal or wrong
        if wrong.any():
            found.append(f"{name}: {int(wrong.sum())} of {wrong.numel()}")
    return found
