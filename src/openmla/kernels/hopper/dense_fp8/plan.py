"""HopperDenseFp8Config: one block of dense MLA prefill on Hopper with FP8 queries and keys.

The block of `HopperDenseConfig` with Q and K of one byte an element. V has 16 bits; of 8 bits it is
upcast before the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openmla.errors import InvalidArgument
from openmla.kernels.hopper.chip import (
    WGMMA_K_BYTES,
    accumulator_registers,
    barriers,
    launch_tail,
)
from openmla.kernels.hopper.dense.plan import (
    TILE_INFO_BYTES,
    TILE_SLOTS,
    HopperDenseConfig,
    widest_key_tile,
)
from openmla.planning.memory import Wanted

SCALE_BYTES = 4
VALUE_BYTES = 2
MOST_SUM = 2.0**15  # of a thread's weights of a row and block, which fp16 holds


@dataclass(frozen=True, kw_only=True)
class HopperDenseFp8Config(HopperDenseConfig):
    """The plan of one dense FP8 block.

    >>> dims = {"heads": 128, "d_nope": 128, "d_rope": 64, "d_v": 128}
    >>> mixed, fp8 = (select_hopper_dense_fp8_config(**dims, v_bytes=n) for n in (2, 1))
    >>> mixed.BN, mixed.num_kv_stages, mixed.smem_used == fp8.smem_used
    (128, 3, True)
    """

    v_bytes: int = 2
    """Bytes of an element of V as the caller gives it: 2 (bf16, fp16) or 1 (e4m3)."""
    rope_bytes: int = 1
    """Bytes of an element of k_rope: 1 (e4m3) or 2 (bf16, fp16)."""
    k_scaled: bool = False
    """Whether keys have scales."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("v_bytes", "rope_bytes"):
            if getattr(self, name) not in (1, 2):
                raise InvalidArgument(name, "1 or 2", repr(getattr(self, name)))

    def one_block(self, batch: int, total_k: int) -> bool:
        """Never: the kernel without loops is one for 16 bits."""
        return False

    def _rescale_rule(self) -> str:
        return f"weights that a thread adds up to more than {MOST_SUM:g} are computed again"

    @property
    def wide_rope(self) -> bool:
        """Whether the rope product is one of 16-bit values."""
        return self.rope_bytes == 2 and self.d_rope > 0

    # Registers.

    @property
    def accumulators(self) -> int:
        """Registers of O, the scores, and the packed P of two blocks."""
        return accumulator_registers(self.d_v) + 2 * accumulator_registers(self.BN)

    def _accumulator_sum(self) -> str:
        out, scores = (accumulator_registers(n) for n in (self.d_v, self.BN))
        return f"O {out} + S {scores} + packed P of two blocks {scores}"

    # Shared memory.

    def _buffers(self) -> Iterator[Wanted]:
        ring = range(self.num_kv_stages)
        for part in self.nope_parts:
            yield Wanted(f"Q nope {part}", "q", self.BM * part)
        yield Wanted("Q rope", "q", self.BM * self.d_rope)
        if self.wide_rope:
            yield Wanted("Q rope, 16 bits", "q", self.BM * self.d_rope * 2)
        for stage in ring:
            for part in self.nope_parts:
                yield Wanted(f"K{stage} nope {part}", "k", self.BN * part)
        for stage in ring:
            yield Wanted(f"K{stage} rope", "rope", self.BN * self.d_rope * self.rope_bytes)
        for stage in ring if self.k_scaled else ():
            yield Wanted(f"K{stage} scales", "stats", self.BN * SCALE_BYTES)
        for stage in ring:
            yield Wanted(f"V{stage}", "v", self.BN * self.d_v * VALUE_BYTES)
        yield Wanted("tile info", "barriers", TILE_INFO_BYTES)
        count = self.num_kv_stages
        yield from barriers(("q_ready", self.num_qo), ("q_empty", self.num_qo))
        yield from barriers(("k_ready", count), ("k_empty", count), ("v_ready", count))
        yield from barriers(("v_empty", count), ("t_ready", TILE_SLOTS), ("t_empty", TILE_SLOTS))
        yield from barriers(("t_req", 1))
        yield from launch_tail(self.registers)

    @property
    def q_bytes(self) -> int:
        """All query tiles, and the copy of their rope columns in 16 bits."""
        return self.BM * (self.d_qk + (2 * self.d_rope if self.wide_rope else 0))

    @property
    def key_bytes(self) -> int:
        """One key with its rope part, its scale and its value."""
        scale = SCALE_BYTES if self.k_scaled else 0
        rope = self.d_rope * self.rope_bytes
        return self.d_nope + rope + scale + self.d_v * VALUE_BYTES

    def _key_sum(self) -> str:
        scale = f" + scale {SCALE_BYTES}" if self.k_scaled else ""
        return (
            f"(K {self.d_nope} + rope {self.d_rope * self.rope_bytes}{scale} + V "
            f"{self.d_v * VALUE_BYTES})"
        )

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        for name in ("d_nope", "d_rope"):
            width = getattr(self, name)
            if width % WGMMA_K_BYTES:
                yield (
                    f"{name} {width} % {WGMMA_K_BYTES} = {width % WGMMA_K_BYTES}: one FP8 wgmma "
                    f"takes {WGMMA_K_BYTES} columns"
                )
        yield from super()._broken_limits()

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        lines = ["scores are FP8 products of Q and K"]
        if self.wide_rope:
            lines += ["rope: 16-bit products, with a 16-bit copy of Q's rope columns"]
        if self.v_bytes == 1:
            lines += ["V is upcast to bf16 by a kernel before"]
        return [*lines, *super().explain()]


def select_hopper_dense_fp8_config(
    *,
    heads: int,
    d_nope: int,
    d_rope: int,
    d_v: int,
    v_bytes: int,
    rope_bytes: int = 1,
    k_scaled: bool = False,
    page_size: int = 0,
    sm_count: int = 132,
) -> HopperDenseFp8Config:
    """Two query tiles and the widest key tile that fits with at least two stages."""
    return widest_key_tile(
        HopperDenseFp8Config(
            heads=heads,
            d_nope=d_nope,
            d_rope=d_rope,
            d_v=d_v,
            v_bytes=v_bytes,
            rope_bytes=rope_bytes,
            k_scaled=k_scaled,
            page_size=page_size,
            sm_count=sm_count,
        )
    )
