"""Tensor memory of a 64-row product: its rows take 16 of every 32 lanes.

Row r lies in lane 32 * (r // 16) + r % 16. Columns past the first block of a layout continue in the
lanes between, 16 further on: [64, 512] in blocks of 256 fills 256 columns of all lanes, [64, 64] in
one block fills 64 columns of half of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gluon_sim.values.dtypes import Array

ALL_LANES, HALF = 128, 64


def half_lane_width(base: Sequence[int], shape: Sequence[int], layout: Any) -> int:
    """Columns of a block if a view of `shape` takes half the lanes of `base`, else 0."""
    block = getattr(layout, "block", None)
    if block is None or int(block[0]) != HALF or getattr(layout, "two_ctas", False):
        return 0
    if len(shape) != 2 or tuple(base[-2:-1]) != (ALL_LANES,) or shape[0] != HALF:
        return 0
    return min(int(block[1]), shape[1])


def half_lanes(shape: Sequence[int], width: int, lane: int, itemsize: int) -> Array:
    """Bytes from the first element to every other one; a lane holds `lane` bytes.

    >>> half_lanes([64, 4], 2, 1000, 4)[[0, 0, 0, 16], [1, 2, 3, 0]].tolist()
    [4, 16000, 16004, 32000]
    """
    if shape[1] > 2 * width or width * itemsize > lane:
        raise ValueError(f"{list(shape)} in blocks of {width} columns do not fit the lanes")
    rows, columns = np.arange(shape[0]), np.arange(shape[1])
    lanes = (32 * (rows // 16) + rows % 16)[:, None] + 16 * (columns // width)[None, :]
    return lanes * lane + (columns % width)[None, :] * itemsize
