"""MLAConfig: the plan of a dense MLA prefill block, and the choice between its variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from openmla.arithmetic import (
    Limited,
    Part,
    broken,
    require_divisor,
    require_int,
    verdict_lines,
)
from openmla.errors import InvalidArgument
from openmla.modular.blackwell.fa4 import BLOCK_LIMITS, FA4Config
from openmla.modular.blackwell.units import (
    NUM_THREADS,
    OPERAND_DTYPES,
    SCALE_DTYPES,
    Swizzle,
    dtype_size,
    operand_swizzle,
    optional_dtype,
    require_dtype,
    require_page_size,
)

ROPE_DEPTH = 64
CACHE_DEPTH = 576  # a latent cache row: 512 latent columns, then 64 of rope
SINGLE_O_THREADS = 384  # one softmax group less


@dataclass(frozen=True, kw_only=True)
class MLAConfig(Limited):
    """The plan of one block of dense MLA prefill: per-head K and V, one rope row for all heads.

    >>> config = MLAConfig(
    ...     qkv_dtype="bfloat16", rope_gmem_dtype="bfloat16", rope_mma_dtype="bfloat16",
    ...     num_q_heads=128, group=128, depth=192, page_size=128,
    ... )
    >>> config.nope_depth, config.num_qo, config.BN, config.launch_smem_used()
    (128, 2, 128, 230556)

    ``depth`` is Q's width, nope plus 64 of rope. ``v_depth`` defaults to nope's width. The rope
    part may be stored in another dtype (``rope_gmem_dtype``) than the one it is multiplied in.
    """

    qkv_dtype: str
    rope_gmem_dtype: str
    rope_mma_dtype: str
    scale_dtype: str | None = None
    num_q_heads: int
    group: int
    depth: int
    page_size: int
    num_qo: int = 2
    v_depth: int = -1
    single_o: bool = False
    bn_cap: int = 0

    rope_depth: ClassVar[int] = ROPE_DEPTH
    cache_depth: ClassVar[int] = CACHE_DEPTH
    output_swizzle_mode: ClassVar[Swizzle] = Swizzle.NONE

    # Numbers and methods of the attention plan underneath.
    MMA_M = Part[int]("fa4_config")
    BM = Part[int]("fa4_config")
    BN = Part[int]("fa4_config")
    BK0 = Part[int]("fa4_config")
    BK1 = Part[int]("fa4_config")
    qk_depth = Part[int]("fa4_config")
    padded_qk_depth = Part[int]("fa4_config")
    num_kv_heads = Part[int]("fa4_config")
    TMEM_S0 = Part[int]("fa4_config")
    TMEM_S1 = Part[int]("fa4_config")
    TMEM_O0 = Part[int]("fa4_config")
    TMEM_O1 = Part[int]("fa4_config")
    TMEM_P0 = Part[int]("fa4_config")
    TMEM_P1 = Part[int]("fa4_config")
    tmem_used = Part[int]("fa4_config")
    num_kv_stages = Part[int]("fa4_config")
    num_qk_stages = Part[int]("fa4_config")
    num_pv_stages = Part[int]("fa4_config")
    use_fused_kv = Part[bool]("fa4_config")
    smem_used = Part[int]("fa4_config")
    qkv_dtype_size = Part[int]("fa4_config")
    mbar_size = Part[int]("fa4_config")
    num_correction_cols = Part[int]("fa4_config")
    num_threads = Part[int]("fa4_config")
    sm100_smem_carveout = Part[int]("fa4_config")
    sm100_tmem_cols = Part[int]("fa4_config")
    q_tile_rows = Part[Callable[[], int]]("fa4_config")
    num_rope_buffers = Part[Callable[[], int]]("fa4_config")
    correction_smem_elements = Part[Callable[[], int]]("fa4_config")
    num_active_warps_per_group = Part[Callable[[], int]]("fa4_config")
    num_active_threads_per_group = Part[Callable[[], int]]("fa4_config")
    prefer_1q = Part[Callable[[int, int, int, int], bool]]("fa4_config")

    def __post_init__(self) -> None:
        require_dtype("qkv_dtype", self.qkv_dtype, OPERAND_DTYPES)
        require_dtype("rope_gmem_dtype", self.rope_gmem_dtype, OPERAND_DTYPES)
        require_dtype("rope_mma_dtype", self.rope_mma_dtype, OPERAND_DTYPES)
        require_divisor("group", self.group, "num_q_heads", self.num_q_heads)
        require_page_size(self.page_size)
        _require_depths(self.depth, self.v_depth)
        require_int("bn_cap", self.bn_cap, 0)
        if self.num_qo not in (1, 2):
            raise InvalidArgument("num_qo", "1 or 2 query tiles", repr(self.num_qo))
        put = partial(object.__setattr__, self)
        put("scale_dtype", optional_dtype("scale_dtype", self.scale_dtype, SCALE_DTYPES))
        put("v_depth", self.nope_depth if self.v_depth == -1 else self.v_depth)
        put("single_o", self.single_o and self.num_qo == 1)

    @cached_property
    def fa4_config(self) -> FA4Config:
        """The attention plan underneath; every shared number lives there."""
        return FA4Config(
            qkv_dtype=self.qkv_dtype,
            rope_dtype=self.rope_mma_dtype,
            scale_dtype=self.scale_dtype,
            num_q_heads=self.num_q_heads,
            group=self.group,
            qk_depth=self.depth,
            ov_depth=self.v_depth,
            swizzle_mode=self.qkv_swizzle_mode,
            page_size=self.page_size,
            is_mla=True,
            BM=256 if self.num_qo == 2 else 128,
            nope_depth=self.nope_depth,
            single_o=self.single_o,
            bn_cap=self.bn_cap,
        )

    @cached_property
    def nope_depth(self) -> int:
        """Columns of Q and K without rope."""
        return self.depth - ROPE_DEPTH

    @cached_property
    def rope_gmem_dtype_size(self) -> int:
        return dtype_size(self.rope_gmem_dtype)

    @cached_property
    def rope_mma_dtype_size(self) -> int:
        return dtype_size(self.rope_mma_dtype)

    @cached_property
    def qkv_swizzle_mode(self) -> Swizzle:
        """Swizzle of Q, K and V tiles."""
        return operand_swizzle(self.qkv_dtype)

    @cached_property
    def rope_mma_swizzle_mode(self) -> Swizzle:
        """Swizzle of rope tiles as the MMA reads them."""
        return operand_swizzle(self.rope_mma_dtype)

    @cached_property
    def rope_gmem_swizzle_mode(self) -> Swizzle:
        """Swizzle of rope tiles as they are loaded."""
        return operand_swizzle(self.rope_gmem_dtype)

    # Variants.

    def with_num_qo(self, num_qo: int) -> MLAConfig:
        """This plan with one or two query tiles, its key tile as wide as that variant allows."""
        return replace(self, num_qo=num_qo, bn_cap=0)

    def switch_1q_config(self) -> MLAConfig:
        """The 1Q variant that a 2Q kernel turns to for a short last tile."""
        return self.with_num_qo(1)

    def can_switch_to_1q(self) -> bool:
        """Whether a 2Q launch may run the 1Q body: K, V and Q boxes are the same in both."""
        return self.num_qo == 2 and self.switch_1q_config().fa4_config.supported()

    def launch_smem_used(self) -> int:
        """Bytes to reserve at launch: enough for either variant when the kernel may switch."""
        if not self.can_switch_to_1q():
            return self.smem_used
        return max(self.smem_used, self.switch_1q_config().smem_used)

    def launch_num_threads(self) -> int:
        """Threads per block: one output tile needs only one softmax group."""
        return SINGLE_O_THREADS if self.single_o else NUM_THREADS

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        return broken(BLOCK_LIMITS, self.fa4_config)

    def explain(self) -> list[str]:
        """How each number came about, one line each."""
        rope = f"rope {ROPE_DEPTH} ({self.rope_gmem_dtype} stored, {self.rope_mma_dtype} used)"
        lines = [
            f"MLA: Q {self.depth} = nope {self.nope_depth} + {rope}, V {self.v_depth}",
            *self.fa4_config.number_lines(),
        ]
        if self.supported():
            return [*lines, *self._variant_lines(), self._launch_line()]
        return lines + verdict_lines(self.why_unsupported())

    def _variant_lines(self) -> list[str]:
        """Why this is not the plan one would try first."""
        lines = []
        if self.single_o:
            why_not = self.with_num_qo(2).why_unsupported() or "it would fit"
            lines.append(f"1Q with one accumulator, {self.launch_num_threads()} threads")
            lines.append(f"not 2Q: {why_not}")
        if self.bn_cap:
            why_not = replace(self, bn_cap=0).why_unsupported() or "it would fit"
            lines.append(f"not wider than bn_cap {self.bn_cap}: {why_not}")
        return lines

    def _launch_line(self) -> str:
        if not self.can_switch_to_1q():
            return f"Modular's kernel reserves {self.launch_smem_used()} bytes"
        both = f"2Q {self.smem_used} and 1Q {self.switch_1q_config().smem_used}"
        return (
            f"Modular's kernel reserves {self.launch_smem_used()} bytes, the larger of {both}; a "
            f"last tile of at most {self.q_tile_rows()} rows runs 1Q"
        )


def _require_depths(depth: int, v_depth: int) -> None:
    require_int("depth", depth, 1)
    if depth <= ROPE_DEPTH:
        got = f"{depth} (nope = {depth} - {ROPE_DEPTH} = {depth - ROPE_DEPTH})"
        raise InvalidArgument("depth", f"more than the {ROPE_DEPTH} columns of rope", got)
    if v_depth != -1:
        require_int("v_depth", v_depth, 1)


def _variants(two_q: MLAConfig) -> Iterator[MLAConfig]:
    """The ways to run a problem, best first, built only when asked for."""
    yield two_q
    single_o = replace(two_q, num_qo=1, single_o=True)
    yield single_o
    # A tile at the tensor-memory limit can be too wide for two stages of shared memory.
    yield replace(single_o, bn_cap=64)


def select_mla_prefill_config(**problem: Any) -> MLAConfig:
    """The first supported variant: 2Q, else 1Q with one accumulator, else that with BN 64.

    Takes the arguments of `MLAConfig` that say what is computed, not those that choose a variant.
    When none is supported the 2Q plan comes back, and its ``why_unsupported()`` says why.

    GLM-5 (Q 256, V 256) in bf16: two accumulators of 256 columns fill tensor memory, and with
    one of them a 128-key tile leaves shared memory for a single stage, so the third is chosen.
    """
    two_q = MLAConfig(**problem)
    return next((config for config in _variants(two_q) if config.supported()), two_q)
