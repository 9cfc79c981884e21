"""MlaPrefillV2: a CDNA4 MLA prefill block and how it fills the LDS.

DeepSeek-V3 in fp8:

    Q slab   256 rows × 192 = 49152     the block's queries, written once
    K ring   2 × 24576      = 49152     128 keys × (128 nope + 64 rope) per slot
    V ring   3 × 16640      = 49920     128 keys × 128, with the padding of v227
                             148224     of 163840
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from openmla.errors import InvalidArgument
from openmla.planning.cdna4.config import MlaConfigV2
from openmla.planning.cdna4.core import MlaPrefillV2Core
from openmla.planning.cdna4.layout import v_map
from openmla.planning.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.planning.cdna4.layout.k import SUB_ROW_BYTES, KSlot
from openmla.planning.cdna4.layout.v import VMap
from openmla.planning.cdna4.layout.v227 import CHUNK_PAD, CHUNKS, V227

#: LDS that one workgroup may use on gfx950: 160 KB.
LDS_BYTES = 160 * 1024

#: Types of the weights that FP8 values can be multiplied with.
P_DTYPES = ("float8_e4m3fn", "bfloat16")

#: The producers write K one tile ahead of its use, so two slots do.
K_RING_DEPTH = 2


@dataclass(frozen=True, init=False)
class MlaPrefillV2(MlaPrefillV2Core):
    """The block with its LDS: a resident Q slab, a ring of K slots, a ring of V slots.

    >>> from openmla.planning.cdna4.config import MlaConfigV2
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
    """Lay V out without bank conflicts (see `openmla.planning.cdna4.layout.v227`)."""
    v227_layout: bool = False
    """Spell the v227 maps as layouts. The addresses are the same."""
    p_dtype: str = "float8_e4m3fn"
    """Type of the weights in the second product. FP8 weights carry 4 bits, so results are off by
    about 2 percent; with bfloat16 V is dequantized in registers and results are as good as bf16."""

    def __init__(
        self,
        config: MlaConfigV2 | None = None,
        *,
        v_full_v227: bool = True,
        v227_layout: bool = False,
        p_dtype: str = "float8_e4m3fn",
        **shape: Any,
    ) -> None:
        super().__init__(config, **shape)
        for name, value in (("v_full_v227", v_full_v227), ("v227_layout", v227_layout)):
            if not isinstance(value, bool):
                raise InvalidArgument(name, "True or False", repr(value))
            object.__setattr__(self, name, value)
        if p_dtype not in P_DTYPES:
            raise InvalidArgument("p_dtype", f"one of {', '.join(P_DTYPES)}", repr(p_dtype))
        object.__setattr__(self, "p_dtype", p_dtype)

    @property
    def BM(self) -> int:
        """Query rows of the block."""
        return self.NUM_WARPS * self.Q_BLOCK_SIZE

    @property
    def _IS_DSV_MLA_SHAPE(self) -> bool:
        return self._FP8_KV128_32x64

    @property
    def _V_FULL_V227(self) -> bool:
        return self.v_full_v227

    @property
    def _v227_layout(self) -> bool:
        return self.v227_layout

    @property
    def _K_SUB_COLS(self) -> int:
        return self.mma.K_SUB_COLS

    @property
    def _V_SUB_COLS(self) -> int:
        return self.mma.V_SUB_COLS

    @property
    def _K_ALIGN(self) -> int:
        """Bytes of a K sub-block."""
        return self.mma.K_SUB_ROWS * self.mma.K_SUB_COLS * self.config.element_bytes

    @property
    def _V_ALIGN(self) -> int:
        """Bytes of a V sub-block."""
        return self.mma.V_SUB_ROWS * self.mma.V_SUB_COLS * self.config.element_bytes

    @property
    def _RING_DEPTH(self) -> int:
        return K_RING_DEPTH

    @property
    def _V_RING_DEPTH(self) -> int:
        """Four V slots fit beside Q and K to the byte; the padding of v227 costs one of them."""
        return 3 if self.v_full_v227 else 4

    @property
    def _V_SLOT_PAD_ROWS(self) -> int:
        """The padding of v227, 16 bytes per chunk, in rows of 64 bytes."""
        return CHUNKS * CHUNK_PAD // SUB_ROW_BYTES if self.v_full_v227 else 0

    @property
    def _V_SLOT_ROWS(self) -> int:
        """A V slot with its padding."""
        return super()._V_SLOT_ROWS + self._V_SLOT_PAD_ROWS

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
    def q_bytes(self) -> int:
        """LDS of the Q slab."""
        return self.BM * self.D_QK * self.config.element_bytes

    @property
    def k_slot_bytes(self) -> int:
        """LDS of one K slot."""
        return self._K_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def v_slot_bytes(self) -> int:
        """LDS of one V slot, padding included."""
        return self._V_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def k_slots(self) -> int:
        """Tiles of K in flight."""
        return self._RING_DEPTH

    @property
    def v_slots(self) -> int:
        """Tiles of V in flight."""
        return self._V_RING_DEPTH

    @property
    def k_ring_bytes(self) -> int:
        """LDS of all K slots."""
        return self._RING_DEPTH * self.k_slot_bytes

    @property
    def v_ring_bytes(self) -> int:
        """LDS of all V slots."""
        return self._V_RING_DEPTH * self.v_slot_bytes

    @property
    def smem_used(self) -> int:
        """LDS of the block."""
        return self.q_bytes + self.k_ring_bytes + self.v_ring_bytes

    @property
    def launch_smem_used(self) -> int:
        """LDS that the compiler asks for: nothing lies behind the last chunk, so no padding does.

        >>> MlaPrefillV2(MlaConfigV2(
        ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=1, d_qk=192,
        ...     d_rope=64, cache_depth=576, rope_cache_offset=512,
        ...     dtype="float8_e4m3fn")).launch_smem_used
        148208
        """
        return self.smem_used - (CHUNK_PAD if self.v_full_v227 else 0)

    @property
    def k_slot(self) -> KSlot:
        """Where the bytes of a K slot lie."""
        config = self.config
        return KSlot(
            config.kv_block, config.depth, config.d_rope, config.element_bytes, config.num_warps
        )

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

    def supported(self) -> bool:
        """Whether the kernel can run this block."""
        return not self.why_unsupported()

    def why_unsupported(self) -> str:
        """The first limit the block breaks, with its arithmetic; empty when supported."""
        return next(self._broken_limits(), "")

    def explain(self) -> list[str]:
        """How the LDS is filled, what limits it, and whether the block can run."""
        size = self.config.element_bytes
        lines = [
            f"block: {self.NUM_WARPS} waves × {self.Q_BLOCK_SIZE} query rows = {self.BM} rows, "
            f"{self.KV_BLOCK} keys per tile, {self.config.dtype}, weights {self.p_dtype}",
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
        yield from self._broken_by_product()
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
        if self.KV_BLOCK < 128:
            yield f"kv_block {self.KV_BLOCK} < 128: K is streamed while 128 keys' scores are built"

    def _broken_by_shape(self) -> Iterator[str]:
        """Widths must add up, fit a cache row and fill whole tiles."""
        config, mma = self.config, self.mma
        if self.D_QK != self.D_NOPE + self.D_ROPE:
            total = self.D_NOPE + self.D_ROPE
            yield f"d_qk {self.D_QK} != depth {self.D_NOPE} + d_rope {self.D_ROPE} = {total}"
        offset, end = self.ROPE_CACHE_OFFSET, self.ROPE_CACHE_OFFSET + self.D_ROPE
        if offset < self.D_NOPE or end > self.CACHE_DEPTH:
            yield (
                f"cache row: nope 0..{self.D_NOPE - 1} and rope {offset}..{end - 1} "
                f"do not fit side by side in {self.CACHE_DEPTH} columns"
            )
        if self.NUM_HEADS % self.NUM_KV_HEADS:
            rest = self.NUM_HEADS % self.NUM_KV_HEADS
            yield f"num_heads {self.NUM_HEADS} % num_kv_heads {self.NUM_KV_HEADS} = {rest}, not 0"
        units = {
            "q_block_size": mma.MMA_N,
            "kv_block": mma.MMA_K,
            "depth": mma.K_SUB_COLS,
            "d_rope": mma.K_SUB_COLS,
            "rope_cache_offset": mma.K_SUB_COLS,
        }
        for name, unit in units.items():
            value = getattr(config, name)
            if value % unit:
                yield f"{name} {value} % {unit} = {value % unit}, not 0"

    def _broken_by_copies(self) -> Iterator[str]:
        """Every wave must have the same number of 1024-byte copies, and v227 has one shape."""
        config = self.config
        for name, columns in (("depth", self.D_NOPE), ("d_rope", self.D_ROPE)):
            pieces = self.KV_BLOCK * columns * config.element_bytes // (WAVE * DMA_BYTES)
            if pieces % self.NUM_WARPS:
                yield (
                    f"{name}: {self.KV_BLOCK} keys × {columns} columns are {pieces} copies of "
                    f"{WAVE * DMA_BYTES} bytes, which {self.NUM_WARPS} waves cannot share evenly"
                )
        shape = (self.KV_BLOCK, self.DEPTH, self.NUM_WARPS)
        if self.v_full_v227 and shape != (V227.kv_block, V227.depth, V227.num_warps):
            yield (
                f"v_full_v227: {CHUNKS} chunks hold {V227.kv_block} keys × {V227.depth} columns "
                f"written by {V227.num_warps} waves, not {shape[0]} × {shape[1]} by {shape[2]}"
            )
