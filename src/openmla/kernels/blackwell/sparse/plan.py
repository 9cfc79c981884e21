"""What the sparse Blackwell kernel of one CTA runs on, what it takes of an SM, and why.

Heads, keys of a step, steps in flight and where Q lies are those of the system that the kernel
follows, "the original": `MLAPrefillSparse` of openmla.modular. The kernel is written in Gluon, so
some of its bytes are others; `SparseKernel.explain` says which.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar

from openmla.arithmetic import Limited, ceildiv, round_up
from openmla.errors import Unsupported
from openmla.formats import BF16, FORMATS, RowLayout
from openmla.kernels.blackwell.chip import (
    Partitioned,
    Worker,
    allocated,
    argument_bytes,
)
from openmla.modular import MLAPrefillSparse, select_mla_sparse_config
from openmla.modular.blackwell.sparse.shape import (
    CTA_HEADS,
    HEAD_STEP,
    LATENT_ROW,
    LATENT_V,
    PAIR_HEADS,
)
from openmla.modular.blackwell.units import TMEM_COLS, dtype_size
from openmla.planning.family import Block, Pipeline
from openmla.planning.memory import Columns, Wanted
from openmla.planning.serves import LONG_NAMES
from openmla.planning.target import Target
from openmla.problem import Problem

FP32 = 4
ELEMENT = 2
# (columns of K, of V) -> columns of Q in shared memory and in tensor memory. The first is the
# original's. What tensor memory holds waits in the tiles of V and K before it is copied.
Q_COLUMNS = {(576, 512): (192, 384), (512, 512): (128, 384), (320, 256): (192, 128)}
# log2 units that a row's maximum may grow before O is rescaled: O is 64 x 512 values.
RESCALE_THRESHOLD = 6.0
WORKERS = (
    Worker("load_k", 4, 96),
    Worker("load_v", 4, 96),
    Worker("mma", 1, 48),
    Worker("kv_valid_producer", 1, 48),
)


def original_arguments(problem: Problem) -> dict[str, Any]:
    """Arguments of the original's plan for a problem.

    The original has kernels for multiples of 8 heads up to 64 and for 128; others are padded to
    these. TMA fills what is not there with zeros, and does not store it.
    """
    heads = PAIR_HEADS if problem.heads > CTA_HEADS else round_up(problem.heads, HEAD_STEP)
    topk = max(problem.topk, 1)  # pages have no lists
    chosen = select_mla_sparse_config(num_q_heads=heads, indices_stride=topk)
    return chosen.arguments() | {"qkv_dtype": LONG_NAMES[problem.q_dtype]}


def widened(problem: Problem) -> Problem:
    """The problem with the queries that are multiplied: e4m3 ones are bf16 when they come here.
    Nothing is lost, since every e4m3 number is a bf16 one."""
    return replace(problem, q_dtype="bf16") if problem.q_dtype == "e4m3" else problem


def original_block(problem: Problem) -> MLAPrefillSparse:
    """The original's plan for a problem of up to 64 heads; of more, for each half of them."""
    halved = replace(widened(problem), heads=min(problem.heads, CTA_HEADS))
    arguments = original_arguments(halved)
    return MLAPrefillSparse(**arguments)


def layout_of(problem: Problem) -> RowLayout:
    """Where a row's columns and scales lie; plain e4m3 rows have no scales, as bf16 ones."""
    return FORMATS.get(problem.kv_dtype, BF16).layout(problem.d_nope, problem.d_rope)


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Limited):
    """The numbers of one CTA, which are the original's for up to 64 heads, under its names.

    >>> problem = Problem(form="sparse", heads=16, d_nope=512, d_rope=64, d_v=512, topk=64)
    >>> config = sparse_config(problem)
    >>> config.B_TOPK, config.Q_TMEM_ADDR
    (64, 320)
    """

    qkv_dtype: str
    padded_num_q_heads: int
    """Rows of scores: heads, or padding."""
    B_TOPK: int
    """Keys of a step."""
    num_mbars: int
    """Steps in flight."""
    qk_depth: int
    v_depth: int
    q_smem_depth: int
    """Columns of Q in shared memory."""
    q_tmem_depth: int
    """Columns of Q in tensor memory."""
    k_gather_box: int
    """Columns of a row that one copy gathers."""
    SV_ATOM_MMA_N: int
    """Columns of the output that one product writes."""
    O_ATOM_PHYS_COLS: int
    """Columns of tensor memory that they take."""
    O_TMEM_ADDR: int
    P_TMEM_ADDR: int
    Q_TMEM_ADDR: int

    ctas: ClassVar[int] = 1
    sm100_tmem_cols: ClassVar[int] = TMEM_COLS

    @property
    def qkv_dtype_size(self) -> int:
        return dtype_size(self.qkv_dtype)

    def _broken_limits(self) -> Iterator[str]:
        """The kernel is written for the original's numbers, and for narrower rows."""
        widths = (self.qk_depth, self.v_depth, self.q_smem_depth, self.q_tmem_depth)
        shapes = [(*rows, *split) for rows, split in Q_COLUMNS.items()]
        if widths not in shapes:
            yield f"rows of {self.qk_depth} with {self.v_depth} of V, Q in {widths[2:]} columns"
            return
        only = with_widths(following(original_block(_LIKE)), *widths)
        for field in fields(self):
            got, want = getattr(self, field.name), getattr(only, field.name)
            if got != want and field.name != "qkv_dtype":
                yield f"{field.name} {got}: the kernel is written for {want}"

    def explain(self) -> list[str]:
        """Its numbers; `SparseKernel.explain` has the arithmetic."""
        block = f"{self.padded_num_q_heads} heads x {self.B_TOPK} keys"
        return [f"{block}, {self.num_mbars} steps in flight"]


_LIKE = Problem(form="sparse", heads=CTA_HEADS, d_nope=512, d_rope=64, d_v=512, topk=1)


def following(original: MLAPrefillSparse) -> SparseConfig:
    """The kernel's numbers, taken from a plan of the original."""
    return SparseConfig(**{f.name: getattr(original, f.name) for f in fields(SparseConfig)})


def with_widths(
    config: SparseConfig, qk_depth: int, v_depth: int, smem: int, tmem: int
) -> SparseConfig:
    """A config for rows of other columns."""
    return replace(config, qk_depth=qk_depth, v_depth=v_depth, q_smem_depth=smem, q_tmem_depth=tmem)


def sparse_config(problem: Problem, target: Target | None = None) -> SparseConfig:
    """The plan of one CTA."""
    rows = problem.d_qk, problem.d_v
    if rows not in Q_COLUMNS:
        raise Unsupported(f"rows of {rows[0]} with {rows[1]} of V: {sorted(Q_COLUMNS)} are served")
    return with_widths(following(original_block(problem)), *rows, *Q_COLUMNS[rows])


@dataclass(frozen=True)
class SparseKernel(Partitioned):
    """The sparse kernel of one plan.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="sparse", heads=64, d_nope=512, d_rope=64, d_v=512, topk=64), "b200")
    >>> kernel = SparseKernel(p.config, p.problem)
    >>> kernel.arguments, kernel.block.memory.used
    (388, 172680)
    """

    config: SparseConfig
    problem: Problem

    workers: ClassVar[tuple[Worker, ...]] = WORKERS

    @property
    def registers(self) -> tuple[int, ...]:
        """Registers of a thread of each worker."""
        return tuple(worker.registers for worker in self.workers)

    @property
    def dequantizes(self) -> bool:
        return self.problem.kv_dtype not in ("bf16", "fp16")

    @property
    def raw_columns(self) -> int:
        """Columns of a row that are dequantized: all but those of bf16."""
        if not self.dequantizes:
            return 0
        return layout_of(self.problem).quantized or self.config.qk_depth

    @property
    def q_split(self) -> tuple[int, int]:
        """Columns of Q in shared memory and in tensor memory."""
        return self.config.q_smem_depth, self.config.q_tmem_depth

    @property
    def scale_blocks(self) -> tuple[int, int]:
        """Scales of a key of K and of V; 0 where there are none."""
        layout = layout_of(self.problem)
        of_v = min(layout.latent, layout.quantized)
        return layout.blocks, ceildiv(of_v, layout.block) if layout.block else 0

    def tiles(self) -> Iterator[Wanted]:
        config, keys = self.config, self.config.B_TOPK
        rows = config.padded_num_q_heads
        yield Wanted("Q", "q", rows * self.q_split[0] * ELEMENT)
        # Q's last columns, before they are copied.
        yield Wanted("Q, then K", "k", keys * config.qk_depth * ELEMENT)
        yield Wanted("Q, then V, then O", "v", keys * config.v_depth * ELEMENT)
        yield Wanted("P", "p", rows * keys * ELEMENT)
        yield Wanted("raw K", "k", keys * self.raw_columns)
        yield Wanted("is_k_valid", "stats", config.num_mbars * keys // 8)
        for name, blocks in zip(("K", "V"), self.scale_blocks, strict=True):
            yield Wanted(f"scales of {name}", "stats", blocks * keys * FP32)

    def barriers(self) -> dict[str, int]:
        """How many of each kind; see the table of kernels/blackwell/sparse/kernel.py."""
        kinds = ["k_p0_ready", "qk_ss_done", "v_p0_ready", "v_p1_ready", "sv_p0_done", "sv_p1_done"]
        kinds += ["p_free", "so_ready", "k_valid_ready", "k_valid_free", "k_p1_ready", "qk_ts_done"]
        if self.dequantizes:
            kinds += ["k_fp8_tma_done", "v_fp8_tma_done"]
            kinds += ["k_plain_done"] if self.raw_columns < self.config.qk_depth else []
        return {"q_ready": 1, "q_copied": 1} | dict.fromkeys(kinds, self.config.num_mbars)

    @property
    def arguments(self) -> int:
        """Bytes of what the workers are called with, if pages follow one another evenly."""
        scaled = self.scale_blocks[0] > 0
        plain = scaled and layout_of(self.problem).field("bf16") is not None
        # Q, K, V, the line of the list; Q again, for one warp at a time; tensor memory.
        pointers = 4 + 1 + 1 + scaled + plain
        arrays = 2 + 2 * scaled + len(self.barriers())  # P, is_k_valid, scales
        # Keys of the list, rows, their step; steps, token, first head; the step of scales.
        tiles = 3 + self.dequantizes
        integers = 6 + scaled
        if self.problem.second is not None:
            # Its rows twice, its list and scales; its steps, keys and rows, and where spans begin.
            pointers += 4
            integers += 5 + self.problem.span + self.problem.second.span
        return argument_bytes(tiles=tiles, arrays=arrays, pointers=pointers, integers=integers)

    @cached_property
    def block(self) -> Block:
        config = self.config
        rows, keys = config.padded_num_q_heads, config.B_TOPK
        return Block(
            tile_rows=rows,
            tile_keys=keys,
            stages=config.num_mbars,
            threads=self.threads,
            registers=self.block_registers,
            memory=self.memory(),
            tensor_memory=allocated(self._columns()),
            pipeline=Pipeline(
                groups=1,
                rows=rows,
                keys=keys,
                d_qk=config.qk_depth,
                d_v=config.v_depth,
                element=config.qkv_dtype_size,
                k_slots=config.num_mbars,
                v_slots=0,
            ),
        )

    def _columns(self) -> tuple[Columns, ...]:
        config, atom = self.config, self.config.O_ATOM_PHYS_COLS
        outputs = Columns("O left", 0, atom), Columns("O right", atom, atom)
        scores = Columns("scores", config.P_TMEM_ADDR, config.B_TOPK // 2)
        q = config.Q_TMEM_ADDR
        return (*outputs, scores, Columns("Q", q, config.q_tmem_depth // 2))

    def explain(self) -> list[str]:
        """The original's arithmetic, and what Triton makes of the kernel that follows it."""
        compiled = self.compiled_lines(self._differences(), (RESCALE_THRESHOLD, 0.0))
        return [*original_block(self.problem).explain(), *compiled]

    def _differences(self) -> Iterator[str]:
        """Where the kernel is not the original's, and why."""
        config = self.config
        scores = config.padded_num_q_heads * config.B_TOPK
        yield f"weights leave registers in 16 bits: no fp32 P, {scores * FP32} bytes"
        yield "row statistics stay in registers, and Triton passes arguments through shared memory"
        if self.problem.q_dtype == "e4m3":
            yield "queries come as bf16, which a pass before makes of e4m3"
        if self.dequantizes:
            yield f"raw rows of K have {config.B_TOPK * self.raw_columns} bytes of their own"
        if config.qk_depth != LATENT_ROW:
            rope = config.qk_depth - config.v_depth
            yield f"rows of {config.v_depth} + {rope} columns: the original's have {LATENT_V} + 64"
        if self.problem.heads > config.padded_num_q_heads:
            why = "over FP8 rows without a workspace, or " if self.dequantizes else ""
            yield f"{self.problem.heads} heads are two CTAs: no pair {why}before Triton 3.8"
