"""DenseFP8: the dense CDNA4 block in FP8, which fills the LDS as the original's MlaPrefillV2 does.

Where it differs: the weights may be bf16, the compiler leaves out the last chunk's padding, and
copies run in step with the products instead of interleaving with them, since Gluon has no schedule
of single instructions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.errors import InvalidArgument
from openmla.modular.cdna4.config import MlaConfigV2
from openmla.modular.cdna4.layout.v import VMap
from openmla.modular.cdna4.layout.v227 import CHUNK_PAD
from openmla.modular.cdna4.prefill import MlaPrefillV2
from openmla.planning.cdna4.dense import DenseBlock

P_DTYPES = ("float8_e4m3fn", "bfloat16")
"""Types of the weights that FP8 values can be multiplied with."""


@dataclass(frozen=True, init=False)
class DenseFP8(DenseBlock):
    """The block: a resident Q slab, a ring of K slots, a ring of V slots.

    >>> block = DenseFP8(MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=128,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn"))
    >>> block.smem_used, block.launch_smem_used          # as compiled: no padding at the very end
    (148224, 148208)
    """

    v_full_v227: bool = True
    """Lay V out without bank conflicts, as the original does by default."""
    p_dtype: str = "float8_e4m3fn"
    """Type of the weights in the second product. FP8 weights carry 4 bits, so results are off by
    about 2 percent; with bfloat16 V is dequantized in registers and results are as good as bf16."""

    def __init__(
        self,
        config: MlaConfigV2 | None = None,
        *,
        v_full_v227: bool = True,
        p_dtype: str = "float8_e4m3fn",
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
        lines.append(f"weights: {self.p_dtype}; O is rescaled at every tile, as in the original")
        return lines

    def _broken_limits(self) -> Iterator[str]:
        return self.original._broken_limits()
