"""The tensors of one backward pass of the sparse form, as kernels receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backward.problem import BackwardProblem
from openmla.operands import Results, SparseOperands


@dataclass(frozen=True, eq=False)
class SparseBackwardOperands:
    """What the forward pass read and wrote, and the gradients of what it wrote."""

    forward: SparseOperands
    """Its rows are a plain tensor."""
    out: Tensor
    """[total_q, H, d_v], as it was rounded."""
    lse: Tensor
    """float32 [total_q, H], without the sink."""
    d_out: Tensor
    """Gradient of out, in its dtype; elements of a row are contiguous."""
    d_lse: Tensor | None = None
    """Gradient of lse, float32 [total_q, H]."""

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.forward.q.device

    def problem(self, gradients: Any = None) -> BackwardProblem:
        """This pass without its tensors, whichever gradients are wanted of it."""
        forward = self.forward.problem(Results(self.out, self.lse))
        return BackwardProblem.of(forward, self.d_lse is not None)


class WantedRows(NamedTuple):
    """Which gradients somebody asks for."""

    q: bool = True
    rows: bool = True
    sink: bool = True


EVERY = WantedRows()


@dataclass(frozen=True, eq=False)
class RowGradients:
    """Where a kernel writes. What is not wanted is None."""

    q: Tensor | None
    """[total_q, H, width]"""
    rows: Tensor | None
    """[rows, width]: summed over queries, entries of their lists and heads."""
    sink: Tensor | None
    """float32 [H]"""

    @staticmethod
    def allocate(op: SparseOperands, wanted: WantedRows = EVERY) -> RowGradients:
        """Uninitialized tensors, contiguous."""
        rows, sink = op.cache, op.weights.sink
        assert isinstance(rows, Tensor)
        return RowGradients(
            q=op.q.new_empty(op.q.shape) if wanted.q else None,
            rows=rows.new_empty(rows.shape) if wanted.rows else None,
            sink=sink.new_empty(sink.shape) if wanted.sink and sink is not None else None,
        )

    def tensors(self) -> dict[str, Tensor]:
        """The gradients that are wanted, by the names of what they are gradients of."""
        found = {"q": self.q, "rows": self.rows, "sink": self.sink}
        return {name: x for name, x in found.items() if x is not None}

    def clear(self) -> None:
        """Make every element +0: the gradient of what nobody sees."""
        for x in self.tensors().values():
            x.zero_()


class Entries(NamedTuple):
    """Entries of lists in the order of the rows that they name, and of queries for each row."""

    order: Tensor
    """int64: numbers of entries; those that do not count come last."""
    starts: Tensor
    """int64 [rows + 1]: where the entries of each row begin."""


def by_row(op: SparseOperands, first: int, last: int) -> Entries:
    """The entries of queries first … last - 1, numbered from the first of them: which ones name a
    row, in the order in which its gradient adds them. Sorted on their device, without a wait."""
    listed = op.indices[first:last]
    counts = (listed >= 0) & (listed < op.rows)
    if op.topk_lengths is not None:
        place = torch.arange(listed.shape[1], device=listed.device)
        counts &= place < op.topk_lengths[first:last, None]
    named = torch.where(counts, listed, op.rows).flatten()
    ordered = torch.sort(named, stable=True)
    numbers = torch.arange(op.rows + 1, device=listed.device, dtype=named.dtype)
    return Entries(ordered.indices, torch.searchsorted(ordered.values, numbers))
