"""What Triton renamed between 3.6 and 3.9, under one name each, so that one toy serves all."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate  # noqa: F401 - for toys


def _renamed(owner: Any, *names: str) -> Any:
    """The attribute under the first of these names that this Triton has."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


tma_load = _renamed(tma, "async_load", "async_copy_global_to_shared")
tma_store = _renamed(tma, "async_store", "async_copy_shared_to_global")
cp_async = _renamed(async_copy, "async_load", "async_copy_global_to_shared")
thread_barrier = _renamed(gl, "barrier", "thread_barrier")
PAIR_COPIES = hasattr(tma, "async_load")
"""Whether the compiler copies for both CTAs of a pair: from 3.8 on."""
PAIR_PRODUCTS = PAIR_COPIES or hasattr(gl, "thread_barrier")
"""Whether barriers of a pair are known to work: with 3.6 and from 3.8 on, not with 3.7."""
_PUBLIC_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_HAS_CGA_LAYOUT = "cga_layout" in blackwell.TensorMemoryLayout.__dataclass_fields__
_REG_LAYOUT_OF_TYPE = hasattr(blackwell.tensor_memory_descriptor_type, "get_reg_layout")
_WIDE_CLUSTER_BARRIERS = not hasattr(gl, "thread_barrier")


@gluon.jit
def reinterpret(view, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared or tensor memory as another type and shape."""
    if _PUBLIC_REINTERPRET:
        return view.reinterpret(dtype, shape, layout)
    else:
        return view._reinterpret(dtype, shape, layout)


def pair_tmem_layout(rows: int, columns: int) -> Any:
    """Accumulator of a two-CTA product: each CTA holds `rows` of its 2 * `rows` rows."""
    split = {"cga_layout": [[1, 0]]} if _HAS_CGA_LAYOUT else {"cta_split_num": [2, 1]}
    return blackwell.TensorMemoryLayout([rows, columns], col_stride=1, two_ctas=True, **split)


def cluster_barrier_shape(stages: int) -> list[int]:
    """Shape of `stages` barriers that every CTA of a pair has for itself."""
    return [stages, 2 if _WIDE_CLUSTER_BARRIERS else 1]


def cluster_barrier_layout() -> Any:
    """Layout of barriers that every CTA of a pair has for itself."""
    return mbarrier.MBarrierLayout(cga_layout=[[1 if _WIDE_CLUSTER_BARRIERS else 0]])


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


_tmem_reg_layout.__gluon_sim__ = f"{blackwell.__name__}.tmem_reg_layout"
tmem_reg_layout = gluon.constexpr_function(_tmem_reg_layout)
