"""Register values: tensors, scalars (tensors of rank 0) and pointers.

A `Tensor` follows Triton's rules for result types, C division, and wrap-around integers. It also
knows two things a GPU register knows implicitly: whether an asynchronous matrix product is still
writing it (`pending`), and, in a cluster of two CTAs, along which axis it is split (`split`,
counted from the last axis so that broadcasting keeps it; None means every CTA holds all of it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gluon_sim.errors import Unsupported
from gluon_sim.machine.context import current
from gluon_sim.values import dtypes
from gluon_sim.values.dtypes import DType

if TYPE_CHECKING:
    from gluon_sim.machine.async_units import AsyncOp
    from gluon_sim.memory.global_memory import GlobalBuffer

Binary = Callable[[Any, Any], Any]


class TensorType:
    """What `tensor.type` gives a kernel: its layout, nothing else."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout


class Tensor:
    """A value in registers. `data` is the NumPy array, `dtype` the simulated element type."""

    __slots__ = ("data", "dtype", "layout", "pending", "split")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        data: Any,
        dtype: DType,
        split: int | None = None,
        layout: Any = None,
        pending: AsyncOp | None = None,
    ) -> None:
        self.data = data
        self.dtype = dtype
        self.split = split
        self.layout = layout
        self.pending = pending

    @property
    def value(self) -> Any:
        """The array, after checking that no matrix product is still writing it."""
        if self.pending is not None:
            self.pending.check_finished(self)
        return self.data

    @property
    def shape(self) -> list[int]:
        """Extents, as a kernel sees them."""
        return list(np.shape(self.data))

    @property
    def type(self) -> TensorType:
        """The layout carrier that kernels read."""
        return TensorType(self.layout)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(np.size(self.data))

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, {self.dtype})"

    # -- conversions
    def __bool__(self) -> bool:
        current().count_step()
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def to(self, dtype: DType, bitcast: bool = False, **_: Any) -> Tensor:
        """Convert (round) or, with `bitcast`, reinterpret the bits."""
        if bitcast:
            raw = self.dtype.encode(np.asarray(self.value)).view(dtype.storage)
            return Tensor(dtype.decode(raw), dtype, self.split, self.layout)
        value = self.value
        current().charge(np.size(value), split=self.split)
        if dtype is self.dtype:
            return Tensor(value, dtype, self.split, self.layout)
        return Tensor(dtype.round(value), dtype, self.split, self.layout)

    cast = to

    # -- indexing: only [:, None] style expansion exists in the language
    def __getitem__(self, index: Any) -> Tensor:
        parts = index if isinstance(index, tuple) else (index,)
        split = self.split
        if split is not None:
            after = 0
            axis = len(self.shape) + split
            seen = -1
            for part in parts:
                seen += part is not None
                after += part is None and seen >= axis
            split -= after
        return Tensor(self.value[index], self.dtype, split, self.layout)

    # -- arithmetic
    def _operand(self, other: Any) -> tuple[Any, DType, int | None]:
        """The other operand's value, the type to compute in, and the merged split."""
        if isinstance(other, Tensor):
            split = self.split if self.split is not None else other.split
            return other.value, dtypes.promote(self.dtype, other.dtype), split
        dtype = self.dtype
        if isinstance(other, float) and not dtype.is_float:
            dtype = dtypes.float32
        elif not isinstance(other, bool) and dtype.kind == "bool":
            dtype = dtypes.int32
        return other, dtype, self.split

    def _binary(self, other: Any, op: Binary) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        right, dtype, split = self._operand(other)
        left = self.value
        if dtype.is_float or dtype.register != left.dtype.type:
            left = left.astype(dtype.register, copy=False)
            if isinstance(other, Tensor):
                right = right.astype(dtype.register, copy=False)
        result = op(left, right)
        current().charge(result.size, split=split)
        # An fp32 register holds every fp32 number; an integer of the register's type is the result.
        exact = dtype is dtypes.float32 if dtype.is_float else result.dtype.type is dtype.register
        if not exact:
            result = dtype.round(result)
        return Tensor(result, dtype, split, self.layout)

    def __add__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a - b)

    def __rsub__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a * b)

    __radd__ = __add__
    __rmul__ = __mul__

    def _float_operands(self, other: Any) -> tuple[Tensor, Any]:
        """Both operands as floats: `/` never divides integers."""
        left = self if self.dtype.is_float else self.to(dtypes.float32)
        if isinstance(other, Tensor) and not other.dtype.is_float:
            other = other.to(dtypes.float32)
        return left, float(other) if isinstance(other, int) else other

    def __truediv__(self, other: Any) -> Any:
        left, right = self._float_operands(other)
        return left._binary(right, lambda a, b: np.divide(a, b))

    def __rtruediv__(self, other: Any) -> Any:
        left, right = self._float_operands(other)
        return left._binary(right, lambda a, b: np.divide(np.float32(b), a))

    def __floordiv__(self, other: Any) -> Any:
        return self._binary(other, _c_div)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: _c_div(b, a))

    def __mod__(self, other: Any) -> Any:
        return self._binary(other, np.fmod)

    def __rmod__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: np.fmod(b, a))

    def __lshift__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a << b)

    def __rshift__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a >> b)

    def __rlshift__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: b << a)

    def __rrshift__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: b >> a)

    def __and__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a & b)

    def __or__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a | b)

    def __xor__(self, other: Any) -> Any:
        return self._binary(other, lambda a, b: a ^ b)

    __rand__ = __and__
    __ror__ = __or__
    __rxor__ = __xor__

    def __neg__(self) -> Any:
        return self._binary(0, lambda a, b: b - a)

    def __invert__(self) -> Any:
        return Tensor(~self.value, self.dtype, self.split, self.layout)

    def _compare(self, other: Any, op: Binary) -> Tensor:
        right, _, split = self._operand(other)
        return Tensor(op(self.value, right), dtypes.int1, split, self.layout)

    def __lt__(self, other: Any) -> Tensor:
        return self._compare(other, np.less)

    def __le__(self, other: Any) -> Tensor:
        return self._compare(other, np.less_equal)

    def __gt__(self, other: Any) -> Tensor:
        return self._compare(other, np.greater)

    def __ge__(self, other: Any) -> Tensor:
        return self._compare(other, np.greater_equal)

    def __eq__(self, other: Any) -> Any:
        return self._compare(other, np.equal)

    def __ne__(self, other: Any) -> Any:
        return self._compare(other, np.not_equal)

    def require_whole(self, what: str) -> None:
        """Refuse an operation that would move data between the CTAs of a cluster."""
        if self.split is not None:
            raise Unsupported(f"{what} of a value that a cluster splits is not modeled")

    # -- methods that mirror functions of the language
    def reshape(self, *shape: Any) -> Tensor:
        """Row-major reshape. A split first axis may stay as it is."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        extents = [int(x) for x in given]
        split = None
        if self.split == -len(self.shape) and extents[0] == self.shape[0]:
            split = -len(extents)
        else:
            self.require_whole("a reshape")
        return Tensor(self.value.reshape(extents), self.dtype, split)

    def trans(self, *order: int) -> Tensor:
        """Permute axes (reverse them by default)."""
        axes = list(order) or list(range(len(self.shape)))[::-1]
        split = None
        if self.split is not None:
            split = axes.index(len(axes) + self.split) - len(axes)
        return Tensor(self.value.transpose(axes), self.dtype, split)

    permute = trans


def _c_div(a: Any, b: Any) -> Any:
    """Division that rounds to zero, as C and PTX do. Division by zero gives -1, as the hardware."""
    safe = np.where(np.equal(b, 0), 1, b)
    quotient = np.floor_divide(np.abs(a), np.abs(safe))
    signed = np.where((np.asarray(a) < 0) != (np.asarray(safe) < 0), -quotient, quotient)
    return np.where(np.equal(b, 0), -1, signed)


class Pointer:
    """A pointer, or a tensor of pointers, into one global buffer; `offset` counts elements."""

    __slots__ = ("buffer", "offset", "split")

    def __init__(self, buffer: GlobalBuffer, offset: Any = 0, split: int | None = None) -> None:
        self.buffer = buffer
        self.offset = offset
        self.split = split

    @property
    def dtype(self) -> PointerType:
        """Pointer type; `element_ty` is what it points to."""
        return PointerType(self.buffer.dtype)

    @property
    def shape(self) -> list[int]:
        """Extents of a tensor of pointers."""
        return list(np.shape(self.offset))

    def __add__(self, other: Any) -> Pointer:
        value, split = other, self.split
        if isinstance(other, Tensor):
            # Index arithmetic wraps in the kernel's own integer type before it reaches here; an
            # address never wraps.
            value = np.asarray(other.value, np.int64)
            split = split if split is not None else other.split
        return Pointer(self.buffer, self.offset + value, split)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self.__add__(-other)

    def __getitem__(self, index: Any) -> Pointer:
        expanded = Tensor(np.asarray(self.offset), dtypes.int64, self.split)[index]
        return Pointer(self.buffer, expanded.data, expanded.split)

    def to(self, *_: Any, **__: Any) -> Pointer:
        """Pointer casts keep the element type: the simulator does not model type punning here."""
        return self


class PointerType:
    """Type of a pointer."""

    def __init__(self, element_ty: DType) -> None:
        self.element_ty = element_ty


def raw(x: Any) -> Any:
    """The plain value of a tensor, or the argument itself."""
    return x.value if isinstance(x, Tensor) else x


def scalar(x: Any, dtype: DType | None = None) -> Tensor:
    """A Python number as the register value a kernel argument of that size becomes.

    >>> scalar(3).dtype, scalar(2**40).dtype, scalar(0.5).dtype, scalar(True).dtype
    (int32, int64, fp32, int1)
    """
    if isinstance(x, Tensor):
        return x
    if dtype is None:
        if isinstance(x, bool | np.bool_):
            dtype = dtypes.int1
        elif isinstance(x, int | np.integer):
            dtype = dtypes.int32 if -(2**31) <= x < 2**31 else dtypes.int64
        else:
            dtype = dtypes.float32
    return Tensor(np.asarray(x).astype(dtype.register)[()], dtype)
