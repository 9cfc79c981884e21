"""Sorts as a GPU may do them: the order of equals is kept where a call asks for that alone.

On the CPU every sort of torch keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def unstable_sorts() -> Iterator[None]:
    """torch.sort and torch.argsort reverse the order of equals unless it must be stable.

    >>> ones = torch.ones(3)
    >>> with unstable_sorts():
    ...     torch.argsort(ones).tolist(), torch.argsort(ones, stable=True).tolist()
    ([2, 1, 0], [0, 1, 2])
    """
    sort = torch.sort

    def other(x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = False) -> Any:
        given = x if stable else x.flip(dim)
        found = sort(given, dim=dim, descending=descending, stable=True)
        numbers = found.indices if stable else x.shape[dim] - 1 - found.indices
        return torch.return_types.sort((found.values, numbers))  # type: ignore[attr-defined]

    def argsort(*given: Any, **options: Any) -> Tensor:
        numbers: Tensor = other(*given, **options).indices
        return numbers

    with patch.object(torch, "sort", other), patch.object(torch, "argsort", argsort):
        yield
