"""Which entries of lists name a row, in the order in which its gradient adds them.

Found by a stable sort, on the device of the lists: nothing here waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openmla.operands import SparseOperands


class Entries(NamedTuple):
    """Entries of lists in the order of the rows that they name, and of queries for each row."""

    order: Tensor
    """int64: numbers of entries; those that do not count come last."""
    starts: Tensor
    """int64 [rows + 1]: where the entries of each row begin."""


def by_row(op: SparseOperands, first: int, last: int) -> Entries:
    """The entries of queries first … last - 1, numbered from the first of them."""
    listed = op.indices[first:last]
    counts = (listed >= 0) & (listed < op.rows)
    if op.topk_lengths is not None:
        place = torch.arange(listed.shape[1], device=listed.device)
        counts &= place < op.topk_lengths[first:last, None]
    named = torch.where(counts, listed, op.rows).flatten()
    ordered = torch.sort(named, stable=True)
    numbers = torch.arange(op.rows + 1, device=listed.device, dtype=named.dtype)
    return Entries(ordered.indices, torch.searchsorted(ordered.values, numbers))
