"""TMA descriptors of the dense operands.

Tensors are [rows, heads, columns] with any strides, so that no copy is ever made of a strided V or
of a rope part that all heads share (one "head"). A box is [rows, 1, columns] and fills a tile of
[rows, columns].
"""

from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SWIZZLE_BYTES = 128
# A ragged descriptor (below) claims so many rows, and its outermost stride times that is 2^64 bytes
# or a multiple, which is nothing to a 64-bit address.
RAGGED_ROWS = 1 << 30
RAGGED_STRIDE = 1 << 34
UNBOUNDED = 0x7FFF0000
STRIDE_STEP, STRIDE_LIMIT = 16, 1 << 40
"""Bytes: a descriptor's strides are multiples of the one and below the other."""


@lru_cache
def tile_layout(columns: int, rank: int = 2, element: int = 2, span: int = SWIZZLE_BYTES) -> Any:
    """The shared-memory layout of a tile of `element`-byte values, swizzled by `span` bytes."""
    swizzle = min(span, element * columns)
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * element, rank=rank)


def _layout_of(x: Tensor, columns: int, rank: int, span: int = 0) -> Any:
    """The layout of a tile of x. `span` 0 means 128 bytes, or 64 bytes for one-byte values."""
    element = x.element_size()
    usual = SWIZZLE_BYTES if element > 1 else SWIZZLE_BYTES // 2
    return tile_layout(columns, rank, element, span or usual)


def rows_of_heads(x: Tensor, rows: int, columns: int, span: int = 0) -> Any:
    """Boxes of `rows` rows and `columns` columns of one head of x [rows, heads, columns]."""
    box = [rows, 1, columns]
    return TensorDescriptor(x, list(x.shape), box_strides(x), box, _layout_of(x, columns, 3, span))


def shared_rows(x: Tensor, rows: int, span: int = 0, columns: int = 0) -> Any:
    """Boxes of `rows` rows of x [rows, columns], which all heads share. `columns`: those of a box,
    where it has more than x; they are filled with zeros."""
    row = fitting_strides(x)[0]
    shape, strides = [x.shape[0], 1, x.shape[1]], [row, row, 1]
    columns = columns or x.shape[1]
    return TensorDescriptor(x, shape, strides, [rows, 1, columns], _layout_of(x, columns, 3, span))


def ragged(x: Tensor, rows: int) -> Any:
    """Boxes that end where a sequence ends, wherever that is; the rest is filled with zeros.

    With R = RAGGED_ROWS, row r of a sequence of n rows that starts at row s has the coordinates
    (R, s + n, R - n + r): inside while r < n. Its address, in elements from the tensor's start, is

        R * (RAGGED_STRIDE - stride) + (s + n) * stride + (R - n + r) * stride
        = R * RAGGED_STRIDE + (s + r) * stride = (s + r) * stride   modulo 2^64 bytes.
    """
    stride_t, stride_h, _ = box_strides(x)
    shape = [UNBOUNDED, UNBOUNDED, RAGGED_ROWS, x.shape[1], x.shape[2]]
    strides = [RAGGED_STRIDE - stride_t, stride_t, stride_t, stride_h, 1]
    box = [1, 1, rows, 1, x.shape[2]]
    return TensorDescriptor(x, shape, strides, box, _layout_of(x, x.shape[2], 5))


def pages(x: Tensor, rows: int, columns: int = 0) -> Any:
    """Boxes of `rows` rows of one page of x [pages, page_size, columns]; for `columns` see
    `shared_rows`."""
    columns = columns or x.shape[2]
    box = [1, rows, columns]
    return TensorDescriptor(x, list(x.shape), box_strides(x), box, _layout_of(x, columns, 3))


def words(x: Tensor, rows: int) -> Any:
    """Boxes [rows, 4] of x int32 [rows, words], from any word on: the narrowest, 16 bytes wide."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), fitting_strides(x), [rows, 4], layout)


def lines(x: Tensor, columns: int) -> Any:
    """Boxes of so many 4-byte numbers of a line of x [lines, columns]."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(x, list(x.shape), fitting_strides(x), [1, columns], layout)


def fitting_strides(x: Tensor) -> list[int]:
    """Strides; where there is one query or page only, its stride is never used and may be one that
    no descriptor can have: then one that steps over all that lies inside it.

    >>> import torch
    >>> one_query = torch.empty(64, dtype=torch.uint8).as_strided((1, 4, 8), (2**40, 16, 1))
    >>> fitting_strides(one_query)
    [64, 16, 1]
    """
    strides, step = list(x.stride()), STRIDE_STEP // x.element_size()
    for i in reversed(range(x.dim() - 1)):
        if x.shape[i] == 1 and strides[i] * x.element_size() >= STRIDE_LIMIT:
            strides[i] = -(-strides[i + 1] * x.shape[i + 1] // step) * step
    return strides


def box_strides(x: Tensor) -> list[int]:
    """Strides; where there is one head only, its stride may be anything and is never used."""
    strides = fitting_strides(x)
    if x.shape[1] == 1:
        strides[1] = strides[0]
    return strides
