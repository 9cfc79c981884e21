"""FA4Config: the full plan of one attention block on Blackwell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import (
    Limit,
    Limited,
    Part,
    broken,
    ceildiv,
    require_int,
    verdict_lines,
)
from openmla.modular.blackwell.ring import Ring, explain_ring, plan_ring, ring_sum, rows_per_cta
from openmla.modular.blackwell.tile import (
    FA4Shape,
    Tile,
    bn_bound,
    divides_either_way,
    explain_tile,
    plan_tile,
    tmem_sum,
)
from openmla.modular.blackwell.units import SMEM_CARVEOUT, TMEM_COLS, WARPGROUP

MIN_BN = 64
MIN_STAGES = 2  # one tile to work on while the next arrives
MIN_PACKED_SLOTS = 4


@dataclass(frozen=True, kw_only=True)
class FA4Config(Limited, FA4Shape):
    """Tile, tensor memory, pipeline and shared memory of one attention block.

    >>> config = FA4Config(
    ...     qkv_dtype="bfloat16", rope_dtype="bfloat16", num_q_heads=128, group=128,
    ...     qk_depth=192, ov_depth=128, swizzle_mode=128, page_size=128, is_mla=True,
    ... )
    >>> config.BM, config.BN, config.num_kv_stages, config.use_fused_kv, config.smem_used
    (256, 128, 3, True, 230556)

    Nothing is computed before it is asked for. Two configs are equal when their arguments are.
    """

    TMEM_S0: ClassVar[int] = 0

    BN = Part[int]("tile")
    TMEM_S1 = Part[int]("tile")
    TMEM_O0 = Part[int]("tile")
    TMEM_O1 = Part[int]("tile")
    TMEM_P0 = Part[int]("tile")
    TMEM_P1 = Part[int]("tile")
    TMEM_C0 = Part[int]("tile")
    TMEM_C1 = Part[int]("tile")
    tmem_used = Part[int]("tile")
    num_kv_stages = Part[int]("ring")
    num_qk_stages = Part[int]("ring")
    use_fused_kv = Part[bool]("ring")
    smem_used = Part[int]("ring")

    @cached_property
    def tile(self) -> Tile:
        """BN and the tensor-memory columns."""
        return plan_tile(self)

    @cached_property
    def ring(self) -> Ring:
        """The K/V pipeline and the shared memory it needs."""
        return plan_ring(self, self.BN)

    @cached_property
    def BK0(self) -> int:
        """Columns of one piece of K."""
        return self.padded_qk_depth // self.num_qk_stages

    BK1 = Part[int]("tile.BN")  # keys that P times V consumes per tile

    # Rows and columns, per tile and per CTA.

    def BM_eff(self) -> int:
        """Query positions per tile; with fused heads a position takes ``group`` rows."""
        return self.BM // self.group if self.fuse_gqa else self.BM

    def q_tile_rows(self) -> int:
        """Rows of one query tile: 128 in 1Q and 2Q, so both launch with the same Q descriptor."""
        return self.BM // self.num_qo

    def cta_group(self) -> int:
        """CTAs that share one MMA."""
        return 2 if self.pair_cta else 1

    def PairBM_eff(self) -> int:
        """Query positions of the whole CTA group."""
        return self.BM_eff() * self.cta_group()

    def v_cols_per_cta(self) -> int:
        """V columns one CTA holds; a pair splits them."""
        return self.padded_ov_depth // self.cta_group()

    def nope_cols_per_cta(self) -> int:
        """K columns without rope that one CTA's slot holds; a pair halves them."""
        return self.padded_nope_depth // self.cta_group()

    def k_rows_per_cta(self) -> int:
        """Keys of K one CTA loads; a pair splits the tile."""
        return rows_per_cta(self, self.BN)

    def v_box_cols(self) -> int:
        """Columns of one V load; small query tiles take V in as many pieces as K."""
        return self.v_cols_per_cta() // (self.num_qk_stages if self.packs_rows else 1)

    def v_tma_box_rows(self, page_size: int) -> int:
        """Keys of one V load: a tile, or a page when pages are smaller."""
        rows = self.BN // 2 // self.num_qk_stages if self.m_pack == 2 else self.BN
        return page_size if 0 < page_size < rows else rows

    # Bytes and buffers.

    def q_nope_bytes(self) -> int:
        """Bytes of Q without its rope columns."""
        return self.BM * self.padded_nope_depth * self.qkv_dtype_size

    def q_rope_bytes(self) -> int:
        """Bytes of Q's rope region; 0 without a rope dtype, when Q is one region."""
        return self.BM * self.rope_depth() * self.rope_dtype_size

    def num_rope_buffers(self) -> int:
        """Rope buffers beside a shared ring: one for each K tile that can be in flight."""
        if not self.use_fused_kv or self.rope_depth() == 0:
            return 0
        return ceildiv(self.num_kv_stages, 2)

    def num_k_scale_bufs(self) -> int:
        """Buffers of K scales: one for each K tile that can be in flight."""
        if self.scale_dtype is None:
            return 0
        return ceildiv(self.num_kv_stages, 2) if self.use_fused_kv else self.num_kv_stages

    def correction_smem_elements(self) -> int:
        """Correction factors in use, one per query row."""
        return self.BM

    def num_active_warps_per_group(self) -> int:
        """Warps of a warp group that work: all four."""
        return 4

    def num_active_threads_per_group(self) -> int:
        """Threads of a warp group that work: all 128."""
        return WARPGROUP

    # Variants.

    def with_num_qo(self, num_qo: int) -> FA4Config:
        """This plan with one or two query tiles, on a single CTA."""
        return replace(self, BM=256 if num_qo == 2 else 128, pair_cta=False)

    def switch_1q_config(self) -> FA4Config:
        """The 1Q variant a running 2Q kernel may turn to: K must arrive in as many pieces."""
        return replace(self.with_num_qo(1), pinned_qk_stages=self.num_qk_stages)

    def can_switch_to_1q(self) -> bool:
        """Whether a running 2Q kernel may turn to the 1Q variant."""
        if self.num_qo != 2 or self.pair_cta:
            return False
        variant = self.switch_1q_config()
        return variant.supported() and variant.num_qk_stages == self.num_qk_stages

    def launch_smem_used(self) -> int:
        """Bytes to reserve at launch: enough for either variant when the kernel may switch."""
        if not self.can_switch_to_1q():
            return self.smem_used
        return max(self.smem_used, self.switch_1q_config().smem_used)

    def prefer_1q(
        self, max_prompt_len: int, num_partitions: int, batch_size: int, sm_count: int
    ) -> bool:
        """Whether one query tile per block would serve this batch better than two.

        Yes when no prompt exceeds one tile of 128, since the second would stand idle; and yes
        when the grid of this plan covers at most half the SMs, since 1Q doubles it. On a B200
        (148 SMs) with 16 heads: a 1024-token prompt makes ceil(1024 / 256) x 16 = 64 blocks,
        at most 74, so 1Q; 2048 tokens make 128, so 2Q.
        """
        require_int("max_prompt_len", max_prompt_len, 0)
        require_int("num_partitions", num_partitions, 1)
        require_int("batch_size", batch_size, 0)
        require_int("sm_count", sm_count, 1)
        if max_prompt_len <= self.q_tile_rows():
            return True
        blocks = ceildiv(max_prompt_len, self.BM) * num_partitions * self.num_q_heads * batch_size
        return blocks <= sm_count // 2

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        return broken(FA4_LIMITS, self)

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        return self.number_lines() + verdict_lines(self.why_unsupported())

    def number_lines(self) -> list[str]:
        """The explanation without the verdict, for a plan that has its own limits."""
        kind = "one query tile (1Q)" if self.num_qo == 1 else "two query tiles (2Q)"
        return [
            f"BM = {self.BM}: {kind}, MMA of {self.MMA_M} rows",
            *explain_tile(self, self.tile),
            *explain_ring(self, self.BN, self.ring),
        ]

    def description(self) -> str:
        """``name = value`` lines for a log."""
        return "\n".join(f"{name} = {getattr(self, of)}" for name, of in _DESCRIBED.items())


_DESCRIBED = {
    name: "qkv_dtype_size" if name == "nope_dtype_size" else name
    for name in (
        "pair_cta",
        "MMA_M",
        "qk_depth",
        "BN",
        "num_kv_stages",
        "tmem_used",
        "smem_used",
        "sm100_smem_carveout",
        "nope_dtype_size",
        "rope_dtype_size",
        "scale_dtype_size",
        "use_fused_kv",
    )
}


def _depth_why(config: FA4Config) -> str:
    """Why the kernels were not written for a depth."""
    depth = config.qk_depth
    if config.pair_cta:
        served = config.num_qo == 2 and 64 < depth <= 128
        return "" if served else f"a CTA pair needs 2Q and 64 < qk_depth <= 128, not {depth}"
    if config.num_qo == 1:
        served = 64 <= depth <= 256
        return "" if served else f"one query tile needs 64 <= qk_depth <= 256, not {depth}"
    return "" if depth >= 64 else f"qk_depth {depth} < 64"


def _packed_ok(config: FA4Config) -> bool:
    """Small query tiles serve plain attention only, and only in pieces the MMA can address."""
    if not config.packs_rows:
        return True
    plain = not config.is_mla and config.rope_depth() == 0 and config.scale_dtype is None
    if not plain or config.ring.slots < MIN_PACKED_SLOTS:
        return False
    if config.m_pack == 4:
        return config.BK0 == 64
    return config.BN // 2 % config.num_qk_stages == 0


def _bn_why(config: FA4Config) -> str:
    bound = bn_bound(config, config.BN)
    return f"BN {config.BN} < {MIN_BN}, bound by {bound} ({tmem_sum(config)})"


def _stages_why(config: FA4Config) -> str:
    return f"{config.num_kv_stages} K/V stages < {MIN_STAGES}: {ring_sum(config, config.BN)}"


# What any kernel on this plan must keep.
BLOCK_LIMITS: tuple[Limit[FA4Config], ...] = (
    Limit(lambda c: c.BN >= MIN_BN, _bn_why),
    Limit(lambda c: c.num_kv_stages >= MIN_STAGES, _stages_why),
    Limit(
        lambda c: c.tmem_used <= TMEM_COLS,
        lambda c: f"{c.tmem_used} tensor-memory columns > {TMEM_COLS}",
    ),
    Limit(
        lambda c: c.smem_used <= SMEM_CARVEOUT,
        lambda c: f"{c.smem_used} bytes of shared memory > {SMEM_CARVEOUT}",
    ),
    Limit(
        lambda c: 0 in (c.page_size, c.BN) or divides_either_way(c.BN, c.page_size),
        lambda c: f"pages of {c.page_size} and tiles of {c.BN} keys: neither divides the other",
    ),
)

# What the attention kernels ask for besides.
FA4_LIMITS: tuple[Limit[FA4Config], ...] = (
    *BLOCK_LIMITS,
    Limit(lambda c: not _depth_why(c), _depth_why),
    Limit(
        _packed_ok,
        lambda c: f"BM {c.BM} serves plain attention in at least {MIN_PACKED_SLOTS} slots only",
    ),
)
