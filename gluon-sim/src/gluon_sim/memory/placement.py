"""Where the elements of a tile lie in shared memory, for layouts given by bases.

`SharedLinearLayout` and `PaddedSharedLayout` say which coordinate each bit of the (unpadded) offset
stands for. They are modeled because a kernel may write a buffer through one of them and read it
through another: two views that disagree about a byte then really read the wrong element. All other
layouts are taken as row-major, which no view of another layout may contradict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gluon_sim.values.dtypes import Array


class Placement(NamedTuple):
    """Element offsets of a tile, and how many elements the next tile is away."""

    offsets: Array
    extent: int


def placement(layout: Any, shape: Sequence[int]) -> Placement | None:
    """The place of every element, or None for a row-major layout.

    >>> from gluon_sim.values.layouts import PaddedSharedLayout, SharedLinearLayout
    >>> placement(SharedLinearLayout([[1, 0], [0, 1]]), [2, 2]).offsets.tolist()  # column-major
    [[0, 2], [1, 3]]
    >>> padded = PaddedSharedLayout([[2, 1]], [[0, 1], [1, 0]])
    >>> placement(padded, [2, 2]).offsets.tolist(), placement(padded, [2, 2]).extent
    ([[0, 1], [3, 4]], 6)
    """
    bases = getattr(layout, "offset_bases", None)
    if not bases:
        return None
    tile = [int(n) for n in shape[len(shape) - len(bases[0]) :]]
    if 1 << len(bases) != int(np.prod(tile)):
        raise ValueError(f"{len(bases)} bases do not describe a tile of {tile}")
    unpadded = np.arange(1 << len(bases))
    padded = unpadded.copy()
    extent = len(unpadded)
    for every, padding in getattr(layout, "interval_padding_pairs", None) or ():
        padded += unpadded // int(every) * int(padding)
        extent += len(unpadded) // int(every) * int(padding)
    where = np.zeros((len(tile), len(unpadded)), np.int64)
    for bit, basis in enumerate(bases):
        for axis, step in enumerate(basis):
            where[axis] ^= np.where(unpadded >> bit & 1, int(step), 0)
    offsets = np.full(tile, -1)
    offsets[tuple(where)] = padded
    if (offsets < 0).any():
        raise ValueError(f"the bases {bases} do not reach every element of {tile}")
    return Placement(offsets, extent)
