"""What the dense Blackwell kernel runs on, and how it is chosen.

Tiles, stages and rings are those of the system that the kernel follows, "the original" here and
beside it: `MLAConfig`, or without rope `FA4Config`, of openmla.modular. Where the kernel cannot
follow, a plan differs:

* Tiles have a power of two of keys, as tensors of Gluon do; the original's any multiple of 16.
* Q and K without rope are one tile of columns, or two, each a power of two.
* K of two tiles has a ring of its own: a slot that K and V take in turn holds one tile.
* A pair of CTAs serves MLA too; the original has pairs for plain attention of up to 128 columns.
* K arrives whole, whatever `num_qk_stages` says.
* Beside Q and K of 8 bits, V and the weights have 16: weights of 8 bits would lose what small ones
  add up to. So K and V have rings of their own, as deep as shared memory allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple

from openmla.arithmetic import Limited, ceildiv
from openmla.errors import Unsupported
from openmla.modular import FA4Config, MLAConfig, select_mla_prefill_config
from openmla.modular.blackwell.units import (
    HALF_FLOATS,
    SMEM_CARVEOUT,
    TMEM_COLS,
    dtype_size,
    operand_swizzle,
)
from openmla.planning.dequantize import mean_length
from openmla.planning.serves import GLUON_CACHES, LONG_NAMES
from openmla.planning.target import Target
from openmla.problem import Problem

Original = MLAConfig | FA4Config

Q_ROWS = 128
"""Rows of a query tile."""
LEAST_COLUMNS = 64  # a row of 64 or 128 bytes, which is what tiles are swizzled by
LEAST_STAGES = 2  # one tile to work on while the next arrives
MOST_STAGES = 4  # of rings whose depth is not the original's
SCALE_BYTES = 4  # of a key's scale
BESIDE_TILES = 1024  # bytes of barriers, warp states and arguments of partitions, at most
VALUES = "bfloat16"  # of V, beside Q and K of 8 bits
RESCALE_AT = 8.0
"""How far, in log2 units, a row's maximum may grow before O is rescaled: weights of 16 bits reach
2^8."""
MOST_KEYS = 128  # of a tile, without rope; the original's may be wider
ROPE_COLUMNS = 64  # of a tile with rope
# Tokens from which on work items of 512 rows are predicted to be faster than those of 256 (of the
# peak, 128 heads: 57 and 55 % at 2048 tokens, 32 and 34 % at 1024; `openmla explain`, 2026-11-16).
PAIR_PROMPT = 2048
FIRST_DENSE_PAIR = (3, 8)
"""The first Triton with the dense kernel of a CTA pair: 3.6 has no barrier of two CTAs, and a pair
that 3.7 compiles gives wrong numbers when it is executed."""


class ColumnParts(NamedTuple):
    """Columns of the tiles of Q and K without rope: 192 are 128 and 64."""

    main: int
    tail: int


@dataclass(frozen=True, kw_only=True)
class DenseConfig(Limited):
    """Tiles, stages and columns of the dense kernel, under the original's names.

    >>> problem = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128)
    >>> config = following(original_plan(problem))
    >>> config.BM, config.BN, config.num_kv_stages, config.use_fused_kv
    (256, 128, 3, True)
    """

    qkv_dtype: str
    """What Q and K are multiplied in."""
    pv_dtype: str
    """What the weights and V are."""
    rope_dtype: str | None = None
    """What rope is multiplied in; None without rope."""
    rope_gmem_dtype: str | None = None
    """What the rope of K is stored in."""
    nope_depth: int
    rope_depth: int
    ov_depth: int
    page_size: int = 0
    """Rows of a page of the cache that rope comes from; 0 where it comes from a tensor."""
    num_qo: int
    """Query tiles of a CTA."""
    single_o: bool = False
    """Whether there is one accumulator, and one softmax group, instead of two."""
    pair_cta: bool = False
    """Whether two CTAs share K and V; each holds half the rows of a query tile."""
    BN: int
    """Keys of a tile."""
    num_kv_stages: int
    """Slots of the ring that K and V share, or of each of their rings."""
    use_fused_kv: bool
    """Whether K and V take the slots of one ring in turn."""
    switches_to_1q: bool = False
    """Whether a block of two query tiles runs as one where it has 128 rows or fewer left."""

    TMEM_S0: ClassVar[int] = 0

    @property
    def BM(self) -> int:
        """Query rows of a CTA."""
        return self.num_qo * Q_ROWS

    @property
    def qk_depth(self) -> int:
        return self.nope_depth + self.rope_depth

    @property
    def qkv_dtype_size(self) -> int:
        return dtype_size(self.qkv_dtype)

    @property
    def pv_dtype_size(self) -> int:
        return dtype_size(self.pv_dtype)

    @property
    def rope_dtype_size(self) -> int:
        return dtype_size(self.rope_dtype)

    @property
    def rope_gmem_dtype_size(self) -> int:
        return dtype_size(self.rope_gmem_dtype)

    @property
    def ctas(self) -> int:
        """CTAs that a work item's tiles are divided among."""
        return 2 if self.pair_cta else 1

    @cached_property
    def parts(self) -> ColumnParts:
        """Columns of the main and the tail tile of Q and K."""
        main = 1 << (self.nope_depth.bit_length() - 1)
        return ColumnParts(main, self.nope_depth - main)

    @property
    def rope_buffers(self) -> int:
        """Buffers of K's rope, and of the scales of keys: one for each K tile in flight."""
        return ceildiv(self.num_kv_stages, 2) if self.use_fused_kv else self.num_kv_stages

    # Columns of tensor memory: two score tiles, then one accumulator or two.

    @property
    def TMEM_S1(self) -> int:
        return self.BN

    @property
    def TMEM_O0(self) -> int:
        return 2 * self.BN

    @property
    def TMEM_O1(self) -> int:
        return self.TMEM_O0 if self.single_o else self.TMEM_O0 + self.ov_depth

    @property
    def tmem_used(self) -> int:
        return self.TMEM_O1 + self.ov_depth

    @property
    def tile_bytes(self) -> int:
        """Shared memory of all tiles of a CTA."""
        size, rope = self.qkv_dtype_size, self.rope_depth * self.rope_dtype_size
        q = self.BM * (self.nope_depth * size + rope)
        keys = self.num_kv_stages * self.BN // self.ctas
        if self.use_fused_kv:
            kv = keys * max(self.parts.main, self.ov_depth) * size
        else:
            kv = keys * (self.nope_depth * size + self.ov_depth * self.pv_dtype_size)
        return q + kv + self.rope_buffers * self.BN // self.ctas * rope

    def _broken_limits(self) -> Iterator[str]:
        """What the kernel cannot do."""
        main, tail = self.parts
        for name, width in (("V", self.ov_depth), ("K", main), ("K's second part", tail)):
            if width & (width - 1) or 0 < width < LEAST_COLUMNS:
                yield f"{name} of {width} columns: a tile has a power of two of them, 64 or more"
        if self.BN < LEAST_COLUMNS or self.BN & (self.BN - 1):
            yield f"tiles of {self.BN} keys: their number is a power of two, 64 or more"
        if self.pv_dtype not in HALF_FLOATS:
            yield f"V of {self.pv_dtype}: weights and values have 16 bits"
        if self.use_fused_kv and self.pv_dtype_size != self.qkv_dtype_size:
            yield f"K of {self.qkv_dtype} and V of {self.pv_dtype}: they do not share a ring"
        if tail and self.use_fused_kv:
            yield f"K of {main} + {tail} columns: in a ring that V shares, K is one tile"
        if self.num_qo not in (1, 2) or (self.single_o and self.num_qo == 2):
            yield f"{self.num_qo} query tiles: there are 1 or 2, and 2 have 2 accumulators"
        if self.pair_cta and (self.num_qo, self.use_fused_kv, self.page_size) != (2, False, 0):
            yield "a pair of CTAs: it has two query tiles, rings of their own, and no pages"
        if self.num_kv_stages < LEAST_STAGES:
            yield f"{self.num_kv_stages} K/V stages < {LEAST_STAGES}"
        if self.tmem_used > TMEM_COLS:
            yield f"{self.tmem_used} tensor-memory columns > {TMEM_COLS}"
        if self.tile_bytes > SMEM_CARVEOUT:
            yield f"tiles of {self.tile_bytes} bytes > {SMEM_CARVEOUT} of shared memory"

    def explain(self) -> list[str]:
        """Its numbers; `DenseKernel.explain` has the arithmetic."""
        ring = "one ring" if self.use_fused_kv else "a ring each"
        return [
            f"{self.BM} rows x {self.BN} keys, {self.num_kv_stages} stages, K and V in {ring}, "
            f"{self.tmem_used} columns of tensor memory"
        ]


# The original's plan, and what follows from it.


def original_plan(problem: Problem) -> Original:
    """The original's plan for a problem, with tiles that this kernel can have.

    Raises Unsupported where the original has none, with its reason.
    """
    config = _mla(problem) if problem.d_rope else _fa4(problem)
    reason = config.why_unsupported()
    if reason:
        raise Unsupported(reason)
    return config


def _mla(problem: Problem) -> MLAConfig:
    """The original has 64 columns of rope; narrower rope comes with zeros behind it."""
    qkv = problem.q_dtype
    stored = "e4m3" if problem.rope_dtype in GLUON_CACHES else problem.rope_dtype
    used = qkv if stored == qkv else "bf16"
    config = select_mla_prefill_config(
        qkv_dtype=LONG_NAMES[qkv],
        rope_gmem_dtype=LONG_NAMES[stored],
        rope_mma_dtype=LONG_NAMES[used],
        scale_dtype=_scale_dtype(problem),
        num_q_heads=problem.heads,
        group=1 if problem.rope == "per_head" else problem.heads,
        depth=problem.d_nope + ROPE_COLUMNS,
        page_size=problem.page_size if problem.rope == "cache" else 0,
        v_depth=problem.d_v,
    )
    if not config.BN & (config.BN - 1):
        return config
    narrower = (replace(config, bn_cap=keys) for keys in (128, 64) if keys < config.BN)
    return next((tile for tile in narrower if tile.supported()), config)


def _fa4(problem: Problem) -> FA4Config:
    """Plain attention: 2Q, else 1Q, else one accumulator; tiles of 128 or 64 keys.

    `group` is 1: FA4Config would lay rows of several heads that share K and V in one tile; here a
    tile has rows of one head, and such heads follow each other, so that they find K and V in L2.
    """
    qkv_dtype = LONG_NAMES[problem.q_dtype]
    two_q = FA4Config(
        qkv_dtype=qkv_dtype,
        scale_dtype=_scale_dtype(problem),
        num_q_heads=problem.heads,
        group=1,
        qk_depth=problem.d_nope,
        ov_depth=problem.d_v,
        nope_depth=problem.d_nope,
        swizzle_mode=operand_swizzle(qkv_dtype),
        page_size=0,
        is_mla=False,
        bn_cap=MOST_KEYS,
    )
    single_o = replace(two_q, BM=128, single_o=True)
    tried = (two_q, replace(two_q, BM=128), single_o, replace(single_o, bn_cap=64))
    runs = (c for c in tried if c.supported() and following(c).supported())
    return next(runs, two_q)


def _scale_dtype(problem: Problem) -> str | None:
    return "float32" if problem.has_q_scale or problem.has_k_scale else None


def attention_of(original: Original) -> FA4Config:
    """The attention plan that a plan of the original is or has."""
    return original if isinstance(original, FA4Config) else original.fa4_config


def in_a_pair(original: Original) -> FA4Config:
    """The attention plan in two query tiles of a pair of CTAs, by the original's arithmetic."""
    return replace(attention_of(original), BM=256, pair_cta=True, bn_cap=0)


def following(original: Original, attention: FA4Config | None = None) -> DenseConfig:
    """The kernel's numbers, taken from a plan of the original: `attention`, or its own."""
    taken = attention or attention_of(original)
    config = DenseConfig(
        qkv_dtype=taken.qkv_dtype,
        pv_dtype=taken.qkv_dtype,
        rope_dtype=taken.rope_dtype,
        rope_gmem_dtype=original.rope_gmem_dtype if isinstance(original, MLAConfig) else None,
        nope_depth=taken.nope_depth,
        rope_depth=taken.rope_depth(),
        ov_depth=taken.ov_depth,
        page_size=taken.page_size,
        num_qo=taken.num_qo,
        single_o=taken.single_o,
        pair_cta=taken.pair_cta,
        BN=taken.BN,
        num_kv_stages=taken.num_kv_stages,
        use_fused_kv=taken.use_fused_kv,
        switches_to_1q=attention is None and original.num_qo == 2 and original.can_switch_to_1q(),
    )
    return config if config.pv_dtype in HALF_FLOATS else _with_wide_values(config)


def _with_wide_values(config: DenseConfig) -> DenseConfig:
    """Q and K of 8 bits beside V of 16: the widest tile of keys of which two fit in a ring each."""
    widest = min(1 << (config.BN.bit_length() - 1), MOST_KEYS)
    for keys in (widest, widest // 2):
        found = replace(config, pv_dtype=VALUES, use_fused_kv=False, BN=keys, num_kv_stages=1)
        alone = replace(found, num_kv_stages=2).tile_bytes - found.tile_bytes + keys * SCALE_BYTES
        left = SMEM_CARVEOUT - BESIDE_TILES - (found.tile_bytes + keys * SCALE_BYTES)
        stages = min(1 + left // alone, MOST_STAGES)
        if stages >= LEAST_STAGES:
            break
    return replace(found, num_kv_stages=stages)


def original_of(config: DenseConfig, problem: Problem) -> Original:
    """The plan of the original that a config follows."""
    original = original_plan(problem)
    if config.num_qo == original.num_qo:
        return original
    return original.switch_1q_config() if config.num_qo == 1 else original.with_num_qo(2)


def dense_config(problem: Problem, target: Target) -> DenseConfig:
    """The kernel's plan for a problem, in one CTA."""
    original = original_plan(problem)
    fewer = original.num_qo == 2 and _prefers_1q(original, problem, target)
    return _checked(following(original.switch_1q_config() if fewer else original))


def _prefers_1q(original: Original, problem: Problem, target: Target) -> bool:
    """1Q for short prompts, if its key tile is the same: a request's bits must not depend on it.

    Of several requests the longest is not known here, where the original knows it: one may have all
    tokens, and one query tile would be slow for it. In two tiles short requests run as one anyway.
    """
    if not original.can_switch_to_1q():
        return False
    config = following(original)
    if config.rope_gmem_dtype_size < config.rope_dtype_size:
        return False  # waiting for dequantized rope takes more registers than 1Q's MMA warp has
    if not attention_of(original).prefer_1q(problem.total_q, 1, problem.batch, target.sm_count):
        return False
    one_q = following(original.switch_1q_config())
    return one_q.BN == config.BN and one_q.supported()


def dense_pair_config(problem: Problem, target: Target) -> DenseConfig:
    """Two CTAs that share K and V, for prompts that fill several of their work items."""
    alone = dense_config(problem, target)
    if alone.num_qo == 1 or mean_length(problem.total_q, problem.batch) < PAIR_PROMPT:
        raise Unsupported(f"a pair of CTAs serves prompts of {PAIR_PROMPT} tokens or more")
    original = original_plan(problem)
    return _checked(following(original, in_a_pair(original)))


def _checked(config: DenseConfig) -> DenseConfig:
    reason = config.why_unsupported()
    if reason:
        raise Unsupported(reason)
    return config
