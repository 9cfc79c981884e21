"""MlaPrefillV2: a CDNA4 MLA prefill block in FP8, and how it fills the LDS.

DeepSeek-V3:

    Q slab   256 rows × 192 = 49152     the block's queries, written once
    K ring   2 × 24576      = 49152     128 keys × (128 nope + 64 rope) per slot
    V ring   3 × 16640      = 49920     128 keys × 128, with the padding of v227
                             148224     of 163840
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Limited, Part
from openmla.errors import InvalidArgument
from openmla.modular.cdna4.config import MlaConfigV2
from openmla.modular.cdna4.core import MlaPrefillV2Core
from openmla.modular.cdna4.layout import v_map
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.modular.cdna4.layout.k import SUB_ROW_BYTES
from openmla.modular.cdna4.layout.v import VMap
from openmla.modular.cdna4.layout.v227 import CHUNK_PAD, CHUNKS, V227

LDS_BYTES = 160 * 1024
"""What one workgroup may use on gfx950."""


@dataclass(frozen=True, init=False)
class MlaPrefillV2(Limited, MlaPrefillV2Core):
    """The block with its LDS: a resident Q slab, a ring of K slots, a ring of V slots.

    O is rescaled at every tile; `rescale_threshold` is for MHA's block.

    >>> block = MlaPrefillV2(MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=1,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn"))
    >>> block.q_bytes, block.k_ring_bytes, block.v_ring_bytes, block.smem_used
    (49152, 49152, 49920, 148224)
    >>> replace(block, v_full_v227=False).smem_used      # four V slots fill the LDS to the byte
    163840
    >>> block.explain()[-2]
    'limit: a 4th V slot would make 148224 + 16640 = 164864 > 163840'
    """

    v_full_v227: bool = True
    """Lay V out without bank conflicts (see `openmla.modular.cdna4.layout.v227`)."""
    v227_layout: bool = False
    """Spell the v227 maps as layouts. The addresses are the same."""

    _RING_DEPTH: ClassVar[int] = 2  # K is written one tile ahead of its use

    def __init__(
        self,
        config: MlaConfigV2 | None = None,
        *,
        v_full_v227: bool = True,
        v227_layout: bool = False,
        **shape: Any,
    ) -> None:
        super().__init__(config, **shape)
        for name, value in (("v_full_v227", v_full_v227), ("v227_layout", v227_layout)):
            if not isinstance(value, bool):
                raise InvalidArgument(name, "True or False", repr(value))
            object.__setattr__(self, name, value)

    @property
    def _IS_DSV_MLA_SHAPE(self) -> bool:
        return self._FP8_KV128_32x64

    @property
    def _V_FULL_V227(self) -> bool:
        return self.v_full_v227

    @property
    def _v227_layout(self) -> bool:
        return self.v227_layout

    @cached_property
    def BM(self) -> int:
        """Query rows of the block."""
        return self.NUM_WARPS * self.Q_BLOCK_SIZE

    # Slots.

    _K_SUB_COLS = Part[int]("mma.K_SUB_COLS")
    _V_SUB_COLS = Part[int]("mma.V_SUB_COLS")

    @property
    def _K_ALIGN(self) -> int:
        """Bytes of a sub-block of K."""
        return self.mma.K_SUB_ROWS * SUB_ROW_BYTES

    @property
    def _V_ALIGN(self) -> int:
        """Bytes of a sub-block of V."""
        return self.mma.V_SUB_ROWS * SUB_ROW_BYTES

    @property
    def _V_RING_DEPTH(self) -> int:
        """Four V slots fit beside Q and K to the byte; the padding of v227 costs one of them."""
        return 3 if self.v_full_v227 else 4

    @property
    def _V_SLOT_PAD_ROWS(self) -> int:
        """Rows of 64 bytes that the padding takes, 16 bytes a chunk."""
        return CHUNKS * CHUNK_PAD // SUB_ROW_BYTES if self.v_full_v227 else 0

    @cached_property
    def _V_SLOT_ROWS(self) -> int:
        """Rows of 64 bytes."""
        return self.KV_BLOCK * self._NUM_BLOCK_COLS_V + self._V_SLOT_PAD_ROWS

    @property
    def _K_RING_LAYOUT(self) -> tuple[int, int]:
        return self._RING_DEPTH * self._K_SLOT_ROWS, self._K_SUB_COLS

    @property
    def _V_RING_LAYOUT(self) -> tuple[int, int]:
        return self._V_RING_DEPTH * self._V_SLOT_ROWS, self._V_SUB_COLS

    @property
    def _Q_LDS_LAYOUT(self) -> tuple[int, int]:
        return self.BM, self.D_QK

    @property
    def v_slot(self) -> VMap:
        """Where the bytes of a V slot lie."""
        return v_map(
            kv_block=self.KV_BLOCK,
            depth=self.DEPTH,
            element_bytes=self.config.element_bytes,
            v_full_v227=self.v_full_v227,
            v227_layout=self.v227_layout,
            num_threads=self.NUM_THREADS,
        )

    # Bytes.

    @cached_property
    def q_bytes(self) -> int:
        return self.BM * self.D_QK * self.config.element_bytes

    @cached_property
    def k_slot_bytes(self) -> int:
        return self._K_SLOT_ROWS * SUB_ROW_BYTES

    @cached_property
    def v_slot_bytes(self) -> int:
        """Padding included."""
        return self._V_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def k_ring_bytes(self) -> int:
        return self._RING_DEPTH * self.k_slot_bytes

    @property
    def v_ring_bytes(self) -> int:
        return self._V_RING_DEPTH * self.v_slot_bytes

    @property
    def smem_used(self) -> int:
        return self.q_bytes + self.k_ring_bytes + self.v_ring_bytes

    # Verdict and words.

    def explain(self) -> list[str]:
        """How the LDS is filled, what limits it, and whether the block can run."""
        size = self.config.element_bytes
        lines = [
            f"block: {self.NUM_WARPS} waves × {self.Q_BLOCK_SIZE} query rows = {self.BM} rows, "
            f"{self.KV_BLOCK} keys per tile, {self.config.dtype}",
            f"Q slab: {self.BM} rows × {self.D_QK} × {size} B = {self.q_bytes}",
            f"K ring: {self._RING_DEPTH} slots × {self.k_slot_bytes} = {self.k_ring_bytes} "
            f"({self.KV_BLOCK} keys × ({self.D_NOPE} nope + {self.D_ROPE} rope) × {size} B)",
            f"V ring: {self._v_ring_line()}",
            self._total_line(),
            self._limit_line(),
        ]
        other = replace(self, v_full_v227=not self.v_full_v227)
        verdict = self.why_unsupported()
        if verdict:
            return [*lines, f"unsupported: {verdict}"]
        return [*lines, f"instead: V ring {other._v_ring_line()}, {other.smem_used} in all"]

    def _v_ring_line(self) -> str:
        pad = self._V_SLOT_PAD_ROWS * SUB_ROW_BYTES
        how = f"v227: {pad} of each are padding" if self.v_full_v227 else "no v227, no padding"
        return f"{self._V_RING_DEPTH} slots × {self.v_slot_bytes} = {self.v_ring_bytes} ({how})"

    def _total_line(self) -> str:
        used, spare = self.smem_used, LDS_BYTES - self.smem_used
        parts = f"{self.q_bytes} + {self.k_ring_bytes} + {self.v_ring_bytes} = {used}"
        rest = f"{spare} free" if spare >= 0 else f"{-spare} too many"
        return f"LDS: {parts} of {LDS_BYTES}, {rest}"

    def _limit_line(self) -> str:
        """What one more V slot would cost: the smallest thing the block could grow by."""
        more = self.smem_used + self.v_slot_bytes
        total = f"{self.smem_used} + {self.v_slot_bytes} = {more}"
        slot = f"a {self._V_RING_DEPTH + 1}th V slot"
        if more <= LDS_BYTES:
            return f"limit: not LDS; {slot} would fit ({total} <= {LDS_BYTES})"
        return f"limit: {slot} would make {total} > {LDS_BYTES}"

    def _broken_limits(self) -> Iterator[str]:
        """The product must be the one, widths add up, the waves share copies, all fit the LDS."""
        yield from self._broken_by_product()
        if self.D_QK != self.D_NOPE + self.D_ROPE:
            total = self.D_NOPE + self.D_ROPE
            yield f"d_qk {self.D_QK} != depth {self.D_NOPE} + d_rope {self.D_ROPE} = {total}"
        yield from self._broken_by_shape()
        yield from self._broken_by_copies()
        if self.smem_used > LDS_BYTES:
            yield (
                f"LDS: Q {self.q_bytes} + K {self._RING_DEPTH} × {self.k_slot_bytes} + "
                f"V {self._V_RING_DEPTH} × {self.v_slot_bytes} = {self.smem_used} > {LDS_BYTES}, "
                f"{self.smem_used - LDS_BYTES} bytes too many"
            )

    def _broken_by_product(self) -> Iterator[str]:
        """The fragment reads exist for one product only."""
        config, mma = self.config, self.mma
        if config.dtype != "float8_e4m3fn":
            yield f"dtype {config.dtype}: V is transposed byte by byte, so it must be float8_e4m3fn"
        if config.fp8_mma_k_128:
            yield (
                f"fp8_mma_k_128: K and V fragments are laid out for 32×32×64, not {mma.MMA_M}×"
                f"{mma.MMA_N}×{mma.MMA_K}; d_rope {self.D_ROPE} // {mma.MMA_K} = "
                f"{self._NUM_K_ROPE_TILES} rope products"
            )
        if not self.D_ROPE:
            yield "d_rope 0: the products of rope are part of this block"
        if self.KV_BLOCK < 128:
            yield f"kv_block {self.KV_BLOCK} < 128: K is streamed while 128 keys' scores are built"

    def _broken_by_shape(self) -> Iterator[str]:
        """A cache row must hold both parts, and whole tiles be filled."""
        offset, end = self.ROPE_CACHE_OFFSET, self.ROPE_CACHE_OFFSET + self.D_ROPE
        if offset < self.D_NOPE or end > self.CACHE_DEPTH:
            yield (
                f"cache row: nope 0..{self.D_NOPE - 1} and rope {offset}..{end - 1} "
                f"do not fit side by side in {self.CACHE_DEPTH} columns"
            )
        if self.NUM_HEADS % self.NUM_KV_HEADS:
            rest = self.NUM_HEADS % self.NUM_KV_HEADS
            yield f"num_heads {self.NUM_HEADS} % num_kv_heads {self.NUM_KV_HEADS} = {rest}, not 0"
        units = {"q_block_size": self.mma.MMA_N, "kv_block": self.mma.MMA_K}
        units |= dict.fromkeys(("depth", "d_rope", "rope_cache_offset"), self.mma.K_SUB_COLS)
        for name, unit in units.items():
            value = getattr(self.config, name)
            if value % unit:
                yield f"{name} {value} % {unit} = {value % unit}, not 0"

    def _broken_by_copies(self) -> Iterator[str]:
        for name, columns in (("depth", self.D_NOPE), ("d_rope", self.D_ROPE)):
            copies = self.KV_BLOCK * columns * self.config.element_bytes // (WAVE * DMA_BYTES)
            if copies % self.NUM_WARPS:
                yield (
                    f"{name}: {self.KV_BLOCK} keys × {columns} columns are {copies} copies of "
                    f"{WAVE * DMA_BYTES} bytes, which {self.NUM_WARPS} waves cannot share evenly"
                )
        shape = (self.KV_BLOCK, self.DEPTH, self.NUM_WARPS)
        only = (V227.kv_block, V227.depth, V227.num_warps)
        if self.v_full_v227 and shape != only:
            yield (
                f"v_full_v227: {CHUNKS} chunks hold {only[0]} keys × {only[1]} columns written by "
                f"{only[2]} waves, not {shape[0]} × {shape[1]} by {shape[2]}"
            )
