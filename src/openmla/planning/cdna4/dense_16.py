"""Dense16: the dense CDNA4 block for bf16 and fp16. openmla's own: the original's block is FP8.

Values are twice as wide as FP8, so Q does not fit beside the rings. Its fragments go straight to
registers (48 of a lane's 256 at d_qk 192), tiles have 64 keys, and V has no padding:

    K ring   2 × 24576      = 49152     64 keys × (128 nope + 64 rope) × 2 B per slot
    V ring   3 × 16384      = 49152     64 keys × 128 × 2 B
                              98304     of 163840

32 × 128 fp32 outputs, 32 × 192 queries and 32 × 64 scores are 144 registers of a lane; outputs of
256 columns would not leave room for fragments. Two waves share such a row block then: each takes
half of the keys and half of the columns of V, weights pass between them through LDS, and K lies in
parts of 64 columns. Two slots of V are enough: a copy is started when no wave reads the one before
last any more. GLM-5:

    K ring   2 × 32768      = 65536     64 keys × (192 nope + 64 rope) × 2 B per slot
    V ring   2 × 32768      = 65536     64 keys × 256 × 2 B
    weights  64 × 64 × 2    =  8192     the compiler's: half of them, a wave keeps the others
                             139264     of 163840
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.modular.cdna4.layout.dma import DMA_BYTES, WAVE
from openmla.modular.cdna4.layout.v import DefaultV
from openmla.modular.cdna4.prefill import LDS_BYTES
from openmla.planning.cdna4.dense import DenseBlock

_DTYPES = ("bfloat16", "float16")
#: Columns of V, or of K without rope, that one wave can take alone.
_MOST_ALONE = 128
_SHARED_PART = 64
#: Of a lane, for outputs, queries and scores; the others are for fragments and addresses.
_MOST_REGISTERS = 176


@dataclass(frozen=True, init=False)
class Dense16(DenseBlock):
    """The block with its LDS: a ring of K slots and a ring of V slots.

    >>> from openmla.modular import MlaConfigV2
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
        """That of V."""
        return self.config.dtype

    @property
    def across(self) -> int:
        return 2 if max(self.DEPTH, self.D_NOPE) > _MOST_ALONE else 1

    @property
    def k_widths(self) -> tuple[int, ...]:
        if self.across == 1:
            return (self.D_NOPE,)
        return (_SHARED_PART,) * (self.D_NOPE // _SHARED_PART)

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
            "O is rescaled at every tile, as in the original's FP8 block",
        ]
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_limits(self) -> Iterator[str]:
        """Widths must add up, copies be shared by the waves, and all fit the LDS."""
        if self.config.dtype not in _DTYPES:
            yield f"dtype {self.config.dtype}: this block multiplies {' and '.join(_DTYPES)}"
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

    def _broken_by_shape(self) -> Iterator[str]:
        if self.DEPTH & (self.DEPTH - 1):
            yield f"depth {self.DEPTH}: V is one tensor, so its columns must be a power of two"
        if sum(self.k_widths) != self.D_NOPE:
            yield f"{self.D_NOPE} columns without rope are not parts of {_SHARED_PART}"
        if self.across > 1 and self.D_ROPE not in (0, _SHARED_PART):
            yield f"{self.D_ROPE} rope columns: parts that two waves share have {_SHARED_PART}"
        if self.registers_held > _MOST_REGISTERS:
            yield (
                f"registers: {self.registers_held} > {_MOST_REGISTERS} of a lane for {self.D_QK} "
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
