"""The definition of right gradients of the sparse form: float64, one query at a time.

A row is the key of every head, and its first d_v columns are the value of every head. So with the
formulas of openmla.backward.reference, for every entry of a list that counts,

    d_row += scale * sum over heads (dS * q)      d_row[:d_v] += sum over heads (P * d_out)

A row that a list names twice is two keys. Rows that no list names get +0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.backward.reference import Row, Saved, differentiate_row
from openmla.backward.sparse_operands import RowGradients, SparseBackwardOperands
from openmla.errors import Unsupported
from openmla.operands import SparseOperands


class ExactRowGradients(NamedTuple):
    """Gradients in float64, by the names of what they are gradients of."""

    q: Tensor
    rows: Tensor
    sink: Tensor | None


def backward(
    op: SparseOperands, d_out: Tensor, d_lse: Tensor | None = None, saved: Saved | None = None
) -> ExactRowGradients:
    """Gradients of sum(out * d_out) + sum(lse * d_lse)."""
    d_q = torch.zeros(op.q.shape, dtype=torch.float64, device=op.q.device)
    d_rows = d_q.new_zeros(op.rows, op.q.shape[2])
    d_sink = d_q.new_zeros(op.q.shape[1])
    scale = op.weights.scale
    for row in rows(op, d_out, d_lse, saved):
        d_q[row.row] = scale * torch.einsum("hn,nhd->hd", row.d_scores, row.k)
        each = scale * torch.einsum("hn,hd->nd", row.d_scores, row.q)
        each[:, : op.d_v] += torch.einsum("hn,hv->nv", row.p, row.d_out)
        d_rows.index_add_(0, row.keys, each)
        d_sink -= row.p_sink * row.d_sum
    return ExactRowGradients(d_q, d_rows, None if op.weights.sink is None else d_sink)


def rows(
    op: SparseOperands, d_out: Tensor, d_lse: Tensor | None, saved: Saved | None = None
) -> Iterator[Row]:
    """Every query that sees a row, in order; keys are those of its list that count."""
    refuse_what_is_undefined(op)
    heads = op.q.shape[1]
    for token in range(op.q.shape[0]):
        keys = op.sources[0].seen(token)
        if not keys.numel():
            continue
        k = op.read(keys).double()[:, None].expand(-1, heads, -1)
        dlse = None if d_lse is None else d_lse[token].double()
        given = None
        if saved is not None:
            given = Saved(saved.out[token].double(), saved.lse[token].double())
        terms = op.q[token].double(), k, k[..., : op.d_v], d_out[token].double(), dlse
        yield differentiate_row(op, token, keys, *terms, given)  # type: ignore[arg-type]


def refuse_what_is_undefined(op: SparseOperands) -> None:
    """Options whose gradients nobody has defined here."""
    cache = None if isinstance(op.cache, Tensor) else op.cache
    weights = op.weights
    given = {"kv in a LatentCache": cache, "q_scale": weights.q_scale, "k_scale": weights.k_scale}
    for name, value in given.items():
        if value is not None:
            raise Unsupported(f"gradients of a call with {name} are not defined")


class ReferenceCall(NamedTuple):
    """The definition as a launch."""

    operands: SparseBackwardOperands
    gradients: RowGradients

    def run(self) -> None:
        """Write every gradient that is wanted. What the forward pass saved is taken as it is."""
        op = self.operands
        exact = backward(op.forward, op.d_out, op.d_lse, Saved(op.out, op.lse))
        for name, written in self.gradients.tensors().items():
            written.copy_(getattr(exact, name))


def calls(
    plan: object, operands: SparseBackwardOperands, gradients: RowGradients
) -> Iterator[ReferenceCall]:
    """The one call."""
    yield ReferenceCall(operands, gradients)
