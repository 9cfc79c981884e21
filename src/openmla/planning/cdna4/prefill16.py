"""MlaPrefill16: a CDNA4 MLA prefill block for bf16 and fp16.

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

from openmla.planning.arithmetic import Part
from openmla.planning.cdna4.layout.v import DefaultV
from openmla.planning.cdna4.prefill import LDS_BYTES, RingBlock

_DTYPES = ("bfloat16", "float16")
#: Columns of V, or of K without rope, that one wave can take alone.
_MOST_ALONE = 128
_SHARED_PART = 64
#: Of a lane, for outputs, queries and scores; the others are for fragments and addresses.
_MOST_REGISTERS = 176


@dataclass(frozen=True, init=False)
class MlaPrefill16(RingBlock):
    """The block with its LDS: a ring of K slots and a ring of V slots.

    >>> from openmla.planning.cdna4.config import MlaConfigV2
    >>> block = MlaPrefill16(MlaConfigV2(
    ...     q_block_size=32, kv_block=64, depth=128, num_heads=128, num_kv_heads=128,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512))
    >>> block.BM, block.k_ring_bytes, block.v_ring_bytes, block.smem_used
    (256, 49152, 49152, 98304)
    >>> block.supported()
    True
    """

    p_dtype = Part[str]("config.dtype")  # of the weights in the second product: that of V
    D_NOPE = cached_property[int](lambda b: b.D_QK - b.D_ROPE)
    across = cached_property[int](lambda b: 2 if max(b.DEPTH, b.D_NOPE) > _MOST_ALONE else 1)
    k_widths = cached_property[tuple[int, ...]](
        lambda b: (b.D_NOPE,) if b.across == 1 else (_SHARED_PART,) * (b.D_NOPE // _SHARED_PART)
    )
    frag_columns = cached_property[int](lambda b: 32 * b.across)
    _V_RING_DEPTH = cached_property[int](lambda b: 3 if b.across == 1 else 2)
    # Weights that one wave has computed and another multiplies.
    p_bytes = cached_property[int](
        lambda b: b.BM * b.KV_BLOCK * b.config.element_bytes // 2 if b.across > 1 else 0
    )
    launch_smem_used = cached_property[int](lambda b: b.smem_used + b.p_bytes)
    registers_held = cached_property[int](
        lambda b: b.D_QK // 4 + b.DEPTH // 2 // b.across + b.KV_BLOCK // 2 // b.across
    )

    @property
    def v_slot(self) -> DefaultV:
        """Where the bytes of a V slot lie."""
        return DefaultV(self.KV_BLOCK, self.DEPTH, self.config.element_bytes, self.NUM_THREADS)

    def explain(self) -> list[str]:
        """How the LDS is filled, and whether the block can run."""
        size, used = self.config.element_bytes, self.smem_used
        lines = [
            f"block: {self.NUM_WARPS} waves, {self.across} for each {self.Q_BLOCK_SIZE} query rows "
            f"= {self.BM} rows, {self.KV_BLOCK} keys per tile, {self.config.dtype}",
            "Q: in registers",
            f"K ring: {self._RING_DEPTH} slots × {self.KV_BLOCK} keys × ({self.D_NOPE} nope + "
            f"{self.D_ROPE} rope) × {size} B = {self.k_ring_bytes}",
            f"V ring: {self._V_RING_DEPTH} slots × {self.KV_BLOCK} keys × {self.DEPTH} × {size} B "
            f"= {self.v_ring_bytes}",
            f"LDS: {self.k_ring_bytes} + {self.v_ring_bytes} = {used} of {LDS_BYTES}"
            + (f"; weights between waves: {self.p_bytes}" if self.p_bytes else ""),
            self._rescale_line(),
        ]
        verdict = self.why_unsupported()
        return [*lines, f"unsupported: {verdict}"] if verdict else lines

    def _broken_limits(self) -> Iterator[str]:
        if self.config.dtype not in _DTYPES:
            yield f"dtype {self.config.dtype}: this block multiplies {' and '.join(_DTYPES)}"
        yield from super()._broken_limits()

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
        if self.smem_used <= LDS_BYTES < self.launch_smem_used:
            yield f"LDS: {self.smem_used} + {self.p_bytes} for weights > {LDS_BYTES}"

    def _why_not_shared(self, copies: int) -> str:
        """A register layout of the copies also needs a power of two of them."""
        even = copies > 0 and copies % self.NUM_WARPS == 0 and copies & (copies - 1) == 0
        return "" if even else f"not a power of two that {self.NUM_WARPS} waves can share evenly"
