"""What the dense Blackwell kernel takes of an SM, and what it is compiled with, from its plan.

The kernel is written in Gluon, so some of its bytes are others than the original's;
`DenseKernel.explain` says which.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.formats import BF16, FORMATS
from openmla.kernels.blackwell.chip import (
    Partitioned,
    Worker,
    allocated,
    argument_bytes,
)
from openmla.kernels.blackwell.dense.plan import (
    Q_ROWS,
    RESCALE_AT,
    SCALE_BYTES,
    ColumnParts,
    DenseConfig,
    attention_of,
    in_a_pair,
    original_of,
    original_plan,
)
from openmla.modular.blackwell.ring import CORRECTION_BYTES
from openmla.planning.family import Block, Pipeline
from openmla.planning.memory import Columns, Wanted
from openmla.planning.split import query_tile_lines
from openmla.problem import Problem

# Registers of the second softmax group, the correction group and single warps. With one query tile
# the second group is idle; with one accumulator there is none.
TWO_Q, ONE_Q, SINGLE_O = (184, 96, 48), (48, 128, 112), (0, 144, 144)


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

    config: DenseConfig
    problem: Problem

    @property
    def parts(self) -> ColumnParts:
        return self.config.parts

    @property
    def rope(self) -> int:
        """Columns of rope."""
        return self.config.rope_depth

    @property
    def q_raw(self) -> bool:
        """Whether the rope of Q is stored narrower than it is multiplied."""
        return self.config.qkv_dtype_size < self.config.rope_dtype_size

    @property
    def k_raw(self) -> bool:
        """Whether the rope of K is; a cache may hold it in bf16, whatever its latent part is."""
        narrow = self.config.rope_gmem_dtype_size < self.config.rope_dtype_size
        return narrow and not FORMATS.get(self.problem.rope_dtype, BF16).bf16_columns

    @property
    def ctas(self) -> int:
        return self.config.ctas

    @property
    def ropes(self) -> int:
        return self.config.rope_buffers

    @property
    def upcasts(self) -> bool:
        """Whether V is of 8 bits: then a kernel before makes 16 of them."""
        return self.problem.v_dtype == "e4m3"

    @property
    def queries(self) -> int:
        """Query tiles of a block; 0 for two where it has more than 128 rows left, else one."""
        return 0 if self.config.switches_to_1q else self.config.num_qo

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of the second softmax group, the correction group, and each single warp."""
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
        config, (main, tail) = self.config, self.parts
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
            yield Wanted("V", "v", keys * config.ov_depth * config.pv_dtype_size)
        scaled = self.ropes if self.problem.has_k_scale else 0
        yield Wanted("scales of keys", "stats", scaled * config.BN * SCALE_BYTES)

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
        pointers += two and problem.has_key_mask
        # Head, token, rows, first key, keys, blocks, and strides; the second softmax group wants
        # to know the scale, and which blocks need a mask, and both groups which are skipped.
        integers = 6 + 2 + 2 * problem.wants_lse + 2 * from_cache + 2 * scales
        integers += (3 + problem.causal) if two else 0
        integers += 2 if two and problem.has_key_mask else 0
        integers += 2 if two and problem.window else 0
        lines = int(problem.has_k_scale)  # a scale tile has two dimensions, and no descriptor
        return argument_bytes(
            tiles=len(tiles) - lines,
            arrays=len(self.barriers()) + lines,
            pointers=descriptors + pointers,
            integers=integers,
        )

    @cached_property
    def block(self) -> Block:
        config, ring = self.config, self.config.num_kv_stages
        return Block(
            tile_rows=config.BM * self.ctas,
            tile_keys=config.BN,
            stages=ring,
            threads=self.threads,
            registers=self.block_registers,
            memory=self.memory(),
            tensor_memory=allocated(columns_of(config)),
            pipeline=Pipeline(
                groups=1 if config.single_o else 2,
                rows=Q_ROWS,
                keys=config.BN,
                d_qk=config.qk_depth,
                d_v=config.ov_depth,
                element=config.qkv_dtype_size,
                k_slots=ring,
                v_slots=-1 if config.use_fused_kv else ring,
                shares_keys=config.num_qo == 2,
                v_element=config.pv_dtype_size,
            ),
        )

    def explain(self) -> list[str]:
        """The original's arithmetic, and what Triton makes of the kernel that follows it."""
        lines = self._original_lines()
        if self.config.num_qo == 1 and not self.config.single_o:
            lines += query_tile_lines(self.problem, self.config.BM)
        return [*lines, *self.compiled_lines(self._differences(), (RESCALE_AT, 0.0))]

    def _original_lines(self) -> list[str]:
        if not self.config.pair_cta:
            return original_of(self.config, self.problem).explain()
        original = original_plan(self.problem)
        return [*original.explain()[:1], *in_a_pair(original).number_lines()]

    def _differences(self) -> Iterator[str]:
        """Where the kernel is not the original's, and why."""
        config, original = self.config, original_of(self.config, self.problem)
        yield f"correction factors go through tensor memory, not {CORRECTION_BYTES} bytes"
        yield "Triton passes arguments to partitions through shared memory"
        if config.pv_dtype != config.qkv_dtype:
            yield (
                f"V and the weights are {config.pv_dtype}, not {config.qkv_dtype}: small weights "
                f"keep their bits, and K and V have rings of their own, {config.num_kv_stages} deep"
            )
        if self.upcasts:
            yield "V is upcast to bf16 by a kernel before"
        if config.single_o:
            yield "K and V take their own widths, not the wider of both"
        wide = replace(attention_of(original), bn_cap=0).BN
        if wide & (wide - 1):
            yield f"tiles of {config.BN} keys, not {wide}: their number is a power of two"
        own = original.switch_1q_config().smem_used if config.switches_to_1q else 0
        if own > original.smem_used:
            yield f"a short last tile runs in the ring of 2Q; 1Q's own, {own} bytes, is not there"
        if config.switches_to_1q or (config.num_qo == 1 and not config.single_o):
            yield "one query tile has one softmax group; Modular's two take its blocks in turn"
            if self.problem.batch > 1:
                yield "one or two follows from all tokens; Modular's knows the longest request"
        if self.ctas == 2:
            yield "a pair of CTAs shares K and V; Modular's pairs them without rope only"
            yield "O is multiplied for every block: a pair has no branch that both CTAs take"
        if attention_of(original).num_qk_stages > 1:
            pieces = attention_of(original).num_qk_stages
            yield f"a K tile arrives whole, not in {pieces} pieces"
        spare = self.tmem_columns - config.tmem_used
        if spare:
            yield f"{spare} columns of tensor memory more: allocations are powers of two"


def columns_of(config: DenseConfig) -> tuple[Columns, ...]:
    """The tensor memory of a dense plan: two score tiles, then one output or two."""
    score, width = config.TMEM_S1, config.ov_depth
    scores = Columns("S0, then P0", 0, score), Columns("S1, then P1", score, score)
    if config.single_o:
        return (*scores, Columns("O", config.TMEM_O0, width))
    return (*scores, Columns("O0", config.TMEM_O0, width), Columns("O1", config.TMEM_O1, width))
