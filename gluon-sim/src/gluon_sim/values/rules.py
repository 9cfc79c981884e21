"""What Triton refuses when it compiles: shapes and layouts that no tensor of registers may have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gluon_sim.machine.context import current

MOST_ELEMENTS = 1 << 20
WARP_SIZES = (32, 64)


def check_shape(shape: Sequence[int]) -> None:
    """Every extent is a power of two, and there are at most 2^20 elements.

    >>> check_shape([64, 1])
    >>> check_shape([48])
    Traceback (most recent call last):
    ...
    ValueError: shape [48]: Triton wants powers of two
    """
    if any(n < 1 or n & (n - 1) for n in shape):
        raise ValueError(f"shape {list(shape)}: Triton wants powers of two")
    if math.prod(shape) > MOST_ELEMENTS:
        raise ValueError(f"shape {list(shape)}: Triton has at most {MOST_ELEMENTS} elements")


def check_layout(layout: Any, rank: int) -> None:
    """A layout of registers has the tensor's axes, whole warps, and all warps of the partition."""
    name = type(layout).__name__
    if name == "SliceLayout":
        if not 0 <= int(layout.dim) <= rank:
            raise ValueError(f"axis {layout.dim} is cut from a layout of {rank + 1} axes")
        check_layout(layout.parent, rank + 1)
        return
    if name != "BlockedLayout":
        return
    parts = (layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta, layout.order)
    extents = [[int(n) for n in part] for part in parts]
    if any(len(part) != rank for part in extents):
        raise ValueError(f"a layout of {len(extents[0])} axes for a tensor of {rank}")
    each, threads, warps, order = extents
    if any(n < 1 or n & (n - 1) for n in (*each, *threads, *warps)):
        raise ValueError(f"{layout}: Triton wants powers of two")
    if sorted(order) != list(range(rank)):
        raise ValueError(f"order {order} of {rank} axes")
    if math.prod(threads) not in WARP_SIZES:
        raise ValueError(f"{math.prod(threads)} threads of a warp in {layout}")
    if math.prod(warps) != current().num_warps:
        raise ValueError(
            f"{math.prod(warps)} warps in {layout}, the partition has {current().num_warps}"
        )
