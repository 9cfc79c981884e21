"""Where the tensors of a case live, and what fills the memory that the case does not use.

Every tensor of a built case comes from `Memory.new`, which first fills all its bytes with a
background and hands out a (possibly strided) view; the builder then writes only what the problem
addresses. With another background the same case is poisoned, with another `_bytes` it lies against
a guard page or between margins, and with other strides past element 2^31: see `poison`, `guard`,
`margin` and `far`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BACKGROUNDS = ("zero", "nan", "inf", "ff")
"""What unaddressed memory holds: zeros, NaN, +Inf, or 0xFF in every byte."""
INT_FILL = {"zero": 0, "nan": 2147480000, "inf": -(2**31), "ff": -1}
"""For integers there is no NaN: a huge page number, the smallest one, and -1 serve instead."""
# 0x7F is NaN in e4m3, which has no Inf; raw cache rows (uint8) read it as 3.4e38 in their scales.
_BYTE_FILL = {"zero": 0, "nan": 0x7F, "inf": 0x7F, "ff": 0xFF}
_ROW_GAP, _OUTER_GAP = 3, 5
_ALIGNED = 16  # elements: 16 bytes or more in every dtype


class Memory:
    """Plain memory of one device with one background."""

    def __init__(self, device: torch.device | str = "cpu", background: str = "zero") -> None:
        if background not in BACKGROUNDS:
            raise ValueError(f"background: expected one of {BACKGROUNDS}, got {background!r}")
        self.device = torch.device(device)
        self.background = background
        self.buffers: list[Tensor] = []
        """The bytes of every tensor handed out, in order, gaps included."""

    def new(
        self, shape: Sequence[int], dtype: torch.dtype, strided: bool = False, aligned: bool = False
    ) -> Tensor:
        """A tensor full of background; `strided` and `aligned` leave gaps between its rows."""
        strides = dense_strides(shape)
        if strided or aligned:
            strides = gapped_strides(shape, aligned)
        reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        size = 0 if 0 in shape else reach
        raw = self._bytes(size * dtype.itemsize, dtype)
        self.buffers.append(raw)
        fill(raw, dtype, self.background)
        return raw.view(dtype).as_strided(tuple(shape), strides)

    def of(self, values: Tensor) -> Tensor:
        """A contiguous copy of `values`, all of it addressed."""
        copy = self.new(tuple(values.shape), values.dtype)
        copy.copy_(values)
        return copy

    def _bytes(self, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for elements of `dtype`, which fills it next."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def fill(raw: Tensor, dtype: torch.dtype, background: str) -> None:
    """Fill bytes so that elements of `dtype` read as the background."""
    if background in ("zero", "ff") or dtype.itemsize == 1:
        raw.fill_(_BYTE_FILL[background])
    elif dtype.is_floating_point:
        raw.view(dtype).fill_(torch.nan if background == "nan" else torch.inf)
    else:
        raw.view(dtype).fill_(INT_FILL[background])


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> dense_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def gapped_strides(shape: Sequence[int], aligned: bool = False) -> tuple[int, ...]:
    """Strides with a gap after every row and after every outer slice; the last dim stays dense.

    >>> gapped_strides((2, 3, 4)), gapped_strides((2, 3, 4), aligned=True)
    ((26, 7, 1), (64, 16, 1))
    """
    strides, step = [], 1
    for depth, size in enumerate(reversed(shape)):
        strides.append(step)
        step = step * max(size, 1) + (_ROW_GAP if depth == 0 else _OUTER_GAP)
        if aligned:
            step = -(-step // _ALIGNED) * _ALIGNED
    return tuple(reversed(strides))
