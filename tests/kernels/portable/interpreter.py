"""Triton's interpreter with right bf16 and e4m3 arithmetic, for portable kernels on a CPU.

Set TRITON_INTERPRET=1 before triton is imported, import this module, then launch as usual.

The interpreter keeps bf16 as uint16 and e4m3 as uint8 words and, up to triton 3.9 at least,

- multiplies those words as integers in tl.dot (bf16),
- truncates fp32 -> bf16 where the GPU rounds to nearest even, and loses the carry where it rounds,
- takes loop bounds from arrays of one element, which numpy 2.4 refuses.

`repair` gives it torch's conversions, which round as the GPU does, and dots in fp32. It also takes
out what costs the interpreter two thirds of its time and changes nothing: the language is patched
anew for every call of a device function, types are looked up in a dictionary that is built for each
lookup, and sums of integers are checked for overflow although the check's verdict is dropped unless
the kernel is debugged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

_TORCH = {
    "bf16": (torch.bfloat16, np.uint16, torch.int16),
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8, torch.uint8),
    "fp16": (torch.float16, np.float16, None),
    "fp32": (torch.float32, np.float32, None),
    "fp64": (torch.float64, np.float64, None),
}

_patch_lang = interpreter._patch_lang
_patch_lang_tensor = interpreter._patch_lang_tensor
_scalar_dtype = cache(interpreter._get_np_dtype)


def _to_torch(words: Any, dtype: Any) -> torch.Tensor:
    kind, storage, carrier = _TORCH[dtype.name]
    array = np.ascontiguousarray(words).view(storage)
    if carrier is None:
        return torch.from_numpy(array)
    signed = array.view(np.int16) if carrier is torch.int16 else array
    return torch.from_numpy(signed).view(kind)


def _from_torch(values: torch.Tensor, dtype: Any) -> Any:
    kind, storage, carrier = _TORCH[dtype.name]
    exact = values.to(kind)
    return (exact if carrier is None else exact.view(carrier)).numpy().view(storage)


def convert(words: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """Replaces the interpreter's _convert_float: round to nearest even."""
    return _from_torch(_to_torch(words, source), target)


def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_imprecise: Any) -> Any:
    """Replaces InterpreterBuilder.create_dot: operands as fp32, products summed in fp32."""
    left, right = (_to_torch(x.data, x.dtype.scalar).float() for x in (a, b))
    product = torch.matmul(left, right).numpy()
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def cast(self: Any, src: Any, dst_type: Any) -> Any:
    """Replaces InterpreterBuilder.cast_impl where a narrow float is involved."""
    source, target = src.dtype.scalar, dst_type.scalar
    if {source.name, target.name} & {"bf16", "fp8e4nv"}:
        return interpreter.TensorHandle(convert(src.data, source, target, None), target)
    words = src.data.astype(interpreter._get_np_dtype(dst_type))
    return interpreter.TensorHandle(words, target)


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Adds to the interpreter's _patch_lang_tensor: scalars as loop bounds."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def np_dtype(dtype: Any) -> Any:
    """Replaces the interpreter's _get_np_dtype: a scalar's is looked up once."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _scalar_dtype(scalar)


@cache
def _patched(*modules: Any) -> None:
    """Patch what a function sees of the language, for the rest of the process."""
    sees = dict(zip("ab", modules, strict=False))
    _patch_lang(FunctionType((lambda: None).__code__, sees))


def patch_lang(fn: Any) -> Any:
    """Replaces the interpreter's _patch_lang: once for each set of modules, nothing to restore."""
    seen = {x.__name__: x for x in fn.__globals__.values() if x is tl or x is tl.core}
    _patched(*(seen[name] for name in sorted(seen)))
    return interpreter._LangPatchScope()


def repair() -> None:
    """Install the replacements; harmless to call twice."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.cast_impl = cast


@contextmanager
def numbered_from(first: int) -> Iterator[None]:
    """Programs have the numbers from `first` on: the last of a grid that is too long run alone."""

    def program_id(self: Any, axis: int) -> Any:
        number = self.grid_idx[axis] + (first if axis == 0 else 0)
        return interpreter.TensorHandle(np.array([number], np.int32), tl.int32)

    with patch.object(interpreter.InterpreterBuilder, "create_get_program_id", program_id):
        yield


assert tl.bfloat16.name == "bf16"  # the names above are Triton's
