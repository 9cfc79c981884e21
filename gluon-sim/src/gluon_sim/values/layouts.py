"""Layouts: the simulator keeps them as opaque values and reads one thing, the cluster split.

Kernels build layouts while they run and hosts pass the compiler's own layout objects; both are
accepted. What a layout means for registers, banks and swizzles is the compiler's business.
"""

from __future__ import annotations

from typing import Any


class Layout:
    """A layout made inside a simulated kernel: its class name and its arguments by name."""

    fields: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(self.fields, args, strict=False)) | kwargs
        for name in self.fields:
            setattr(self, name, values.pop(name, None))
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(repr(self))

    @classmethod
    def get_default_for(cls, *_: Any, **kwargs: Any) -> Layout:
        """The compiler picks a swizzle here; the simulator needs only the cluster split."""
        return cls(cga_layout=kwargs.get("cga_layout"))

    @classmethod
    def with_identity_for(cls, *_: Any, **kwargs: Any) -> Layout:
        """Padded layouts are not modeled."""
        return cls(**kwargs)

    @classmethod
    def multicta(cls, num_ctas: int, two_cta: bool = False) -> Layout:
        """Barrier layout of a cluster: one per CTA, or one per pair of CTAs."""
        return cls(cga_layout=[[0]] if two_cta else [[1]] if num_ctas > 1 else [])


def _layout(name: str, *fields: str) -> type[Layout]:
    return type(name, (Layout,), {"fields": fields, "__doc__": f"Stands for gluon's {name}."})


_CGA = "cga_layout"
BlockedLayout = _layout(
    "BlockedLayout", "size_per_thread", "threads_per_warp", "warps_per_cta", "order", _CGA
)
SliceLayout = _layout("SliceLayout", "dim", "parent")
DotOperandLayout = _layout("DotOperandLayout", "operand_index", "parent", "k_width")
DistributedLinearLayout = _layout(
    "DistributedLinearLayout", "reg_bases", "lane_bases", "warp_bases", "block_bases", "shape"
)
NVMMADistributedLayout = _layout(
    "NVMMADistributedLayout", "version", "warps_per_cta", "instr_shape", _CGA
)
NVMMASharedLayout = _layout(
    "NVMMASharedLayout", "swizzle_byte_width", "element_bitwidth", "rank", "transposed"
)
SwizzledSharedLayout = _layout(
    "SwizzledSharedLayout", "vec", "per_phase", "max_phase", "order", _CGA
)
PaddedSharedLayout = _layout("PaddedSharedLayout", "interval_padding_pairs", "offset_bases")
SharedLinearLayout = _layout("SharedLinearLayout", "offset_bases", "block_bases")
AutoLayout = _layout("AutoLayout")
CoalescedLayout = _layout("CoalescedLayout")
AMDMFMALayout = _layout("AMDMFMALayout", "version", "instr_shape", "transposed", "warps_per_cta")
MBarrierLayout = _layout("MBarrierLayout", _CGA)
TensorMemoryLayout = _layout("TensorMemoryLayout", "block", "col_stride")
TensorMemoryScalesLayout = _layout("TensorMemoryScalesLayout", "cta_split_num")


def is_barrier_layout(layout: Any) -> bool:
    """Whether this is an mbarrier's layout, ours or the compiler's."""
    return type(layout).__name__ == "MBarrierLayout"


def split_axis(layout: Any) -> int | None:
    """The axis (counted from the end) that the second CTA of a cluster continues, or None.

    >>> split_axis(BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0], cga_layout=[[1, 0]]))
    -2
    >>> split_axis(SliceLayout(1, BlockedLayout(cga_layout=[[1, 0]])))
    -1
    >>> split_axis(SliceLayout(0, BlockedLayout(cga_layout=[[1, 0]]))) is None
    True
    """
    basis = cta_basis(layout)
    if basis is None:
        return None
    nonzero = [i for i, step in enumerate(basis) if step]
    return nonzero[0] - len(basis) if nonzero else None


def cta_basis(layout: Any) -> list[int] | None:
    """How one step of the CTA rank moves through the tensor, one entry per axis."""
    if layout is None:
        return None
    if hasattr(layout, "sim_split"):
        axis = layout.sim_split
        return None if axis is None else [1] + [0] * (-axis - 1)
    parent = getattr(layout, "parent", None)
    if parent is not None:
        basis = cta_basis(parent)
        dim = getattr(layout, "dim", None)
        if basis is None or dim is None or len(basis) == 1:
            return basis if dim is None else None
        return basis[:dim] + basis[dim + 1 :]
    halves = getattr(layout, "cta_split_num", None)
    if halves:
        return [int(n > 1) for n in halves]
    bases = getattr(layout, "cga_layout", None) or getattr(layout, "block_bases", None)
    return list(bases[0]) if bases else None
