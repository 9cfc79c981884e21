"""HopperDenseConfig: one block of dense MLA prefill on Hopper.

A block is `num_qo` consumer warp-groups with 64 query rows each, a producer warp that fills the K/V
ring by TMA, and a scheduler warp that takes the next tile from a counter. The rope part lies in
buffers of its own, because its row is shared by all heads and tile widths are powers of two:
192 = 128 + 64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self, TypeVar

from openmla.arithmetic import ceildiv, require_int, verdict_lines
from openmla.errors import InvalidArgument
from openmla.kernels.hopper.chip import (
    FP32,
    SMEM_PER_BLOCK,
    SWIZZLE_BYTES,
    SWIZZLE_ROWS,
    WGMMA_K_BYTES,
    WGMMA_M,
    WGMMA_MAX_N,
    HopperBlock,
    Registers,
    accumulator_registers,
    barriers,
    column_parts,
    launch_tail,
    register_reasons,
    smem_reasons,
)
from openmla.planning.memory import Wanted
from openmla.planning.split import PARTIAL_CAP, SplitRule, least_keys_per_split
from openmla.problem import Problem

ELEMENT = 2  # bf16 and fp16
MOST_NOPE_TILES = 2  # the kernel has a main and a tail product of Q and K besides that of rope
LEAST_V = 16  # columns: a row of 32 bytes is the narrowest that is swizzled
KEY_TILES = (128, 64, 32)
# One tile to work on while the next arrives; more than 4 buys nothing.
MIN_STAGES, MAX_STAGES = 2, 4
MASK_KEYS = 128  # whose bits are 16 bytes
MASK_ROW_BYTES = 16  # four words of bits, the least that a bulk copy takes: 128 keys or fewer
TILE_SLOTS, TILE_INFO_BYTES = 2, 128  # the scheduler's ring: two work items, 16 ints each
# Heads whose tiles run next to each other, so that their K and V stay in L2, have so many bytes of
# them, or are 4. Prototype, H200, 128 and 16 heads, s 4096 to 16384, interleaved with FA3: 4 was
# best in five shapes of six. Why shorter requests need more: head_group in tiles.py.
L2_GROUP_BYTES = 10 << 20
RESCALE_THRESHOLD = 8.0  # prototype, H200: worth 3-5 %
PARTIAL_STATE = 2  # numbers beside the columns of a partial row: its maximum and its sum
# Consumer and producer. One consumer leaves plenty for the warps that load and schedule.
_REGISTERS = {1: (240, 64), 2: (240, 24), 3: (160, 32)}


@dataclass(frozen=True, slots=True)
class SplitSpace:
    """Room for the partial results of requests whose keys are split."""

    requests: int
    """Most requests of the call that can be split."""
    group: int
    """Most of them in one launch, so that the workspace stays within its cap."""
    rows: int
    """Rows of partial results of one launch."""

    @property
    def is_one_launch(self) -> bool:
        """Whether all requests of the call go in one launch."""
        return self.requests <= self.group


@dataclass(frozen=True, slots=True)
class DenseVariant:
    """The launches of a dense call."""

    num_qo: int
    """Query tiles of a block that are best for its token counts."""
    one_block: bool
    """One request whose keys fit one block: a kernel without loops and rings, with the same bits.
    Otherwise persistent blocks that fetch work items from an atomic counter."""
    split: SplitSpace | None
    """Keys of some requests may be split: a merge follows each launch."""


@dataclass(frozen=True, kw_only=True)
class HopperDenseConfig(HopperBlock):
    """The plan of one dense block.

    >>> deepseek_v3 = select_hopper_dense_config(heads=128, d_nope=128, d_rope=64, d_v=128)
    >>> deepseek_v3.BM, deepseek_v3.BN, deepseek_v3.num_kv_stages, deepseek_v3.smem_used
    (128, 128, 2, 221456)
    """

    heads: int
    d_nope: int
    d_rope: int
    d_v: int
    num_qo: int = 2
    """Query tiles of 64 rows, one consumer warp-group each."""
    BN: int = 128
    """Keys per step."""
    num_kv_stages: int = 2
    page_size: int = 0
    """Rows per page of the cache that the rope part comes from; 0 when it is a plain tensor."""
    sm_count: int = 132
    key_mask: bool = False
    """Whether bits say which keys a query sees."""

    def __post_init__(self) -> None:
        for name in ("heads", "d_nope", "d_v", "BN", "num_kv_stages", "sm_count"):
            require_int(name, getattr(self, name), 1)
        require_int("d_rope", self.d_rope, 0)
        require_int("page_size", self.page_size, 0)
        if self.num_qo not in _REGISTERS:
            raise InvalidArgument("num_qo", "1, 2 or 3 query tiles", repr(self.num_qo))

    # The tile.

    @cached_property
    def BM(self) -> int:
        """Query rows of the block."""
        return WGMMA_M * self.num_qo

    @cached_property
    def d_qk(self) -> int:
        return self.d_nope + self.d_rope

    @cached_property
    def nope_parts(self) -> tuple[int, ...]:
        """Column ranges of the part without rope, each its own product."""
        return column_parts(self.d_nope)

    @cached_property
    def page_box(self) -> int:
        """Rows of a page that one copy takes: a power of two that divides page and key tile."""
        return min(self.BN, self.page_size & -self.page_size)

    @property
    def group_keys(self) -> int:
        """Keys that a group of heads may have whose tiles are neighbors in the tile order."""
        return L2_GROUP_BYTES // self.key_bytes

    @cached_property
    def registers(self) -> Registers:
        return Registers(self.num_qo, *_REGISTERS[self.num_qo])

    @property
    def num_threads(self) -> int:
        return self.registers.threads

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of one K tile with its rope part, and of one V tile."""
        return self.BN * self.key_bytes

    @property
    def nope_tiles(self) -> tuple[int, int]:
        """Columns of the two tiles that K has besides rope; 0 where one is enough."""
        main, tail = (*self.nope_parts, 0) if len(self.nope_parts) == 1 else self.nope_parts
        return main, tail

    @property
    def rescale_threshold(self) -> float:
        """log2 units a row's maximum grows before O is rescaled."""
        return RESCALE_THRESHOLD

    # Threads and registers.

    @property
    def accumulators(self) -> int:
        """Registers of O, the scores, and the packed P of the step before, all live at once."""
        scores = accumulator_registers(self.BN)
        return accumulator_registers(self.d_v) + scores + scores // 2

    def _accumulator_sum(self) -> str:
        scores = accumulator_registers(self.BN)
        return f"O {accumulator_registers(self.d_v)} + S {scores} + packed P {scores // 2}"

    # Shared memory.

    def _buffers(self) -> Iterator[Wanted]:
        for part in self.nope_parts:
            yield Wanted(f"Q nope {part}", "q", self.BM * part * ELEMENT)
        yield Wanted("Q rope", "q", self.BM * self.d_rope * ELEMENT)
        for stage in range(self.num_kv_stages):
            for part in self.nope_parts:
                yield Wanted(f"K{stage} nope {part}", "k", self.BN * part * ELEMENT)
        for stage in range(self.num_kv_stages):
            yield Wanted(f"K{stage} rope", "rope", self.BN * self.d_rope * ELEMENT)
        for stage in range(self.num_kv_stages):
            yield Wanted(f"V{stage}", "v", self.BN * self.d_v * ELEMENT)
        if self.key_mask:
            size = self.num_kv_stages * self.BM * MASK_ROW_BYTES
            yield Wanted("mask", "mask", size)
        yield Wanted("tile info", "barriers", TILE_INFO_BYTES)
        ring = self.num_kv_stages
        yield from barriers(("q_ready", self.num_qo), ("q_empty", self.num_qo))
        yield from barriers(("k_ready", ring), ("k_empty", ring), ("v_ready", ring))
        yield from barriers(("v_empty", ring), ("t_ready", TILE_SLOTS), ("t_empty", TILE_SLOTS))
        yield from barriers(("t_req", 1))
        yield from launch_tail(self.registers)

    @property
    def q_bytes(self) -> int:
        """All query tiles."""
        return self.BM * self.d_qk * ELEMENT

    @property
    def key_bytes(self) -> int:
        """One key with its rope part and its value."""
        return (self.d_qk + self.d_v) * ELEMENT

    # Splitting and short prompts.

    @property
    def split(self) -> SplitRule:
        """When a request's keys are split; counted in 64-row tiles, so 1Q and 2Q agree."""
        least = least_keys_per_split(self.key_bytes, self.d_v)
        return SplitRule(self.heads, WGMMA_M, least, self.sm_count, self.d_v)

    def prefer_1q(self, total_q: int, batch: int) -> bool:
        """Whether one query tile per block serves these prompts better than two.

        Yes when a prompt of mean length fits one tile, and when the grid of two tiles covers at
        most half the SMs. Both give the same bits: a warp-group works on its 64 rows alone.
        16 heads, 512 queries: ceil(512 / 128) x 16 = 64 blocks of at most 66, so 1Q.
        """
        if total_q <= WGMMA_M * batch:
            return True
        blocks = (ceildiv(total_q, 2 * WGMMA_M) + max(batch, 1) - 1) * self.heads
        return blocks <= self.sm_count // 2

    def num_qo_for(self, total_q: int, batch: int) -> int:
        """Query tiles per block for so many prompts with so many tokens in all."""
        return 1 if self.prefer_1q(total_q, batch) else 2

    def one_block(self, batch: int, total_k: int) -> bool:
        """Whether there is one request and a block holds all keys: a kernel of its own, without
        loops, with the same bits."""
        return batch == 1 and total_k <= self.BN and not self.key_mask

    def variant(self, problem: Problem) -> DenseVariant:
        """The launches that a problem takes: the only place that decides."""
        one_block = not problem.window and self.one_block(problem.batch, problem.total_k)
        split = None if one_block else self.split_space(problem)
        return DenseVariant(self.num_qo_for(problem.total_q, problem.batch), one_block, split)

    def split_space(self, problem: Problem) -> SplitSpace | None:
        """Room for the requests that can be split; None when by their lengths none can.

        Lengths are on the device, but a few things are known here: a split needs twice the fewest
        keys of a range, and in self-attention a request with many keys has too many queries.
        Ranges of keys that requests share have not run on a GPU.
        """
        rule, least = self.split, 2 * self.split.min_keys
        longest = rule.longest_split_chunk
        most = problem.keys_seen(longest, problem.total_k)
        too_few = most < least or (problem.self_attention and longest < least)
        if not longest or not problem.batch or problem.has_k_start or too_few:
            return None
        requests = min(problem.batch, problem.total_k // least)
        slots = 2 * self.sm_count * self.num_qo  # of WGMMA_M rows: two waves of tiles
        slot_bytes = FP32 * WGMMA_M * (self.d_v + PARTIAL_STATE)
        group = max(1, PARTIAL_CAP // (slot_bytes * slots))
        return SplitSpace(requests, group, min(requests, group) * slots * WGMMA_M)

    def with_num_qo(self, num_qo: int) -> Self:
        """This key tile with another number of query tiles, its ring as deep as then fits."""
        return deepest_ring(replace(self, num_qo=num_qo))

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        step = WGMMA_K_BYTES // ELEMENT
        for name in ("d_nope", "d_rope"):
            width = getattr(self, name)
            if width % step:
                yield f"{name} {width} % {step} = {width % step}: one wgmma takes {step} columns"
        if len(self.nope_parts) > MOST_NOPE_TILES:
            parts = " + ".join(map(str, self.nope_parts))
            yield f"d_nope {self.d_nope} = {parts}: {MOST_NOPE_TILES} tiles at most"
        if len(column_parts(self.d_rope)) > 1:
            yield f"d_rope {self.d_rope} is not a power of two"
        if self.key_mask and self.BN % MASK_KEYS:
            yield (
                f"key_mask in blocks of {self.BN} keys: copies begin at multiples of 16 bytes, "
                f"the bits of {MASK_KEYS} keys"
            )
        if len(column_parts(self.d_v)) != 1 or not LEAST_V <= self.d_v <= WGMMA_MAX_N:
            yield f"d_v {self.d_v} is not a power of two from {LEAST_V} to {WGMMA_MAX_N}"
        if len(column_parts(self.BN)) != 1 or not 16 <= self.BN <= WGMMA_MAX_N:
            yield f"BN {self.BN} is not a power of two from 16 to {WGMMA_MAX_N}"
        if self.num_kv_stages < MIN_STAGES:
            yield f"{self.num_kv_stages} K/V stages < {MIN_STAGES}: {self._ring_sum()}"
        yield from register_reasons(self.registers, self.accumulators, self._accumulator_sum())
        yield from self._broken_by_pages()
        yield from smem_reasons(self.smem_used, self._ring_sum())

    def _broken_by_pages(self) -> Iterator[str]:
        page = self.page_size
        if page % SWIZZLE_ROWS:
            yield (
                f"pages of {page} rows: {page} % {SWIZZLE_ROWS} = {page % SWIZZLE_ROWS}, a bulk "
                "copy would cut the swizzle pattern"
            )
        if page and self.d_rope * ELEMENT > SWIZZLE_BYTES:
            yield f"d_rope {self.d_rope} from pages: {SWIZZLE_BYTES // ELEMENT} columns at most"

    def _ring_sum(self) -> str:
        rest = self.smem_used - self.q_bytes - self.num_kv_stages * self.stage_bytes
        return (
            f"Q {self.q_bytes} + {self.num_kv_stages} x ({self.BN} keys x {self._key_sum()} "
            f"= {self.stage_bytes}) + {rest} of barriers and scratch"
        )

    def _key_sum(self) -> str:
        return f"{self.d_qk + self.d_v} x {ELEMENT}"

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        parts = " + ".join(map(str, self.nope_parts))
        lines = [
            f"BM = {self.BM}: {self.num_qo} query tile(s) of {WGMMA_M} rows, a warp-group each",
            f"columns: nope {self.d_nope} in {parts}, rope {self.d_rope} in a buffer of its own, "
            f"V {self.d_v}",
            f"BN = {self.BN}: {self._bn_bound()}",
            self.registers.explain(self._accumulator_sum(), self.accumulators),
            f"shared memory: {self._ring_sum()} = {self.smem_used} of {self.smem_limit}",
            f"ring of {self.num_kv_stages}: {self._stage_bound()}",
            f"tiles from a counter, longest first, in groups of heads with {self.group_keys} keys",
            *self._mask_lines(),
            self._rescale_rule(),
        ]
        return lines + verdict_lines(self.why_unsupported())

    def _rescale_rule(self) -> str:
        return f"O is rescaled when a row's maximum grew by more than 2^{self.rescale_threshold:g}"

    def _mask_lines(self) -> list[str]:
        if not self.key_mask:
            return []
        size = self.BM * MASK_ROW_BYTES
        return [f"mask: {self.BM} rows x {MASK_ROW_BYTES} = {size} bytes of bits with a block of K"]

    def _bn_bound(self) -> str:
        if 2 * self.BN not in KEY_TILES:
            return "the widest key tile tried"
        wider = deepest_ring(replace(self, BN=2 * self.BN))
        why = wider.why_unsupported()
        return f"{2 * self.BN} keys are too many ({why})" if why else "narrower than it could be"

    def _stage_bound(self) -> str:
        if self.num_kv_stages == MAX_STAGES:
            return f"{MAX_STAGES} are enough to hide a load"
        more = self.smem_used + self.stage_bytes
        return f"one stage more would take at least {more} > {self.smem_limit}"


Dense = TypeVar("Dense", bound=HopperDenseConfig)


def deepest_ring(config: Dense) -> Dense:
    """The config with as many K/V stages as shared memory holds, from 1 to 4."""
    room = SMEM_PER_BLOCK - config.q_bytes
    most = min(MAX_STAGES, room // config.stage_bytes)  # before barriers and scratch
    for stages in range(most, 1, -1):
        deeper = replace(config, num_kv_stages=stages)
        if deeper.smem_used <= SMEM_PER_BLOCK:
            return deeper
    return replace(config, num_kv_stages=1)


def select_hopper_dense_config(
    *,
    heads: int,
    d_nope: int,
    d_rope: int,
    d_v: int,
    page_size: int = 0,
    sm_count: int = 132,
    key_mask: bool = False,
) -> HopperDenseConfig:
    """Two query tiles and the widest key tile that fits with at least two stages.

    Three query tiles also fit some widths, but at BN 64: on an H200 an earlier kernel reached
    0.88 to 0.92 of FA3's speed with them, 1.02 to 1.06 with two. They are never chosen here.
    """
    widest = HopperDenseConfig(
        heads=heads,
        d_nope=d_nope,
        d_rope=d_rope,
        d_v=d_v,
        page_size=page_size,
        sm_count=sm_count,
        key_mask=key_mask,
    )
    return widest_key_tile(widest)


def widest_key_tile(config: Dense) -> Dense:
    """The config with the widest key tile that fits; as it is, if none does."""
    tried = (deepest_ring(replace(config, BN=BN)) for BN in KEY_TILES)
    return next((found for found in tried if found.supported()), deepest_ring(config))
