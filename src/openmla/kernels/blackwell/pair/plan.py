"""What the kernel of a CTA pair runs on, what it takes of each of its two SMs, and why.

"The original" is the system that the kernel follows, `MLAPrefillSparse` of openmla.modular, or in
FP8 `MLAPrefillSparseQKVFP8`. Of its plan for 128 heads the kernel keeps the heads of a CTA, the
columns and the two atoms of the output. All of Q stays in shared memory, since Triton refuses a
pair's product of 64 rows a CTA that takes Q from tensor memory; so its steps are twice as long, Q
is read half as often, and K and V share one ring.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from openmla.arithmetic import Limited, ceildiv
from openmla.errors import Unsupported
from openmla.formats import V4
from openmla.kernels.blackwell.chip import Partitioned, Worker, argument_bytes
from openmla.kernels.blackwell.sparse.plan import original_arguments, widened
from openmla.modular import MLAPrefillSparse, MLAPrefillSparseQKVFP8
from openmla.modular.blackwell.sparse.shape import LATENT_ROW, LATENT_V
from openmla.modular.blackwell.units import FP8_FLOATS, HALF_FLOATS, dtype_size
from openmla.planning.dequantize import DEQUANTIZED_CAP, CacheRead, Workspace, workspace_of
from openmla.planning.family import Block, Pipeline
from openmla.planning.latent_split import LatentSplit, RangeSpace, range_space
from openmla.planning.memory import Columns, Wanted
from openmla.planning.serves import GLUON_CACHES, LONG_NAMES
from openmla.planning.target import Target
from openmla.problem import Problem

FIRST_ROWS_PAIR = (3, 8)
"""The first Triton with the latent-row kernel of a CTA pair: 3.7 refuses its one-CTA barriers."""
KEYS = 256  # of a step
ROWS = 64  # heads of a CTA
TILE = 64  # columns of a tile of Q and K, keys of a tile of V
BITS_PER_BYTE = 8
# Rows of all pools: 64 MB of bf16, some 47 microseconds of an H200.
MOST_JOINED = 65536
RING_BYTES = 114688  # what is left beside Q and the weights, in slots of 16 KiB
WORKERS = (Worker("load", 4, 160), Worker("multiply", 1, 88), Worker("kv_valid_producer", 1, 88))
# (threshold, bias) of the weights: see kernels/blackwell/dense/plan.py.
WEIGHTS, FP8_WEIGHTS = (6.0, 0.0), (2.0, 6.0)


@dataclass(frozen=True, slots=True)
class PairVariant:
    """The launches of a call."""

    workspace: Workspace | None
    """FP8 rows are dequantized into it first. It holds all that can be named."""
    ranges: RangeSpace | None
    """Room for ranges of keys; None for lists."""


@dataclass(frozen=True, kw_only=True)
class PairConfig(Limited):
    """The numbers of a pair: rows of 576 or 512 columns, in 16 or 8 bits.

    >>> PairConfig(qkv_dtype="bfloat16").slots, PairConfig(qkv_dtype="float8_e4m3fn").slots
    (7, 14)
    """

    qkv_dtype: str
    """What is multiplied; FP8 rows of a bf16 query are bf16 when they come here."""
    qk_depth: int = LATENT_ROW
    v_depth: int = LATENT_V

    ctas: ClassVar[int] = 2

    @property
    def qkv_dtype_size(self) -> int:
        return dtype_size(self.qkv_dtype)

    @property
    def slot_bytes(self) -> int:
        """A tile of K or V: each CTA holds half of it."""
        return KEYS // 2 * TILE * self.qkv_dtype_size

    @property
    def slots(self) -> int:
        """Slots of the ring that K and V share."""
        return RING_BYTES // self.slot_bytes

    def variant(self, problem: Problem) -> PairVariant:
        """The launches that a problem takes."""
        kernel = PairKernel(self, problem)
        workspace = workspace_of(kernel.cache_read, problem) if kernel.dequantizes else None
        rule = kernel.split
        return PairVariant(workspace, None if rule is None else range_space(rule, problem))

    def _broken_limits(self) -> Iterator[str]:
        if self.qkv_dtype not in (*HALF_FLOATS, FP8_FLOATS[0]):
            yield f"products of {self.qkv_dtype}: of bf16, fp16 or e4m3"
        if self.qk_depth not in (LATENT_ROW, LATENT_V) or self.v_depth != LATENT_V:
            rows = f"rows of {self.qk_depth} with {self.v_depth} of V"
            yield f"{rows}; the kernel reads rows of {LATENT_ROW} or {LATENT_V} with {LATENT_V}"

    def explain(self) -> list[str]:
        """Its numbers; `PairKernel.explain` has the arithmetic."""
        return [f"2 x {ROWS} heads x {KEYS} keys, a ring of {self.slots} slots"]


def pair_config(problem: Problem, target: Target | None = None) -> PairConfig:
    """The plan of a pair. It multiplies e4m3 queries with e4m3 rows that have no scales; others are
    bf16 when they come here."""
    multiplied = problem if problem.kv_dtype == "e4m3" else widened(problem)
    return PairConfig(
        qkv_dtype=LONG_NAMES[multiplied.q_dtype], qk_depth=problem.d_qk, v_depth=problem.d_v
    )


def joins(problem: Problem) -> bool:
    """Whether pools become one of bf16 rows: those of DeepSeek-V4's rows, and any two. Not where
    pages name rows: then those are dequantized, as of any other FP8 rows."""
    lists = problem.form == "sparse"
    return problem.second is not None or (lists and problem.kv_dtype == V4.name)


def pair_config_joined(problem: Problem, target: Target | None = None) -> PairConfig:
    """A pair over the rows of one or two sources, if a workspace may hold all of their pools. Large
    ones of DeepSeek-V4's rows have a kernel that reads rows where they lie."""
    config = pair_config(problem)
    row, rows = 2 * config.qk_depth, sum(source.total_k for source in problem.sources)
    if rows > MOST_JOINED and all(source.kv_dtype == V4.name for source in problem.sources):
        raise Unsupported(f"pools of {rows} {V4.name} rows: up to {MOST_JOINED} are joined")
    if joins(problem) and rows * row > DEQUANTIZED_CAP:
        workspace = f"a workspace of {rows} rows of {row} bytes = {rows * row}"
        raise Unsupported(f"{workspace} would exceed {DEQUANTIZED_CAP}")
    return config


def why_slow_for_large_pools(config: object, problem: Problem) -> str:
    """Why large pools are slower here than in the portable kernel, which reads rows where they lie.
    The pools alone decide, since another kernel gives other bits."""
    rows = sum(source.total_k for source in problem.sources)
    if not joins(problem) or rows <= MOST_JOINED:
        return ""
    return f"pools of {rows} rows are dequantized whole in every call: {MOST_JOINED} are fast"


def can_split(problem: Problem) -> bool:
    """Whether a request of one query could be split. By the width of the table alone: a request's
    kernel may not follow from its neighbors."""
    return LatentSplit(problem.heads, problem.d_v).can_split(problem.most_keys)


def pair_config_dequantized(problem: Problem, target: Target) -> PairConfig:
    """A pair over rows that were dequantized before, if a workspace may hold all of the cache: a
    question of the cache alone, since other kernels give other bits."""
    config = pair_config(problem)
    workspace = problem.total_k * config.qk_depth * 2
    if workspace > DEQUANTIZED_CAP:
        rows = f"{problem.total_k} rows of {2 * config.qk_depth} bytes"
        raise Unsupported(f"a workspace of {rows} = {workspace} would exceed {DEQUANTIZED_CAP}")
    return config


@dataclass(frozen=True)
class PairKernel(Partitioned):
    """The kernel of a CTA pair.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="sparse", heads=128, d_nope=512, d_rope=64, d_v=512, topk=64), "b200")
    >>> kernel = PairKernel(p.config, p.problem)
    >>> kernel.slots, kernel.tmem_columns
    (7, 512)
    """

    config: PairConfig
    problem: Problem

    workers: ClassVar[tuple[Worker, ...]] = WORKERS

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread of each worker."""
        return tuple(worker.registers for worker in self.workers)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.config.qkv_dtype_size

    @property
    def slots(self) -> int:
        return self.config.slots

    @property
    def slot_bytes(self) -> int:
        return self.config.slot_bytes

    @property
    def weights(self) -> tuple[float, float]:
        """(threshold, bias) of the weights."""
        return FP8_WEIGHTS if self.size == 1 else WEIGHTS

    @property
    def dequantizes(self) -> bool:
        """Whether FP8 rows that are named are dequantized before."""
        return self.problem.kv_dtype in (*GLUON_CACHES, V4.name) and not self.joins

    @property
    def joins(self) -> bool:
        """Whether the pools of all sources become one of bf16 rows first."""
        return joins(self.problem)

    @property
    def split(self) -> LatentSplit | None:
        """How the keys of a sequence are split; None for lists and for windows, which are short."""
        if self.problem.form != "latent" or self.problem.window:
            return None
        return LatentSplit(self.problem.heads, self.config.v_depth)

    @property
    def cache_read(self) -> CacheRead:
        """Rows of an FP8 cache are dequantized once, by kernels of their own: those that lists or
        pages name, at most all there are. Always, so that a token's bits depend on nothing else."""
        problem, row = self.problem, 2 * self.config.qk_depth
        rows = pool = problem.total_k
        if problem.form == "sparse":
            rows = min(pool, problem.total_q * problem.topk)
        mapped = ceildiv(pool, max(problem.page_size, 1)) if problem.form == "latent" else pool
        if rows * row > DEQUANTIZED_CAP:  # so many may be named, and no other kernel reads FP8 rows
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
        # The maxima and sums of rows meet where the arguments were: two warps share a row.
        exchanged = ROWS * 2 * 4
        cells = KEYS // 2
        names = "O left", "O right", "scores of even steps", "scores of odd steps"
        columns = tuple(Columns(name, i * cells, cells) for i, name in enumerate(names))
        return Block(
            tile_rows=ROWS,
            tile_keys=KEYS,
            stages=self.slots,
            threads=self.threads,
            registers=self.block_registers,
            memory=self.memory(exchanged),
            tensor_memory=columns,
            pipeline=Pipeline(
                groups=1,
                rows=ROWS,
                keys=KEYS,
                d_qk=config.qk_depth,
                d_v=config.v_depth,
                element=self.size,
                k_slots=self.slots,
                v_slots=-1,
            ),
        )

    def explain(self) -> list[str]:
        """The original's arithmetic, and what Triton makes of this kernel."""
        eight = self.size == 1
        arguments = original_arguments(self.problem if eight else widened(self.problem))
        if eight:
            own = MLAPrefillSparseQKVFP8(**arguments).smem.explain()
        else:
            own = MLAPrefillSparse(**arguments).explain()
        lines = [*own, *self.compiled_lines(self._differences(), self.weights)]
        return lines + ([self.split.explain_mean(self.problem)] if self.split else [])

    def _differences(self) -> Iterator[str]:
        """Where the kernel is not the original's, and why."""
        yield (
            "all of Q stays in shared memory: Triton refuses a pair's product of 64 rows a CTA "
            "that takes Q from tensor memory"
        )
        yield f"so a step is {KEYS} keys, and Q is read half as often; two score tiles"
        yield f"K and V share a ring of {self.slots} slots of {self.slot_bytes} bytes"
        if self.problem.q_dtype == "e4m3" and self.size > 1:
            yield "queries come as bf16, which a pass before makes of e4m3"
        if self.dequantizes:
            yield f"rows come as bf16: {self.cache_read.explain()}"
        if self.joins:
            pools = len(self.problem.sources)
            yield f"rows come as bf16, those of {pools} pool(s) in one workspace, in a pass before"
        yield "weights leave registers rounded, and out passes through their buffer"
        yield "pairs stay and take tokens in turn"
        if not self.problem.d_rope:
            yield "rows have no rope, K is eight tiles: the original's rows have 512 + 64 columns"
        if self.problem.heads < 2 * ROWS:
            yield f"{self.problem.heads} heads are padded to the {2 * ROWS} rows of a pair"
        yield "before Triton 3.8 a pair is two CTAs of 64 heads: it has no barriers of both"
