"""Arithmetic, shapes and reductions of the language: functions of registers only."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from gluon_sim.machine.context import current
from gluon_sim.values import dtypes, layouts
from gluon_sim.values.dtypes import DType
from gluon_sim.values.layouts import split_axis
from gluon_sim.values.rules import check_layout, check_shape
from gluon_sim.values.tensors import Pointer, Tensor, raw, scalar


def _split(layout: Any) -> int | None:
    return split_axis(layout) if layout is not None else None


def full(shape: Sequence[Any], value: Any, dtype: DType, layout: Any = None) -> Tensor:
    """A constant tensor."""
    extents = [int(n) for n in shape]
    check_shape(extents)
    check_layout(layout, len(extents))
    data = np.full(extents, dtype.round(np.asarray(raw(value))), dtype.register)
    return Tensor(data, dtype, _split(layout), layout)


def zeros(shape: Sequence[Any], dtype: DType, layout: Any = None) -> Tensor:
    """Zeros."""
    return full(shape, 0, dtype, layout)


def full_like(x: Tensor, value: Any, **_: Any) -> Tensor:
    """A constant tensor shaped as `x`."""
    return Tensor(np.full_like(x.value, raw(value)), x.dtype, x.split, x.layout)


def zeros_like(x: Tensor, **_: Any) -> Tensor:
    """Zeros shaped as `x`."""
    return full_like(x, 0)


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    """int32 from `start` up to `end`."""
    check_shape([int(end) - int(start)])
    check_layout(layout, 1)
    data = np.arange(int(start), int(end), dtype=np.int32)
    return Tensor(data, dtypes.int32, _split(layout), layout)


def static_range(*bounds: Any) -> builtins.range:
    """Unrolled loop: plain integers, as constexprs are."""
    return builtins.range(*(int(b) for b in bounds))


def range(*bounds: Any, **_: Any) -> Iterator[Tensor]:
    """A runtime loop: its variable is an int32 (or wider) register."""
    values = [scalar(b) for b in bounds]
    wide = any(v.dtype is dtypes.int64 for v in values)
    dtype = dtypes.int64 if wide else dtypes.int32
    for i in builtins.range(*(int(v) for v in values)):
        current().count_step()
        yield Tensor(dtype.register(i), dtype)


def convert_layout(x: Tensor | Pointer, layout: Any = None, **_: Any) -> Tensor | Pointer:
    """Layouts carry no values; only the cluster split of the new one is kept. A layout that was
    inferred is not known here: it splits as the value that it was inferred from."""
    if isinstance(x, Pointer):
        return x
    if x.split is not None and layout is not None and _split(layout) != x.split:
        x.require_whole("a layout conversion")
    return Tensor(x.value, x.dtype, x.split, layout)


def expand_dims(x: Tensor, axis: int) -> Tensor:
    """Insert an axis of extent 1."""
    rank = len(x.shape) + 1
    index: list[Any] = [slice(None)] * rank
    index[int(axis) % rank] = None
    return x[tuple(index)]


def broadcast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both operands at their common shape."""
    a, b = np.broadcast_arrays(x.value, y.value)
    split = x.split if x.split is not None else y.split
    return Tensor(a, x.dtype, split, x.layout), Tensor(b, y.dtype, split, y.layout)


def reshape(x: Tensor, shape: Sequence[Any], **_: Any) -> Tensor:
    """Row-major reshape."""
    return x.reshape(shape)


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """Axes in another order."""
    return x.trans(*order)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of a last axis of extent 2, which a cluster does not split."""
    if x.split == -1:
        x.require_whole("a split")
    value, split = x.value, None if x.split is None else x.split + 1
    return Tensor(value[..., 0], x.dtype, split), Tensor(value[..., 1], x.dtype, split)


def join(x: Tensor, y: Tensor) -> Tensor:
    """The inverse of `split`."""
    if x.split != y.split:
        x.require_whole("a join with a value that is not split alike")
    split = None if x.split is None else x.split - 1
    return Tensor(np.stack([x.value, y.value], -1), dtypes.promote(x.dtype, y.dtype), split)


def _pair(x: Any, y: Any) -> tuple[Tensor, Any]:
    return (x, y) if isinstance(x, Tensor) else (y, x) if isinstance(y, Tensor) else (scalar(x), y)


def maximum(x: Any, y: Any, **_: Any) -> Any:
    """Larger of two; the number wins over NaN, as `max.f32`."""
    a, b = _pair(x, y)
    return a._binary(b, lambda p, q: np.fmax(p, q) if a.dtype.is_float else np.maximum(p, q))


def minimum(x: Any, y: Any, **_: Any) -> Any:
    """Smaller of two; the number wins over NaN, as `min.f32`."""
    a, b = _pair(x, y)
    return a._binary(b, lambda p, q: np.fmin(p, q) if a.dtype.is_float else np.minimum(p, q))


def where(condition: Any, x: Any, y: Any) -> Any:
    """Elementwise choice."""
    if isinstance(x, Pointer) or isinstance(y, Pointer):
        offset = np.where(raw(condition), x.offset, y.offset)
        return Pointer(x.buffer, offset, x.split)
    a, b = scalar(x), scalar(y)
    plain_x, plain_y = not isinstance(x, Tensor), not isinstance(y, Tensor)
    dtype = b.dtype if plain_x and not plain_y else a.dtype if plain_y else None
    if dtype is None or (dtype.kind != "float" and (a.dtype.is_float or b.dtype.is_float)):
        dtype = dtypes.promote(a.dtype, b.dtype)
    data = np.where(raw(condition), a.value, b.value).astype(dtype.register)
    splits = [v.split for v in (condition, a, b) if isinstance(v, Tensor) and v.split is not None]
    split = splits[0] if splits else None
    current().charge(np.size(data), split=split)
    return Tensor(data, dtype, split, a.layout if not plain_x else b.layout)


def _unary(function: Callable[[Any], Any], unit: str = "vector") -> Callable[[Any], Tensor]:
    def apply(x: Any) -> Tensor:
        t = scalar(x)
        value = t.value
        current().charge(np.size(value), unit, t.split)
        return Tensor(t.dtype.round(function(value)), t.dtype, t.split, t.layout)

    return apply


_erf = np.vectorize(math.erf, otypes=[np.float32])


def fma(x: Tensor, y: Any, z: Any) -> Any:
    """x * y + z with one rounding."""
    wide = x.value.astype(np.float64) * raw(y) + raw(z)
    current().charge(np.size(wide))
    split = next((v.split for v in (x, y, z) if isinstance(v, Tensor) and v.split), None)
    return Tensor(x.dtype.round(wide), x.dtype, split, x.layout)


def fdiv(x: Any, y: Any, **_: Any) -> Any:
    """Division."""
    return scalar(x) / y


def cdiv(x: Any, y: Any) -> Any:
    """Ceiling division."""
    return (x + (y - 1)) // y


def _reduce(function: Callable[..., Any], unit_dtype: bool = False) -> Callable[..., Any]:
    def apply(x: Tensor, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Any:
        value = x.value
        current().charge(np.size(value), split=x.split)
        dtype = x.dtype
        if unit_dtype and dtype.kind in ("int", "uint", "bool") and dtype.bits < 32:
            dtype = dtypes.int32 if dtype.kind != "uint" else dtypes.uint32
        data = function(value.astype(dtype.register, copy=False), axis=axis, keepdims=keep_dims)
        kept = None
        if x.split is not None and axis is not None:
            rank, position = len(x.shape), len(x.shape) + x.split
            if int(axis) % rank == position:
                x.require_whole("a reduction along the axis")
            after = position > int(axis) % rank
            kept = position - (after and not keep_dims) - (rank - (not keep_dims))
        layout = layouts.SliceLayout(axis, x.layout) if axis is not None else None
        return Tensor(dtype.round(data), dtype, kept, layout)

    return apply


def _sum(value: Any, axis: Any, keepdims: bool) -> Any:
    if value.dtype == np.float32:
        return value.sum(axis=axis, keepdims=keepdims, dtype=np.float32)
    return value.sum(axis=axis, keepdims=keepdims)


def reduce(x: Tensor, axis: int, combine: Callable[..., Any], **_: Any) -> Any:
    """A reduction with the kernel's own combine function, left to right."""
    value = x.value
    parts = [Tensor(np.take(value, i, axis), x.dtype) for i in static_range(value.shape[axis])]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def associative_scan(
    x: Tensor, axis: int, combine: Callable[..., Any], reverse: bool = False, **_: Any
) -> Tensor:
    """Running totals with the kernel's own combine function."""
    x.require_whole("a scan")
    value = x.value
    parts = [Tensor(np.take(value, i, axis), x.dtype) for i in static_range(value.shape[axis])]
    totals = parts[-1:] if reverse else parts[:1]
    for part in reversed(parts[:-1]) if reverse else parts[1:]:
        totals.append(combine(totals[-1], part))
    ordered = reversed(totals) if reverse else totals
    return Tensor(np.stack([t.value for t in ordered], axis), x.dtype, x.split, x.layout)


def gather(x: Tensor, index: Tensor, axis: int) -> Tensor:
    """Elements of `x` picked along `axis`."""
    x.require_whole("a gather")
    return Tensor(np.take_along_axis(x.value, index.value, axis), x.dtype)


def to_tensor(x: Any) -> Any:
    """A register value."""
    return x if isinstance(x, Tensor | Pointer) else scalar(x)


def cast(x: Any, dtype: DType, **kwargs: Any) -> Tensor:
    """Convert."""
    return scalar(x).to(dtype, **kwargs)


def _same(x: Any, *_: Any, **__: Any) -> Any:
    """Hints change nothing here."""
    return x


def _binary(symbol: str) -> Callable[..., Any]:
    return lambda x, y, **_: getattr(scalar(x), symbol)(y)


NAMES: dict[str, Any] = {
    **{d.name: d for d in dtypes.ALL if not d.is_float},
    "float64": dtypes.float64,
    "float32": dtypes.float32,
    "float16": dtypes.float16,
    "bfloat16": dtypes.bfloat16,
    "float8e4nv": dtypes.float8e4nv,
    "float8e5": dtypes.float8e5,
    **{
        name: getattr(layouts, name)
        for name in dir(layouts)
        if name.endswith("Layout") and name != "Layout"
    },
    "constexpr": _same,
    "tensor": Tensor,
    "full": full,
    "zeros": zeros,
    "full_like": full_like,
    "zeros_like": zeros_like,
    "arange": arange,
    "static_range": static_range,
    "range": range,
    "convert_layout": convert_layout,
    "set_auto_layout": convert_layout,
    "expand_dims": expand_dims,
    "broadcast": broadcast,
    "reshape": reshape,
    "permute": permute,
    "split": split,
    "join": join,
    "maximum": maximum,
    "minimum": minimum,
    "where": where,
    "exp": _unary(np.exp, "exp"),
    "exp2": _unary(np.exp2, "exp"),
    "log": _unary(np.log, "exp"),
    "log2": _unary(np.log2, "exp"),
    "sqrt": _unary(np.sqrt, "exp"),
    "sqrt_rn": _unary(np.sqrt, "exp"),
    "rsqrt": _unary(lambda v: 1 / np.sqrt(v), "exp"),
    "sin": _unary(np.sin, "exp"),
    "cos": _unary(np.cos, "exp"),
    "erf": _unary(_erf, "exp"),
    "abs": _unary(np.abs),
    "floor": _unary(np.floor),
    "ceil": _unary(np.ceil),
    "fma": fma,
    "fdiv": fdiv,
    "div_rn": fdiv,
    "cdiv": cdiv,
    "max": _reduce(np.fmax.reduce),  # the number wins over NaN
    "min": _reduce(np.fmin.reduce),
    "sum": _reduce(_sum, unit_dtype=True),
    "xor_sum": _reduce(np.bitwise_xor.reduce),
    "reduce_or": _reduce(np.bitwise_or.reduce),
    "reduce": reduce,
    "associative_scan": associative_scan,
    "gather": gather,
    "to_tensor": to_tensor,
    "cast": cast,
    "add": _binary("__add__"),
    "sub": _binary("__sub__"),
    "mul": _binary("__mul__"),
    "multiple_of": _same,
    "max_contiguous": _same,
    "max_constancy": _same,
}
