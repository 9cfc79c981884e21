"""Element types of the simulator and how their values are held.

Memory (global, shared, tensor memory) holds raw bits, so that a view may reinterpret them.
Registers hold values: every float of 32 bits or fewer is a float32 array whose elements are
representable in the narrower type, integers are NumPy integers of their own width (they wrap
around), int1 is bool.

>>> import numpy as np
>>> bfloat16.round(np.float32([1.00390625, 3.0])).tolist()
[1.0, 3.0]
>>> float8e4nv.decode(float8e4nv.encode(np.float32([0.3, 1000.0]))).tolist()
[0.3125, 448.0]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

# 8-bit formats and bfloat16 have no NumPy type: their bits travel as unsigned integers.
_TORCH_CODED = {
    "bf16": (torch.bfloat16, torch.int16, 3.3895313892515355e38),
    "fp8e4nv": (torch.float8_e4m3fn, torch.uint8, 448.0),
    "fp8e5": (torch.float8_e5m2, torch.uint8, 57344.0),
}


@dataclass(frozen=True)
class DType:
    """One element type: `storage` is the NumPy type of its bits, `register` of its values."""

    name: str
    bits: int
    storage: Any
    register: Any
    kind: str  # "float", "int", "uint" or "bool"

    def __repr__(self) -> str:
        return self.name

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory."""
        return max(self.bits // 8, 1)

    @property
    def primitive_bitwidth(self) -> int:
        """The name kernels use for `bits`."""
        return self.bits

    @property
    def is_float(self) -> bool:
        """Whether values are floating point."""
        return self.kind == "float"

    def is_floating(self) -> bool:
        """The name kernels use for `is_float`."""
        return self.is_float

    def encode(self, values: Array) -> Array:
        """Bits of `values`, rounded to nearest even (8-bit floats saturate, as `cvt.satfinite`)."""
        if self.name not in _TORCH_CODED:
            return np.asarray(values).astype(self.storage)
        coded, bits, top = _TORCH_CODED[self.name]
        source = np.ascontiguousarray(values, dtype=np.float32)
        if self.bits == 8:
            source = np.clip(source, -top, top)
        out = torch.from_numpy(source.reshape(-1)).to(coded).view(bits).numpy()
        encoded: Array = out.view(self.storage).reshape(source.shape)
        return encoded

    def decode(self, raw: Array) -> Array:
        """Values of the bits in `raw`."""
        if self.name == "bf16":
            wide = raw.astype(np.uint32)
            wide <<= np.uint32(16)
            return wide.view(np.float32)
        if self.name in _TORCH_CODED:
            decoded: Array = _table(self.name)[raw]
            return decoded
        return raw.astype(self.register)

    def round(self, values: Array) -> Array:
        """`values` as this type would hold them in a register."""
        if self.name in _TORCH_CODED or self.name == "fp16":
            return self.decode(self.encode(values))
        if self.kind in ("int", "uint") and np.asarray(values).dtype.kind == "f":
            return np.trunc(values).astype(np.int64).astype(self.register)
        return np.asarray(values).astype(self.register)

    def to(self, other: DType) -> DType:  # pragma: no cover - kernels never call it
        """Present so that a dtype and a value share an attribute set."""
        return other


_TABLES: dict[str, Array] = {}


def _table(name: str) -> Array:
    """All 256 values of an 8-bit float."""
    if name not in _TABLES:
        coded = _TORCH_CODED[name][0]
        _TABLES[name] = torch.arange(256, dtype=torch.uint8).view(coded).float().numpy()
    return _TABLES[name]


def _float(name: str, bits: int, storage: Any, register: Any = np.float32) -> DType:
    return DType(name, bits, storage, register, "float")


int1 = DType("int1", 8, np.bool_, np.bool_, "bool")
int8, int16, int32, int64 = (
    DType(f"int{b}", b, np.dtype(f"i{b // 8}").type, np.dtype(f"i{b // 8}").type, "int")
    for b in (8, 16, 32, 64)
)
uint8, uint16, uint32, uint64 = (
    DType(f"uint{b}", b, np.dtype(f"u{b // 8}").type, np.dtype(f"u{b // 8}").type, "uint")
    for b in (8, 16, 32, 64)
)
float64 = _float("fp64", 64, np.float64, np.float64)
float32 = _float("fp32", 32, np.float32)
float16 = _float("fp16", 16, np.float16)
bfloat16 = _float("bf16", 16, np.uint16)
float8e4nv = _float("fp8e4nv", 8, np.uint8)
float8e5 = _float("fp8e5", 8, np.uint8)

ALL: tuple[DType, ...] = (int1, int8, int16, int32, int64, uint8, uint16, uint32, uint64)
ALL += (float64, float32, float16, bfloat16, float8e4nv, float8e5)
BY_NAME = {d.name: d for d in ALL}

_FROM_TORCH = {
    torch.bool: int1,
    torch.int8: int8,
    torch.int16: int16,
    torch.int32: int32,
    torch.int64: int64,
    torch.uint8: uint8,
    torch.float64: float64,
    torch.float32: float32,
    torch.float16: float16,
    torch.bfloat16: bfloat16,
    torch.float8_e4m3fn: float8e4nv,
    torch.float8_e5m2: float8e5,
}


def from_torch(dtype: torch.dtype) -> DType:
    """The simulator's type for a torch dtype."""
    if dtype not in _FROM_TORCH:
        raise TypeError(f"the simulator has no element type for {dtype}")
    return _FROM_TORCH[dtype]


def matmul(a: Array, b: Array) -> Array:
    """a @ b in float32. Torch's product, because `simulate` can hold it to one thread."""
    left, right = (torch.from_numpy(np.asarray(x, np.float32)) for x in (a, b))
    product: Array = torch.mm(left, right).numpy()
    return product


def promote(a: DType, b: DType) -> DType:
    """The type Triton computes `a op b` in, for two tensors.

    >>> promote(bfloat16, float32), promote(int32, int64), promote(float16, bfloat16)
    (fp32, int64, fp32)
    """
    if a is b:
        return a
    if a.is_float or b.is_float:
        if not (a.is_float and b.is_float):
            return a if a.is_float else b
        if a.bits != b.bits:
            return a if a.bits > b.bits else b
        return float16 if a.bits == 8 else float32
    if a.kind == "bool" or b.kind == "bool":
        return b if a.kind == "bool" else a
    if a.bits != b.bits:
        return a if a.bits > b.bits else b
    return a if a.kind == "uint" else b
