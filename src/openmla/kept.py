"""Small tensors that follow from numbers alone: made once, and kept for every later call.

On a GPU making one means waiting for a copy, which a captured graph may not have. What a graph was
captured with stays for good: it is read whenever the graph is replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar, TypeVarTuple

import torch

Given = TypeVarTuple("Given")
Made = TypeVar("Made")
_of_graphs: dict[int, object] = {}
"""What captured graphs read, by identity."""


def kept(most: int) -> Callable[[Callable[[*Given], Made]], Callable[[*Given], Made]]:
    """A decorator: the last `most` results are kept, as tensors that every later call can use.

    Autograd too, after a call under inference_mode. While torch traces, or a dispatch mode looks at
    every operation, none is kept.

    >>> @kept(most=4)
    ... def ones(count: int) -> torch.Tensor:
    ...     return torch.ones(count)
    >>> with torch.inference_mode():
    ...     made = ones(3)
    >>> made is ones(3), made.is_inference()
    (True, False)
    """

    def decorated(make: Callable[[*Given], Made]) -> Callable[[*Given], Made]:
        lasting = lru_cache(maxsize=most)(make)

        @wraps(make)
        def made(*args: *Given) -> Made:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                return make(*args)
            with torch.inference_mode(False):
                found = lasting(*args)
            if _capturing():
                _of_graphs[id(found)] = found
            return found

        return made

    return decorated


def _capturing() -> bool:
    """Whether what is launched now becomes part of a graph."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
