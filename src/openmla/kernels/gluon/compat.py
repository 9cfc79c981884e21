"""The calls that Triton renamed between 3.6 and 3.9, under one name each. Kernels import from here.

| here | triton 3.6 | triton 3.9 |
|---|---|---|
| `tma_load` | `tma.async_copy_global_to_shared` | `tma.async_load` |
| `tma_store` | `tma.async_copy_shared_to_global` | `tma.async_store` |
| `cp_async` | `async_copy.async_copy_global_to_shared` | `async_copy.async_load` |
| `thread_barrier` | `gl.thread_barrier` | `gl.barrier` |
| `tmem_reg_layout` | `get_tmem_reg_layout` | `tensor_memory_descriptor_type.get_reg_layout` |
| `aggregate` | `triton.language.core._aggregate` | the same |
| `reinterpret` | `view._reinterpret` | `view.reinterpret` |
| `pair_tmem_layout` | `cta_split_num=[2, 1]` | `cga_layout=[[1, 0]]` |

The simulator knows these names too.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate  # noqa: F401 - for kernels

RENAMED = hasattr(tma, "async_load")
TRITON = (3, 9) if RENAMED else (3, 6)
_RENAMED = gl.constexpr(RENAMED)  # the same for device code

if RENAMED:
    tma_load, tma_store, cp_async = tma.async_load, tma.async_store, async_copy.async_load
    thread_barrier = gl.barrier
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    cp_async = async_copy.async_copy_global_to_shared
    thread_barrier = gl.thread_barrier


@gluon.jit
def reinterpret(view, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared or tensor memory as another type and shape."""
    if _RENAMED:
        return view.reinterpret(dtype, shape, layout)
    else:
        return view._reinterpret(dtype, shape, layout)


def _pair_tmem_layout(rows: int, columns: int) -> Any:
    """Accumulator of a two-CTA MMA: each CTA holds `rows` of its 2 * `rows` rows."""
    split: Any = {"cga_layout": [[1, 0]]} if RENAMED else {"cta_split_num": [2, 1]}
    return blackwell.TensorMemoryLayout([rows, columns], col_stride=1, two_ctas=True, **split)


pair_tmem_layout = gluon.constexpr_function(_pair_tmem_layout)


def _tmem_reg_layout(element_ty: Any, shape: Any, layout: Any, num_warps: Any) -> Any:
    """The register layout in which `num_warps` warps load or store tensor memory."""
    shape = [int(n) for n in shape]
    if RENAMED:
        memory = blackwell.tensor_memory_descriptor_type(element_ty, shape, layout, shape)
        return memory.get_reg_layout(num_warps=num_warps)
    cga = ((1, 0),) if getattr(layout, "two_ctas", False) else ()
    return blackwell.get_tmem_reg_layout(
        element_ty, tuple(shape), layout, num_warps, cga_layout=cga
    )


# Register layouts of tensor memory are Triton's affair; the simulator has its own.
_tmem_reg_layout.__gluon_sim__ = f"{blackwell.__name__}.tmem_reg_layout"  # type: ignore[attr-defined]
tmem_reg_layout = gluon.constexpr_function(_tmem_reg_layout)
