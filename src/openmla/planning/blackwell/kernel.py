"""What the dense Blackwell kernel takes of an SM, and what it is compiled with, from its plan.

MLAConfig, or without rope FA4Config, decides tiles, columns, stages and rings, as in the original.
The kernel is written in Gluon, so some of its bytes are others; `DenseKernel.explain` says which.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.formats import BF16, FORMATS
from openmla.planning.arithmetic import ceildiv
from openmla.planning.blackwell.fa4 import FA4Config
from openmla.planning.blackwell.mla import MLAConfig
from openmla.planning.blackwell.partitions import (
    Partitioned,
    Worker,
    allocated,
    argument_bytes,
)
from openmla.planning.blackwell.ring import CORRECTION_BYTES
from openmla.planning.family import Block, Pipeline
from openmla.planning.memory import Columns, Wanted
from openmla.planning.split import query_tile_lines
from openmla.problem import Problem

LEAST_COLUMNS = 64  # a row of 64 or 128 bytes, which is what tiles are swizzled by
Q_ROWS = 128  # of a query tile
FP32 = 4
# How far, in log2 units, a row's maximum may grow before O is rescaled, and the exponent that
# weights are lifted by: e4m3 reaches 448, so 2^(2 + 6) fits and small weights keep their bits.
WEIGHTS, FP8_WEIGHTS = (8.0, 0.0), (2.0, 6.0)
# Registers of the second softmax group, the correction group and single warps. With one query tile
# the second group is idle; with one accumulator there is none.
TWO_Q, ONE_Q, SINGLE_O = (184, 96, 48), (48, 128, 112), (0, 144, 144)


def attention_of(config: MLAConfig | FA4Config) -> FA4Config:
    """The attention plan that a dense plan is or has."""
    return config if isinstance(config, FA4Config) else config.fa4_config


def why_no_kernel(given: MLAConfig | FA4Config) -> str:
    """The first thing the kernel cannot do; empty when it can run the plan.

    >>> from openmla.planning.blackwell.mla import select_mla_prefill_config
    >>> config = select_mla_prefill_config(
    ...     qkv_dtype="bfloat16", rope_gmem_dtype="bfloat16", rope_mma_dtype="bfloat16",
    ...     num_q_heads=64, group=64, depth=256, page_size=0, v_depth=192)
    >>> why_no_kernel(config)
    'V of 192 columns: a tile has a power of two of them, 64 or more'
    """
    config = attention_of(given)
    main, tail = column_parts(config)
    for name, width in (("V", config.ov_depth), ("K", main), ("K's second part", tail)):
        if width & (width - 1) or 0 < width < LEAST_COLUMNS:
            return f"{name} of {width} columns: a tile has a power of two of them, 64 or more"
    if config.BN & (config.BN - 1):
        return f"tiles of {config.BN} keys: their number is a power of two"
    if tail and config.use_fused_kv:
        return f"K of {main} + {tail} columns: in a ring that V shares, K is one tile"
    return ""


def column_parts(config: FA4Config) -> tuple[int, int]:
    """Columns of the main and the tail tile of Q and K: tile widths are powers of two."""
    main = 1 << (config.nope_depth.bit_length() - 1)
    return main, config.nope_depth - main


@dataclass(frozen=True)
class DenseKernel(Partitioned):
    """The dense kernel of one plan.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128,
    ...                  total_q=8192, total_k=8192, wants_lse=True), "b200")
    >>> kernel = DenseKernel(p.config, p.problem)
    >>> kernel.arguments, kernel.block.memory.used, kernel.tmem_columns
    (348, 221736, 512)
    """

    config: MLAConfig | FA4Config
    problem: Problem

    attention = cached_property[FA4Config](lambda k: attention_of(k.config))
    parts = cached_property[tuple[int, int]](lambda k: column_parts(k.attention))
    rope = cached_property[int](lambda k: k.attention.rope_depth())
    # Whether rope is stored narrower than it is multiplied. A cache may hold its rope in bf16,
    # whatever its latent part is.
    q_raw = cached_property[bool](
        lambda k: k.attention.qkv_dtype_size < k.attention.rope_dtype_size
    )
    k_raw = cached_property[bool](
        lambda k: (
            isinstance(k.config, MLAConfig)
            and k.config.rope_gmem_dtype_size < k.config.rope_mma_dtype_size
            and not FORMATS.get(k.problem.rope_dtype, BF16).bf16_columns
        )
    )
    # CTAs that a work item's tiles are divided among.
    ctas = cached_property[int](lambda k: 2 if k.attention.pair_cta else 1)
    # Buffers of K's rope, and of the scales of keys: one for each K tile that can be in flight.
    ropes = cached_property[int](
        lambda k: ceildiv(k.config.num_kv_stages, 2 if k.config.use_fused_kv else 1)
    )
    # (threshold, bias) of the weights.
    weights = cached_property[tuple[float, float]](
        lambda k: FP8_WEIGHTS if k.config.qkv_dtype_size == 1 else WEIGHTS
    )

    @property
    def queries(self) -> int:
        """Query tiles of a block; 0 for two where it has more than 128 rows left, else one."""
        config = self.config
        return 0 if config.num_qo == 2 and config.can_switch_to_1q() else config.num_qo

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of the second softmax group, the correction group, and each single warp."""
        if self.config.single_o:
            return SINGLE_O
        return TWO_Q if self.config.num_qo == 2 else ONE_Q

    @property
    def workers(self) -> list[Worker]:
        softmax, correction, single = self.registers
        listed = [] if self.config.single_o else [Worker("softmax", 4, softmax)]
        listed.append(Worker("correction", 4, correction))
        listed += [Worker(name, 1, single) for name in ("multiply", "load")]
        raw = self.q_raw or self.k_raw
        return [*listed, Worker("dequantize", 2, single)] if raw else listed

    def tiles(self) -> Iterator[Wanted]:
        config, (main, tail) = self.attention, self.parts
        size, rope = config.qkv_dtype_size, self.rope * config.rope_dtype_size
        rows, keys = Q_ROWS * config.num_qo, config.num_kv_stages * config.BN // self.ctas
        yield Wanted("Q", "q", rows * main * size)
        yield Wanted("Q tail", "q", rows * tail * size)
        yield Wanted("Q rope", "q", rows * rope)
        yield Wanted("K rope", "rope", self.ropes * config.BN // self.ctas * rope)
        if config.use_fused_kv:
            yield Wanted("K and V in turn", "k", keys * max(main, config.ov_depth) * size)
        else:
            yield Wanted("K", "k", keys * main * size)
            yield Wanted("K tail", "k", keys * tail * size)
            yield Wanted("V", "v", keys * config.ov_depth * size)
        scaled = self.ropes if self.problem.has_k_scale else 0
        yield Wanted("scales of keys", "stats", scaled * config.BN * FP32)

    def barriers(self) -> dict[str, int]:
        """How many of each kind; see the table of kernels/blackwell/dense/kernel.py."""
        config = self.config
        slots = config.num_kv_stages * (1 if config.use_fused_kv else 2)
        found = dict.fromkeys(("ring full", "ring empty"), slots)
        found |= dict.fromkeys(("s_full", "p_full", "o_full", "c_full", "t_full"), 2)
        found["second"] = config.num_qo - 1
        scaled = self.ropes if self.problem.has_k_scale else 0
        found |= dict.fromkeys(("scale full", "scale empty"), scaled)
        found |= dict.fromkeys(("q_raw", "q_wide"), config.num_qo if self.q_raw else 0)
        found |= dict.fromkeys(("k_raw", "k_wide"), self.ropes if self.k_raw else 0)
        return {name: count for name, count in found.items() if count}

    @property
    def arguments(self) -> int:
        problem, two = self.problem, self.config.num_qo == 2
        tiles = [tile for tile in self.tiles() if tile.size]
        # Descriptors: one per tile but for K and V in one ring, which have two, and for rope.
        descriptors = len(tiles) + (1 if self.config.use_fused_kv else 0)
        from_cache, scales = problem.rope == "cache", self.k_raw
        # Tensor memory and out, then what there may be besides.
        pointers = 2 + problem.wants_lse + problem.has_sink + from_cache + scales
        pointers += two and problem.has_q_scale
        # Head, token, rows, first key, keys, blocks, and strides; the second softmax group wants
        # to know the scale, and which blocks need a mask.
        integers = 6 + 2 + 2 * problem.wants_lse + 2 * from_cache + 2 * scales
        integers += (2 + 2 * problem.causal) if two else 0
        lines = int(problem.has_k_scale)  # a scale tile has two dimensions, and no descriptor
        return argument_bytes(
            tiles=len(tiles) - lines, arrays=len(self.barriers()) + lines,
            pointers=descriptors + pointers, integers=integers,
        )  # fmt: skip

    @cached_property
    def block(self) -> Block:
        config, ring = self.attention, self.config.num_kv_stages
        widths = config.qk_depth, config.ov_depth, config.qkv_dtype_size
        groups = 1 if config.single_o else 2
        v_slots = -1 if config.use_fused_kv else ring
        return Block(
            tile_rows=config.BM * self.ctas, tile_keys=config.BN, stages=ring, threads=self.threads,
            registers=self.block_registers, memory=self.memory(),
            tensor_memory=allocated(columns_of(config)),
            pipeline=Pipeline(
                groups, Q_ROWS, config.BN, *widths, ring, v_slots, shares_keys=config.num_qo == 2
            ),
        )  # fmt: skip

    def explain(self) -> list[str]:
        """The plan's arithmetic, and what Triton makes of it."""
        lines = self.config.explain()
        if self.config.num_qo == 1 and not self.config.single_o:
            lines += query_tile_lines(self.problem, self.config.BM)
        return [*lines, *self.compiled_lines(self._differences(), self.weights)]

    def _differences(self) -> Iterator[str]:
        """Where the kernel's bytes are not those of the plan, and why."""
        config = self.config
        yield f"correction factors go through tensor memory, not {CORRECTION_BYTES} bytes"
        yield "Triton passes arguments to partitions through shared memory"
        if config.single_o:
            yield "K and V take their own widths, not the wider of both"
        other = config.switch_1q_config().smem_used if config.can_switch_to_1q() else 0
        if other > config.smem_used:
            yield f"a short last tile runs in the ring of 2Q; 1Q's own, {other} bytes, is not there"
        if self.ctas == 2:
            yield "a pair of CTAs shares K and V; the original pairs them without rope only"
            yield "O is multiplied for every block: a pair has no branch that both CTAs take"
        if config.num_qk_stages > 1:
            yield f"a K tile arrives whole, not in {config.num_qk_stages} pieces"
        spare = self.tmem_columns - config.tmem_used
        if spare:
            yield f"{spare} columns of tensor memory more: allocations are powers of two"


def columns_of(config: FA4Config) -> tuple[Columns, ...]:
    """The tensor memory of a dense plan: two score tiles, then one output or two."""
    score, width = config.TMEM_S1, config.padded_ov_depth
    scores = Columns("S0, then P0", 0, score), Columns("S1, then P1", score, score)
    if config.single_o:
        return (*scores, Columns("O", config.TMEM_O0, width))
    return (*scores, Columns("O0", config.TMEM_O0, width), Columns("O1", config.TMEM_O1, width))
