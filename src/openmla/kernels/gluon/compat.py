"""The calls that Triton renamed between 3.6 and 3.9, under one name each. Kernels import from here.

| here | 3.6 | 3.7 | 3.8 | 3.9 |
|---|---|---|---|---|
| `tma_load` | `tma.async_copy_global_to_shared` | the same | `tma.async_load` | the same |
| `tma_store` | `tma.async_copy_shared_to_global` | the same | `tma.async_store` | the same |
| `cp_async` | `async_copy.async_copy_global_to_shared` | the same | `async_copy.async_load` | the same |
| `thread_barrier` | `gl.thread_barrier` | `gl.barrier` | the same | the same |
| `reinterpret` | `view._reinterpret` | the same | the same | `view.reinterpret` |
| `tmem_reg_layout` | `get_tmem_reg_layout` | the same | `tensor_memory_descriptor_type.get_reg_layout` | the same |
| `pair_tmem_layout` | `cta_split_num=(2, 1)` | the same | `cga_layout=[[1, 0]]` | the same |
| `amd_function_attributes` | no such option | no such option | `llvm_fn_attrs` | the same |

Each name is looked up by itself: no release of Triton renamed all of them at once. A Triton that has
neither an old nor a new name raises `MissingFromTriton`, and openmla.kernels.fallback decides what
then happens to a call. The simulator knows all of these names.
"""  # noqa: E501 - rows of a table

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import triton
from triton.backends.amd.compiler import HIPOptions
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate  # noqa: F401 - for kernels


class MissingFromTriton(ImportError):
    """This Triton has a call under none of the names that openmla knows."""


def renamed(owner: Any, *names: str) -> Any:
    """The attribute of a module or class under the first of these names that it has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    where = getattr(owner, "__name__", str(owner))
    raise MissingFromTriton(f"Triton {triton.__version__}: {where} has no {' or '.join(names)}")


tma_load = renamed(tma, "async_load", "async_copy_global_to_shared")
tma_store = renamed(tma, "async_store", "async_copy_shared_to_global")
cp_async = renamed(async_copy, "async_load", "async_copy_global_to_shared")
thread_barrier = renamed(gl, "barrier", "thread_barrier")

renamed(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _reinterpret(view, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if _PUBLIC_REINTERPRET:
        return view.reinterpret(dtype, shape, layout)
    else:
        return view._reinterpret(dtype, shape, layout)


@gluon.jit
def reinterpret_columns(view, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Columns of tensor memory as another type and shape; 64 rows take half of the lanes."""
    return _reinterpret(view, dtype, shape, layout)


@gluon.constexpr_function
def _tiles_in(view_shape, view_dtype, shape, dtype):
    """[n, *shape] where n tiles of `shape` fill the view; `shape` itself where one does."""
    room = math.prod(int(n) for n in view_shape) * view_dtype.primitive_bitwidth
    tiles = room // (math.prod(int(n) for n in shape) * dtype.primitive_bitwidth)
    return [tiles, *shape] if tiles > 1 else list(shape)


@gluon.jit
def reinterpret(view, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """A view of the same shared or tensor memory, or of its beginning, with another type and shape.

    Triton 3.8 reinterprets only what is of equal size, so a smaller tile is the first of several.
    """
    SHAPE: gl.constexpr = _tiles_in(view.shape, view.dtype, shape, dtype)
    tiles = _reinterpret(view, dtype, SHAPE, layout)
    if len(SHAPE) > len(shape):
        return tiles.index(0)
    else:
        return tiles


_PAIR_SPLIT: Mapping[str, Any] = (
    {"cga_layout": [[1, 0]]}
    if "cga_layout" in blackwell.TensorMemoryLayout.__dataclass_fields__
    else {"cta_split_num": (2, 1)}
)


def _pair_tmem_layout(rows: int, columns: int) -> Any:
    """Accumulator of a two-CTA MMA: each CTA holds `rows` of its 2 * `rows` rows."""
    return blackwell.TensorMemoryLayout((rows, columns), col_stride=1, two_ctas=True, **_PAIR_SPLIT)


pair_tmem_layout = gluon.constexpr_function(_pair_tmem_layout)


_REG_LAYOUT_OF_TYPE = hasattr(blackwell.tensor_memory_descriptor_type, "get_reg_layout")
if not _REG_LAYOUT_OF_TYPE:
    renamed(blackwell, "get_tmem_reg_layout")


def _tmem_reg_layout(element_ty: Any, shape: Any, layout: Any, num_warps: Any) -> Any:
    """The register layout in which `num_warps` warps load or store tensor memory."""
    shape = [int(n) for n in shape]
    if _REG_LAYOUT_OF_TYPE:
        memory = blackwell.tensor_memory_descriptor_type(element_ty, shape, layout, shape)
        return memory.get_reg_layout(num_warps=num_warps)
    cga = ((1, 0),) if getattr(layout, "two_ctas", False) else ()
    return blackwell.get_tmem_reg_layout(
        element_ty, tuple(shape), layout, num_warps, cga_layout=cga
    )


# Register layouts of tensor memory are Triton's affair; the simulator has its own.
_tmem_reg_layout.__gluon_sim__ = f"{blackwell.__name__}.tmem_reg_layout"  # type: ignore[attr-defined]
tmem_reg_layout = gluon.constexpr_function(_tmem_reg_layout)


def amd_function_attributes(attributes: str) -> dict[str, str]:
    """The launch option that sets LLVM attributes of an AMD kernel; empty where there is none."""
    known = {field.name for field in fields(HIPOptions)}
    return {"llvm_fn_attrs": attributes} if "llvm_fn_attrs" in known else {}
