"""What the dense CDNA4 kernel runs on: a ring of K slots and a ring of V slots in LDS.

A block is `NUM_WARPS` waves. Counts, strides and register tiles are those of the original's block
(`MlaPrefillV2Core`, which `DenseBlock` extends). `DenseFP8` fills the LDS as the original does;
`Dense16` is openmla's own, for bf16 and fp16, and `Dense8` the same in FP8, for what the original
does not have: other widths, values in bf16, scales of queries and keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Limited
from openmla.errors import InvalidArgument
from openmla.modular.cdna4.config import MlaConfigV2
from openmla.modular.cdna4.core import MlaPrefillV2Core
from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.modular.cdna4.layout.k import SUB_ROW_BYTES
from openmla.modular.cdna4.layout.v import DefaultV, VMap
from openmla.modular.cdna4.layout.v227 import CHUNK_PAD
from openmla.modular.cdna4.prefill import LDS_BYTES, MlaPrefillV2

DTYPES_16 = ("bfloat16", "float16")
P_DTYPES = ("float8_e4m3fn", "bfloat16")
"""Types of the weights that FP8 values can be multiplied with."""
#: Columns of V, or of K without rope, that one wave can take alone.
MOST_ALONE = 128
SHARED_PART = 64
#: Keys or columns of one product.
EDGE = 32
#: Of a lane, for outputs, queries and scores; the others are for fragments and addresses.
MOST_REGISTERS = 176


@dataclass(frozen=True, init=False)
class DenseBlock(Limited, MlaPrefillV2Core):
    """What the launcher reads of an FP8 or a 16-bit block."""

    k_slots: ClassVar[int] = 2
    """Tiles of K in flight: one is written while the tile before it is read."""

    @property
    def v_slots(self) -> int:
        """Tiles of V in flight."""
        raise NotImplementedError

    @property
    def v_slot(self) -> VMap:
        """Where the bytes of a V slot lie."""
        raise NotImplementedError

    @property
    def p_dtype(self) -> str:
        """Type of the weights in the second product."""
        raise NotImplementedError

    @property
    def across(self) -> int:
        """Waves that share 32 query rows."""
        return 1

    @property
    def k_widths(self) -> tuple[int, ...]:
        """Columns of the parts of K without rope, each a tensor of its own."""
        return (self.D_NOPE,)

    @property
    def frag_columns(self) -> int:
        """Columns of a fragment of Q and K."""
        return SUB_ROW_BYTES // self.config.element_bytes

    @cached_property
    def BM(self) -> int:
        """Query rows of the block."""
        return self.NUM_WARPS // self.across * self.Q_BLOCK_SIZE

    @property
    def q_bytes(self) -> int:
        """Bytes of a resident Q; 0 where it is in registers."""
        return 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of a ring of the keys' scales; 0 where there are none."""
        return 0

    @property
    def k_slot_bytes(self) -> int:
        return self._K_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def v_slot_bytes(self) -> int:
        """Padding included."""
        return self._V_SLOT_ROWS * SUB_ROW_BYTES

    @property
    def k_ring_bytes(self) -> int:
        return self.k_slots * self.k_slot_bytes

    @property
    def v_ring_bytes(self) -> int:
        return self.v_slots * self.v_slot_bytes

    @property
    def smem_used(self) -> int:
        """LDS that the plan asks for."""
        return self.q_bytes + self.k_ring_bytes + self.v_ring_bytes + self.scale_bytes

    @property
    def launch_smem_used(self) -> int:
        """LDS that the compiler asks for."""
        return self.smem_used

    def explain(self) -> list[str]:
        """How the LDS is filled, and whether the block can run."""
        raise NotImplementedError


@dataclass(frozen=True, init=False)
class DenseFP8(DenseBlock):
    """The block in FP8: a resident Q slab, a ring of K slots, a ring of V slots.

    It fills the LDS as the original's MlaPrefillV2 does. Where it differs: the weights may be bf16,
    the compiler leaves out the last chunk's padding, and copies run in step with the products
    instead of interleaving with them, since Gluon has no schedule of single instructions.

    >>> block = DenseFP8(MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=128,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn"))
    >>> block.smem_used, block.launch_smem_used          # as compiled: no padding at the very end
    (148224, 148208)
    """

    v_full_v227: bool = True
    """Lay V out without bank conflicts, as the original does by default."""
    p_dtype: str = "bfloat16"
    """Type of the weights in the second product. With bfloat16 V is dequantized in registers and
    results are as good as bf16. FP8 weights, the original's, carry 4 bits, so results are off by
    about 2 percent, and weights below 2^-17 of a row's largest are lost: no plan has them, only a
    config that asks for them."""

    def __init__(
        self,
        config: MlaConfigV2 | None = None,
        *,
        v_full_v227: bool = True,
        p_dtype: str = "bfloat16",
        **shape: Any,
    ) -> None:
        super().__init__(config, **shape)
        if p_dtype not in P_DTYPES:
            raise InvalidArgument("p_dtype", f"one of {', '.join(P_DTYPES)}", repr(p_dtype))
        object.__setattr__(self, "v_full_v227", v_full_v227)
        object.__setattr__(self, "p_dtype", p_dtype)
        _ = self.original  # which refuses what is no flag

    @cached_property
    def original(self) -> MlaPrefillV2:
        """The original's block of this shape."""
        return MlaPrefillV2(self.config, v_full_v227=self.v_full_v227)

    @property
    def v_slots(self) -> int:
        return self.original._V_RING_DEPTH

    @property
    def v_slot(self) -> VMap:
        return self.original.v_slot

    @property
    def q_bytes(self) -> int:
        return self.original.q_bytes

    @property
    def v_slot_bytes(self) -> int:
        return self.original.v_slot_bytes

    @property
    def launch_smem_used(self) -> int:
        """Nothing lies behind the last chunk, so the compiler leaves its padding out."""
        return self.smem_used - (CHUNK_PAD if self.v_full_v227 else 0)

    def explain(self) -> list[str]:
        lines = self.original.explain()
        unused = self.smem_used - self.launch_smem_used
        if unused:
            end = f"without the {unused} of padding at the very end"
            lines.append(f"compiled: {self.launch_smem_used} bytes, {end}")
        other = "" if self.p_dtype == "float8_e4m3fn" else ", Modular's are float8_e4m3fn"
        lines.append(
            f"weights: {self.p_dtype}{other}; O is rescaled at every tile, as in Modular's"
        )
        return lines

    def _broken_limits(self) -> Iterator[str]:
        return self.original._broken_limits()


@dataclass(frozen=True, init=False)
class Dense16(DenseBlock):
    """The block for bf16 and fp16. openmla's own: the original's block is FP8.

    Values are twice as wide as FP8, so Q does not fit beside the rings. Its fragments go straight
    to registers (48 of a lane's 256 at d_qk 192), tiles have 64 keys, and V has no padding:

        K ring   2 × 24576      = 49152     64 keys × (128 nope + 64 rope) × 2 B per slot
        V ring   3 × 16384      = 49152     64 keys × 128 × 2 B
                                  98304     of 163840

    32 × 128 fp32 outputs, 32 × 192 queries and 32 × 64 scores are 144 registers of a lane; outputs
    of 256 columns would not leave room for fragments. Two waves share such a row block then: each
    takes half of the keys and half of the columns of V, weights pass between them through LDS, and
    K lies in parts of 64 columns. Two slots of V are enough: a copy is started when no wave reads
    the one before last any more. GLM-5:

        K ring   2 × 32768      = 65536     64 keys × (192 nope + 64 rope) × 2 B per slot
        V ring   2 × 32768      = 65536     64 keys × 256 × 2 B
        weights  64 × 64 × 2    =  8192     the compiler's: half of them, a wave keeps the others
                                 139264     of 163840

    >>> block = Dense16(MlaConfigV2(
    ...     q_block_size=32, kv_block=64, depth=128, num_heads=128, num_kv_heads=128,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512))
    >>> block.BM, block.k_ring_bytes, block.v_ring_bytes, block.smem_used
    (256, 49152, 49152, 98304)
    >>> block.supported()
    True
    """

    @property
    def D_NOPE(self) -> int:  # type: ignore[override]
        """Columns of K without rope, which may be others than V's here."""
        return self.D_QK - self.D_ROPE

    @property
    def p_dtype(self) -> str:
        """The dtype of weights is that of V."""
        return self.config.dtype

    @property
    def across(self) -> int:
        return 2 if max(self.DEPTH, self.D_NOPE) > MOST_ALONE else 1

    @property
    def k_widths(self) -> tuple[int, ...]:
        if self.across == 1:
            return (self.D_NOPE,)
        return (SHARED_PART,) * (self.D_NOPE // SHARED_PART)

    @property
    def frag_columns(self) -> int:
        return 32 * self.across

    @property
    def v_slots(self) -> int:
        """A copy is started while the tile before is still read; two waves that share rows wait
        for one another, so two slots do."""
        return 3 if self.across == 1 else 2

    @property
    def p_bytes(self) -> int:
        """Bytes of the weights that one wave has computed and another multiplies."""
        shared = self.BM * self.KV_BLOCK * self.config.element_bytes // 2
        return shared if self.across > 1 else 0

    @property
    def launch_smem_used(self) -> int:
        return self.smem_used + self.p_bytes

    @cached_property
    def registers_held(self) -> int:
        """Registers of a lane that hold queries, outputs and scores."""
        return self.D_QK // 4 + self.DEPTH // 2 // self.across + self.KV_BLOCK // 2 // self.across

    @property
    def v_slot(self) -> DefaultV:
        return DefaultV(self.KV_BLOCK, self.DEPTH, self.config.element_bytes, self.NUM_THREADS)

    def explain(self) -> list[str]:
        size, used = self.config.element_bytes, self.smem_used
        lines = [
            f"block: {self.NUM_WARPS} waves, {self.across} for each {self.Q_BLOCK_SIZE} query rows "
            f"= {self.BM} rows, {self.KV_BLOCK} keys per tile, {self.config.dtype}",
            "Q: in registers",
            f"K ring: {self.k_slots} slots × {self.KV_BLOCK} keys × ({self.D_NOPE} nope + "
            f"{self.D_ROPE} rope) × {size} B = {self.k_ring_bytes}",
            f"V ring: {self.v_slots} slots × {self.KV_BLOCK} keys × {self.DEPTH} × {size} B "
            f"= {self.v_ring_bytes}",
            f"LDS: {self.k_ring_bytes} + {self.v_ring_bytes} = {used} of {LDS_BYTES}"
            + (f"; weights between waves: {self.p_bytes}" if self.p_bytes else ""),
            "O is rescaled at every tile, as in Modular's FP8 block",
        ]
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_limits(self) -> Iterator[str]:
        """Widths must add up, copies be shared by the waves, and all fit the LDS."""
        yield from self._broken_by_dtype()
        yield from self._broken_by_shape()
        yield from self._broken_by_copies()
        if self.smem_used > LDS_BYTES:
            yield (
                f"LDS: K {self.k_slots} × {self.k_slot_bytes} + V {self.v_slots} × "
                f"{self.v_slot_bytes} = {self.smem_used} > {LDS_BYTES}, "
                f"{self.smem_used - LDS_BYTES} bytes too many"
            )
        elif self.launch_smem_used > LDS_BYTES:
            yield f"LDS: {self.smem_used} + {self.p_bytes} for weights > {LDS_BYTES}"

    def _broken_by_dtype(self) -> Iterator[str]:
        if self.config.dtype not in DTYPES_16:
            yield f"dtype {self.config.dtype}: this block multiplies {' and '.join(DTYPES_16)}"

    def _broken_by_shape(self) -> Iterator[str]:
        if self.DEPTH & (self.DEPTH - 1):
            yield f"depth {self.DEPTH}: V is one tensor, so its columns must be a power of two"
        if sum(self.k_widths) != self.D_NOPE:
            yield f"{self.D_NOPE} columns without rope are not parts of {SHARED_PART}"
        if self.across > 1 and self.D_ROPE not in (0, SHARED_PART):
            yield f"{self.D_ROPE} rope columns: parts that two waves share have {SHARED_PART}"
        if self.registers_held > MOST_REGISTERS:
            yield (
                f"registers: {self.registers_held} > {MOST_REGISTERS} of a lane for {self.D_QK} "
                f"columns of Q, {self.DEPTH} of the output and {self.KV_BLOCK} scores"
            )

    def _broken_by_copies(self) -> Iterator[str]:
        """Waves share the copies of a part; a register layout of them needs a power of two."""
        parts = [("depth", width) for width in self.k_widths]
        for name, columns in (*parts, ("d_rope", self.D_ROPE)):
            copies = self.KV_BLOCK * columns * self.config.element_bytes // (WAVE * DMA_BYTES)
            shared = copies > 0 and copies % self.NUM_WARPS == 0 and copies & (copies - 1) == 0
            if columns and not shared:
                yield (
                    f"{name}: {self.KV_BLOCK} keys × {columns} columns are {copies} copies of "
                    f"{WAVE * DMA_BYTES} bytes, not a power of two that {self.NUM_WARPS} waves can "
                    "share evenly"
                )


@dataclass(frozen=True, init=False)
class Dense8(Dense16):
    """The block for FP8 queries and keys, openmla's own: any width, values in FP8 or bf16, a scale
    for each query and each key.

    Rows of K are half as wide as in 16 bits, so tiles have 128 keys; Q goes to registers, as in
    16 bits. Weights are bf16. DeepSeek-V3 with values in bf16, and GLM-5 in FP8 throughout:

        K ring   2 × 24576      = 49152     128 keys × (128 nope + 64 rope) per slot
        V ring   3 × 32768      = 98304     128 keys × 128 × 2 B
                                 147456     of 163840
        K ring   2 × 32768      = 65536     128 keys × (192 nope + 64 rope) per slot
        V ring   2 × 32768      = 65536     128 keys × 256
        weights  128 × 64       =  8192     the compiler's: those of 64 keys, half of them at once
                                 139264     of 163840

    >>> block = Dense8(MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=256, num_heads=64, num_kv_heads=64, d_qk=256,
    ...     d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn"))
    >>> block.BM, block.smem_used, block.launch_smem_used, block.supported()
    (128, 131072, 139264, True)
    """

    v_dtype: str = "float8_e4m3fn"
    """Type of the values."""
    scaled_keys: bool = False
    """Whether every key has a scale: those of two tiles lie in LDS."""

    def __init__(
        self,
        config: MlaConfigV2 | None = None,
        *,
        v_dtype: str = "float8_e4m3fn",
        scaled_keys: bool = False,
        **shape: Any,
    ) -> None:
        super().__init__(config, **shape)
        if v_dtype not in P_DTYPES:
            raise InvalidArgument("v_dtype", f"one of {', '.join(P_DTYPES)}", repr(v_dtype))
        object.__setattr__(self, "v_dtype", v_dtype)
        object.__setattr__(self, "scaled_keys", scaled_keys)

    @property
    def p_dtype(self) -> str:
        return "bfloat16"

    @property
    def frag_columns(self) -> int:
        return SUB_ROW_BYTES

    @property
    def v_element_bytes(self) -> int:
        return 1 if self.v_dtype == "float8_e4m3fn" else 2

    @property
    def v_slot(self) -> DefaultV:
        return DefaultV(self.KV_BLOCK, self.DEPTH, self.v_element_bytes, self.NUM_THREADS)

    @property
    def v_slot_bytes(self) -> int:
        return self.v_slot.slot_bytes

    @property
    def scale_bytes(self) -> int:
        return 2 * 4 * self.KV_BLOCK if self.scaled_keys else 0

    @property
    def p_bytes(self) -> int:
        """Weights pass in bf16, those of 64 keys at a time; half of them stay where they are."""
        return self.BM * 2 * EDGE * 2 // 2 if self.across > 1 else 0

    @cached_property
    def registers_held(self) -> int:
        """Registers of a lane that hold queries, outputs and scores."""
        return self.D_QK // 8 + self.DEPTH // 2 // self.across + self.KV_BLOCK // 2 // self.across

    def explain(self) -> list[str]:
        parts = f"{self.k_ring_bytes} + {self.v_ring_bytes}"
        parts += f" + {self.scale_bytes}" if self.scaled_keys else ""
        lines = [
            f"block: {self.NUM_WARPS} waves, {self.across} for each {self.Q_BLOCK_SIZE} query rows "
            f"= {self.BM} rows, {self.KV_BLOCK} keys per tile, {self.config.dtype}",
            "Q: in registers",
            f"K ring: {self.k_slots} slots × {self.KV_BLOCK} keys × ({self.D_NOPE} nope + "
            f"{self.D_ROPE} rope) = {self.k_ring_bytes}",
            f"V ring: {self.v_slots} slots × {self.KV_BLOCK} keys × {self.DEPTH} × "
            f"{self.v_element_bytes} B = {self.v_ring_bytes}, {self.v_dtype}",
            f"LDS: {parts} = {self.smem_used} of {LDS_BYTES}"
            + (f"; weights between waves: {self.p_bytes}" if self.p_bytes else ""),
            f"weights: {self.p_dtype}; O is rescaled at every tile, as in Modular's FP8 block",
        ]
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_by_dtype(self) -> Iterator[str]:
        if not self.config.is_fp8:
            yield f"dtype {self.config.dtype}: this block multiplies float8_e4m3fn queries and keys"
