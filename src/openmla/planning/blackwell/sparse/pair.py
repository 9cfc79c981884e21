"""What the kernel of a CTA pair takes of each of its two SMs, from its plan.

The plan is the original's; of its numbers the kernel keeps the heads of a CTA, the columns and the
two atoms of the output. Its steps are twice as long, and K and V share one ring; why, says
`PairKernel.explain`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.planning.arithmetic import ceildiv
from openmla.planning.blackwell.partitions import Partitioned, Worker, argument_bytes
from openmla.planning.blackwell.sparse.prefill import MLAPrefillSparse
from openmla.planning.blackwell.sparse.qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.planning.dequantize import WORKSPACE_CAP, CacheRead
from openmla.planning.family import Block, Pipeline
from openmla.planning.memory import Columns, Wanted
from openmla.planning.serves import GLUON_CACHES
from openmla.problem import Problem

KEYS = 256  # of a step
ROWS = 64  # heads of a CTA
TILE = 64  # columns of a tile of Q and K, keys of a tile of V
BITS_PER_BYTE = 8
RING_BYTES = 114688  # what is left beside Q and the weights, in slots of 16 KiB
WORKERS = (Worker("load", 4, 160), Worker("multiply", 1, 88), Worker("kv_valid_producer", 1, 88))
# (threshold, bias) of the weights: see planning/blackwell/kernel.py.
WEIGHTS, FP8_WEIGHTS = (6.0, 0.0), (2.0, 6.0)


def takes_pair(config: MLAPrefillSparse | MLAPrefillSparseQKVFP8) -> bool:
    """Whether a plan runs as a pair: those in fp8 throughout always do."""
    return config.cta_group == 2 or isinstance(config, MLAPrefillSparseQKVFP8)


@dataclass(frozen=True)
class PairKernel(Partitioned):
    """The kernel of a CTA pair.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=64), "b200")
    >>> kernel = PairKernel(p.config, p.problem)
    >>> kernel.slots, kernel.tmem_columns
    (7, 512)
    """

    config: MLAPrefillSparse | MLAPrefillSparseQKVFP8
    problem: Problem

    workers = cached_property[tuple[Worker, ...]](lambda k: WORKERS)
    registers = cached_property[tuple[int, ...]](lambda k: tuple(w.registers for w in k.workers))
    size = cached_property[int](lambda k: k.config.qkv_dtype_size)
    slots = cached_property[int](lambda k: RING_BYTES // k.slot_bytes)
    slot_bytes = cached_property[int](lambda k: KEYS // 2 * TILE * k.size)
    weights = cached_property[tuple[float, float]](
        lambda k: FP8_WEIGHTS if k.size == 1 else WEIGHTS
    )

    dequantizes = cached_property[bool](lambda k: k.problem.kv_dtype in GLUON_CACHES)

    @property
    def cache_read(self) -> CacheRead:
        """Rows of an FP8 cache are dequantized once, by kernels of their own: those that lists or
        pages name, at most all there are. Always, so that a token's bits depend on nothing else."""
        problem, row = self.problem, 2 * self.config.qk_depth
        rows = pool = problem.total_k
        if problem.form == "sparse":
            rows = min(pool, problem.total_q * problem.topk)
        mapped = ceildiv(pool, max(problem.page_size, 1)) if problem.form == "latent" else pool
        if rows * row > WORKSPACE_CAP:  # so many may be named, and no other kernel reads FP8 rows
            rows, mapped = pool, 0
        return CacheRead("workspace", rows, row, problem.total_q * problem.topk, mapped)

    def tiles(self) -> Iterator[Wanted]:
        yield Wanted("Q", "q", ROWS * self.config.qk_depth * self.size)
        yield Wanted("K and V in turn", "k", self.slots * self.slot_bytes)
        # Weights of 8 bits are in two parts.
        yield Wanted("P, then O", "p", ROWS * KEYS * 2)
        yield Wanted("is_k_valid", "stats", 2 * KEYS // BITS_PER_BYTE)

    def barriers(self) -> dict[str, int]:
        """How many of each kind; see the table of kernels/blackwell/pair/kernel.py."""
        ring = dict.fromkeys(("full", "empty"), self.slots)
        twice = dict.fromkeys(("s_full", "valid_full", "valid_free"), 2)
        return ring | twice | dict.fromkeys(("q_full", "q_free", "p_full", "o_done"), 1)

    @property
    def arguments(self) -> int:
        """Bytes of what the workers are called with, if pages follow one another evenly."""
        problem = self.problem
        pages = problem.form == "latent"
        # Q, K, V; lists or table; tensor memory in three pieces; lengths, offsets of sequences.
        pointers = 3 + 1 + 3 + (pages or problem.has_topk_lengths) + pages
        # Stride of a list, entries, tokens, rows and their step; sequences.
        return argument_bytes(
            tiles=2, arrays=2 + len(self.barriers()), pointers=pointers, integers=5 + pages
        )

    @cached_property
    def block(self) -> Block:
        config = self.config
        widths = config.qk_depth, config.v_depth, self.size
        # The maxima and sums of rows meet where the arguments were: two warps share a row.
        exchanged = ROWS * 2 * 4
        cells = KEYS // 2
        names = "O left", "O right", "scores of even steps", "scores of odd steps"
        columns = tuple(Columns(name, i * cells, cells) for i, name in enumerate(names))
        return Block(
            tile_rows=ROWS, tile_keys=KEYS, stages=self.slots, threads=self.threads,
            registers=self.block_registers, memory=self.memory(exchanged), tensor_memory=columns,
            pipeline=Pipeline(1, ROWS, KEYS, *widths, self.slots, -1),
        )  # fmt: skip

    def explain(self) -> list[str]:
        """The plan's arithmetic, and what Triton makes of it."""
        config = self.config
        own = config.explain() if isinstance(config, MLAPrefillSparse) else config.smem.explain()
        return [*own, *self.compiled_lines(self._differences(), self.weights)]

    def _differences(self) -> Iterator[str]:
        """Where the kernel is not that of the plan, and why."""
        yield (
            "all of Q stays in shared memory: Triton refuses a pair's product of 64 rows a CTA "
            "that takes Q from tensor memory"
        )
        yield f"so a step is {KEYS} keys, and Q is read half as often; two score tiles"
        yield f"K and V share a ring of {self.slots} slots of {self.slot_bytes} bytes"
        if self.dequantizes:
            yield f"rows come as bf16: {self.cache_read.explain()}"
        yield "weights leave registers rounded, and out passes through their buffer"
        yield "pairs stay and take tokens in turn"
        if self.problem.heads < 2 * ROWS:
            yield f"{self.problem.heads} heads are padded to the {2 * ROWS} rows of a pair"
        yield "before Triton 3.8 a pair is two CTAs of 64 heads: it has no barriers of both"
