"""Cases of an indexer's loss, and the rule that accepts a loss and its gradients.

Errors are bounded element by element, from the definition in float64. With eps of fp32, everything
of one row: scores of attention are off by delta, so that weights, and p with them, are off by a
factor of expm1(2 delta); scores of the indexer by (width + heads) * eps * sum |w||q||k|, and
softmax(I) by as much of a factor; dI by both; and what is summed of n terms by n * eps of the sum
of their sizes. A product within its own rounding of 0 may count as positive or not. Results are
rounded once, to their dtype; a kernel that rounds dz before it multiplies (`rounds_dz`) may be off
by that, too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla.indexer.loss_operands import LossOperands
from openmla.indexer.loss_reference import rows
from openmla.operands import DenseOperands, Weights
from openmla.problem import Backend

EPS = 2.0**-24
TINY = 2.0**-126
"""Below it fp32 may flush to 0."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class LossCase:
    """One call as plain data. Everything random about it follows from the seed."""

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: int = 2
    index_heads: int = 3
    d_nope: int = 16
    d_rope: int = 8
    width: int = 32
    rope: str = "shared"
    causal: bool = True
    sink: bool = False
    masked: bool = False
    dtype: torch.dtype = torch.float32
    scale: float = 0.2
    seed: int = 0


def random_loss_case(seed: int) -> LossCase:
    """The case number `seed`."""
    rng = random.Random(f"index loss {seed}")
    q_lens = tuple(rng.choice([0, 1, 2, 5, 9, 17, 70]) for _ in range(rng.randint(1, 3)))
    k_lens = tuple(max(n + rng.choice([-1, 0, 0, 3, 40]), 0) for n in q_lens)
    d_rope = rng.choice([0, 4, 8])
    return LossCase(
        q_lens,
        k_lens,
        heads=rng.choice([1, 2, 5, 9]),
        index_heads=rng.choice([1, 3, 8, 11]),
        d_rope=d_rope,
        width=rng.choice([1, 16, 32]),
        rope="none" if not d_rope else rng.choice(["shared", "per_head"]),
        causal=rng.random() < 0.7,
        sink=rng.random() < 0.4,
        masked=rng.random() < 0.4,
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        scale=rng.choice([0.2, -0.1]),
        seed=seed,
    )


def build_loss(case: LossCase, spare: int = 0, background: float = 0.0) -> LossOperands:
    """The tensors of a case, `spare` rows longer than its sequences; those hold the background."""
    generator = torch.Generator("cpu").manual_seed(case.seed)

    def numbers(rows: int, *shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        drawn = torch.randn((rows, *shape), generator=generator, device="cpu", dtype=torch.float32)
        found = torch.full((rows + spare, *shape), background, dtype=dtype, device="cpu")
        found[:rows] = drawn.to(dtype)
        return found

    total_q, total_k = sum(case.q_lens), sum(case.k_lens)
    shape = () if case.rope == "shared" else (case.heads,)
    q = numbers(total_q, case.heads, case.d_nope + case.d_rope)
    k_nope = numbers(total_k, case.heads, case.d_nope)
    k_rope = numbers(total_k, *shape, case.d_rope) if case.d_rope else None
    index_q = numbers(total_q, case.index_heads, case.width)
    index_k = numbers(total_k, case.width)
    weights = numbers(total_q, case.index_heads, dtype=torch.float32)
    d_loss = numbers(total_q, dtype=torch.float32)
    sink = numbers(case.heads, dtype=torch.float32)[: case.heads] if case.sink else None
    mask = None
    if case.masked:
        words = -(-max(case.k_lens) // 32) + 1
        low = -(2**31)
        kind: dict[str, Any] = {"dtype": torch.int32, "device": "cpu", "generator": generator}
        mask = torch.randint(low, -low - 1, (total_q + spare, words), **kind)
    cu_q, cu_k = (_offsets(lens) for lens in (case.q_lens, case.k_lens))
    attention = DenseOperands(
        *(q, k_nope, k_rope, k_nope, cu_q, cu_k, case.causal),
        Weights(case.scale, sink),
        key_mask=mask,
    )
    with torch.no_grad():
        _, lse = openmla.mla_prefill(
            *(q, k_nope, k_rope, k_nope),
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            causal=case.causal,
            scale=case.scale,
            sink=sink,
            key_mask=mask,
            return_lse=True,
        )
    return LossOperands(index_q, index_k, weights, attention, lse, d_loss)


def run_loss(op: LossOperands, backend: Backend = "auto") -> dict[str, Tensor]:
    """The public call and autograd's backward pass: loss, q, k and weights."""
    given = (op.index_q, op.index_k, op.index_weights)
    leaves = [x.detach().requires_grad_() for x in given]
    attention = op.attention
    index_q, index_k, index_weights = leaves
    loss = openmla.indexer_loss(
        index_q,
        index_k,
        index_weights,
        attention.q,
        attention.k_nope,
        attention.k_rope,
        op.lse,
        cu_seqlens_q=attention.cu_seqlens_q,
        cu_seqlens_k=attention.cu_seqlens_k,
        scale=attention.weights.scale,
        causal=attention.causal,
        sink=attention.weights.sink,
        key_mask=attention.key_mask,
        backend=backend,
    )
    found = torch.autograd.grad(loss, leaves, op.d_loss)
    return {"loss": loss.detach(), **dict(zip(("q", "k", "weights"), found, strict=True))}


def faults(op: LossOperands, got: dict[str, Tensor], rounds_dz: bool = False) -> list[str]:
    """What is wrong with a loss and its gradients; empty when they are right."""
    assert op.d_loss is not None
    q_rows, heads, width = op.index_q.shape
    truth = {
        "loss": torch.zeros(q_rows, dtype=torch.float64),
        "q": torch.zeros(q_rows, heads, width, dtype=torch.float64),
        "k": torch.zeros(op.index_k.shape, dtype=torch.float64),
        "weights": torch.zeros(q_rows, heads, dtype=torch.float64),
    }
    bound = {name: torch.zeros_like(x) for name, x in truth.items()}
    unit = ROUNDING[op.index_q.dtype] if rounds_dz else EPS
    terms = torch.zeros(op.index_k.shape[0], 1, dtype=torch.float64)
    for row in rows(op):
        come = op.d_loss[row.row].double()
        n = len(row.keys)
        p_off = _target_error(op, row.row, row.keys) + (n + op.attention.q.shape[1]) * EPS
        sizes = row.w.abs() @ (row.q.abs() @ row.k.abs().T)
        i_off = (width + heads) * EPS * sizes
        share_off = torch.expm1(4 * i_off.max()) + n * EPS
        d_scores = come * (row.share - row.target)
        d_off = come.abs() * (
            row.share * (share_off + 4 * EPS) + row.target * (p_off + 4 * EPS) + TINY
        )
        z_off = width * EPS * (row.q.abs() @ row.k.abs().T)
        positive, doubtful = row.z > 0, row.z.abs() <= z_off
        relu = row.z.clamp_min(0)
        d_z = d_scores * row.w[:, None] * positive
        dz_off = (
            d_off * row.w.abs()[:, None] * positive
            + (d_scores.abs() + d_off) * row.w.abs()[:, None] * doubtful
            + (unit + n * EPS) * d_z.abs()
        )
        far = torch.xlogy(row.target, row.target / row.share).abs().sum()
        truth["loss"][row.row] = row.loss
        bound["loss"][row.row] = (
            (row.target * (p_off + i_off.max() * 2)).sum() * 2 + share_off + (n + 4) * EPS
        ) * (1 + far) + (row.target * p_off * row.target.clamp_min(TINY).log().abs()).sum()
        truth["weights"][row.row] = relu @ d_scores
        bound["weights"][row.row] = (
            relu @ d_off + z_off @ d_scores.abs() + n * EPS * (relu @ d_scores.abs())
        )
        truth["q"][row.row] = d_z @ row.k
        bound["q"][row.row] = dz_off @ row.k.abs()
        truth["k"].index_add_(0, row.keys, d_z.T @ row.q)
        bound["k"].index_add_(0, row.keys, dz_off.T @ row.q.abs())
        sums = (d_z.abs().T @ row.q.abs()) * EPS
        bound["k"].index_add_(0, row.keys, sums)
        terms.index_add_(0, row.keys, torch.full((n, 1), float(heads), dtype=torch.float64))
    bound["k"] += terms * EPS * bound["k"] / max(unit, EPS)
    return [text for name in truth for text in _compared(name, got[name], truth[name], bound[name])]


def _compared(name: str, got: Tensor, truth: Tensor, bound: Tensor) -> list[str]:
    allowed = bound + ROUNDING[got.dtype] * (truth.abs() + bound) + 2 * TINY
    if got.dtype == torch.float16:
        allowed = allowed + 2.0**-25
    unseen = (truth == 0) & (bound == 0)
    found = []
    if bool(unseen.any()) and bool(got[unseen].any() or torch.signbit(got[unseen]).any()):
        found.append(f"{name}: what nobody sees is not +0")
    off = (got.double() - truth).abs()
    worst = (off / allowed).max().item() if off.numel() else 0.0
    if not off.le(allowed).all():  # NaN is not
        found.append(f"{name}: {worst:.3g} times the bound")
    return found


def _target_error(op: LossOperands, row: int, keys: Tensor) -> float:
    """By what factor p of a row may be off: twice that of its worst weight."""
    attention = op.attention
    q, k = attention.q[row].double().abs(), attention.k_nope[keys].double().abs()
    if attention.k_rope is not None:
        rope = attention.k_rope[keys].double().abs()
        rope = rope if rope.dim() == 3 else rope[:, None].expand(-1, q.shape[0], -1)
        k = torch.cat([k, rope], dim=-1)
    sizes = abs(attention.weights.scale) * torch.einsum("hd,nhd->hn", q, k)
    delta = (q.shape[1] + 4) * EPS * sizes.max() + 4 * EPS * op.lse[row].double().abs().max()
    return float(2 * torch.expm1(2 * delta) + 8 * EPS)


def _offsets(lens: tuple[int, ...]) -> Tensor:
    total = torch.tensor([0, *lens], device="cpu").cumsum(0)
    return total.to(torch.int32)
