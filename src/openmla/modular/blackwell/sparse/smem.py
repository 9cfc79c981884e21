"""The shared memory of a sparse block, laid out as a C struct would be."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from openmla.arithmetic import Limited, Part, ceildiv, require_int, round_up
from openmla.modular.blackwell.sparse.shape import SparseShape
from openmla.modular.blackwell.units import MBAR_BYTES, SMEM_CARVEOUT, WARPGROUP

FP32 = 4
INT32 = 4


class Offsets(dict[str, int]):
    """Byte offsets by name, in order; ``offsets.scores`` reads ``offsets["scores"]``.

    ``_end`` is the size of the whole.
    """

    def __getattr__(self, name: str) -> int:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no field {name!r}; fields: {', '.join(self)}") from None


class Array(NamedTuple):
    """A buffer of `size` elements: the original's `Array[Scalar[dtype], size]`."""

    dtype: str
    size: int


@dataclass(frozen=True)
class Field:
    """An array of ``count`` elements of ``size`` bytes, aligned to one element."""

    name: str
    count: int
    size: int


def barriers(count: int, *names: str) -> list[Field]:
    """``count`` barriers under each name."""
    return [Field(name, count, MBAR_BYTES) for name in names]


def lay_out(fields: Iterable[Field]) -> Offsets:
    """Offsets of the fields one after another, each aligned to its element.

    >>> lay_out([Field("mask", 2, 1), Field("tmem_addr", 1, 4), Field("barrier", 1, 8)])
    {'mask': 0, 'tmem_addr': 4, 'barrier': 8, '_end': 16}
    """
    offsets = Offsets()
    at = 0
    for field in fields:
        at = round_up(at, field.size)
        offsets[field.name] = at
        at += field.count * field.size
    offsets["_end"] = round_up(at, MBAR_BYTES)
    return offsets


class ByteMap(Limited):
    """What every map of shared memory can say of itself, given its fields."""

    def _fields(self) -> list[Field]:
        raise NotImplementedError

    @cached_property
    def offsets(self) -> Offsets:
        """Where each field starts, in bytes."""
        return lay_out(self._fields())

    size_of = Part[int]("offsets._end")
    """Bytes of the whole."""

    def _broken_limits(self) -> Iterator[str]:
        over = self.size_of - SMEM_CARVEOUT
        if over > 0:
            yield f"{self.size_of} bytes of shared memory, {over} more than {SMEM_CARVEOUT}"

    def explain(self) -> list[str]:
        """One line per field: where it starts and how many bytes it takes."""
        lines = [
            f"{self.offsets[f.name]:>7}  {f.name}: {f.count} x {f.size} = {f.count * f.size} bytes"
            for f in self._fields()
        ]
        return [*lines, f"{self.size_of:>7}  end, of {SMEM_CARVEOUT}"]


@dataclass(frozen=True, kw_only=True)
class MLASparseSharedMemory(ByteMap, SparseShape):
    """Shared memory of the bf16 kernel. Sizes in elements, offsets in bytes.

    One region serves three times: the whole of Q while its last columns move to tensor memory,
    then Q's first columns with one V and one K tile, at last the output. With 128 heads that is
    the middle use: 64 x 192 (Q) + 128 x 256 (V) + 64 x 576 (K) = 81920 elements, 163840 bytes.
    """

    align_of: ClassVar[int] = MBAR_BYTES

    @property
    def BH(self) -> int:
        """Rows of scores that one CTA computes."""
        return self.PADDED_HEADS_PER_CTA

    @property
    def TOPK_PER_CTA(self) -> int:
        """Keys of K that one CTA gathers."""
        return self.B_TOPK_PER_CTA

    @cached_property
    def FULL_Q_SIZE(self) -> int:
        """The whole of Q, until its last columns have moved to tensor memory."""
        return self.BH * self.qk_depth

    @cached_property
    def SHARED_Q_SIZE(self) -> int:
        """The columns of Q that stay."""
        return self.BH * self.q_smem_depth

    @cached_property
    def K_SIZE(self) -> int:
        return self.TOPK_PER_CTA * self.qk_depth

    @cached_property
    def V_SIZE(self) -> int:
        return self.B_TOPK * self.V_SMEM_COLS_PER_CTA

    @cached_property
    def SHARED_QKV_SIZE(self) -> int:
        """Q's columns, one K tile and one V tile."""
        return self.SHARED_Q_SIZE + self.K_SIZE + self.V_SIZE

    @cached_property
    def S_SIZE(self) -> int:
        """One tile of scores."""
        return self.BH * self.B_TOPK

    @cached_property
    def O_SIZE(self) -> int:
        return self.BH * self.v_depth

    @property
    def FULL_Q_TYPE(self) -> Array:
        """The first use of the region that Q, K, V and the output share."""
        return Array(self.qkv_dtype, self.FULL_Q_SIZE)

    @property
    def SHARED_QKV_TYPE(self) -> Array:
        """Its second use."""
        return Array(self.qkv_dtype, self.SHARED_QKV_SIZE)

    @property
    def O_TYPE(self) -> Array:
        """Its third use."""
        return Array(self.qkv_dtype, self.O_SIZE)

    def _fields(self) -> list[Field]:
        union = max(self.FULL_Q_TYPE.size, self.SHARED_QKV_TYPE.size, self.O_TYPE.size)
        return [
            Field("qkvo_union", union, self.qkv_dtype_size),
            Field("scores", self.S_SIZE, self.qkv_dtype_size),
            Field("p", self.S_SIZE, FP32),
            *barriers(1, "prologue_q", "prologue_q_cp"),
            *barriers(self.num_mbars, "qk_ss_done", "qk_ts_done", "sv_p0_done", "sv_p1_done"),
            *barriers(self.num_mbars, "k_p0_ready", "k_p1_ready", "v_p0_ready", "v_p1_ready"),
            *barriers(self.num_mbars, "p_free", "so_ready", "k_valid_ready", "k_valid_free"),
            Field("is_k_valid", self.num_mbars * self.MASK_BYTES_PER_BUF, 1),
            Field("tmem_addr", 1, INT32),
            Field("rowwise_max", WARPGROUP, FP32),
            Field("rowwise_sum", WARPGROUP, FP32),
        ]


@dataclass(frozen=True, init=False)
class MLASparseSharedMemoryFP8(ByteMap):
    """Shared memory of the kernel that reads an fp8 cache: the bf16 one, then scales.

    Rows arrive as fp8 in the upper half of their own K or V region and are dequantized in place, so
    only the scales and the barriers of the fp8 loads are new. ``scale_block_size`` columns share
    a scale; 0 means no scales, and a block as wide as the row one scale per token. A kernel
    without scales still lays out one per token.
    """

    base: MLASparseSharedMemory
    scale_block_size: int

    num_mbars: ClassVar[int] = 2  # of the fp8 loads, however deep the base pipeline is

    def __init__(self, *, scale_block_size: int = 0, **shape: Any) -> None:
        require_int("scale_block_size", scale_block_size, 0)
        object.__setattr__(self, "base", MLASparseSharedMemory(**shape))
        object.__setattr__(self, "scale_block_size", scale_block_size)

    TOPK_PER_CTA = Part[int]("base")

    @cached_property
    def K_scales_per_token(self) -> int:
        return self._blocks(self.base.qk_depth)

    @cached_property
    def V_scales_per_token(self) -> int:
        return self._blocks(self.base.v_depth)

    @cached_property
    def K_SCALES_SIZE(self) -> int:
        """A CTA gathers its own keys of K."""
        return self.TOPK_PER_CTA * self.K_scales_per_token

    @cached_property
    def V_SCALES_SIZE(self) -> int:
        """Bytes of V's scales: a CTA holds some columns of V, but all keys."""
        return self.base.B_TOPK * self.V_scales_per_token

    def _blocks(self, depth: int) -> int:
        return ceildiv(depth, self.scale_block_size) if self.scale_block_size else 1

    def _fields(self) -> list[Field]:
        return [
            Field("base", self.base.size_of, 1),
            Field("k_scales", self.K_SCALES_SIZE, FP32),
            Field("v_scales", self.V_SCALES_SIZE, FP32),
            *barriers(self.num_mbars, "k_fp8_tma_done", "v_fp8_tma_done"),
        ]
