"""What the sparse Blackwell kernel takes of an SM, and what it is compiled with, from its plan.

MLASparseConfig decides heads, keys per step, steps in flight and where Q lies, as in the original.
The kernel is written in Gluon, so some of its bytes are others; `SparseKernel.explain` says which.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from openmla.formats import BF16, FORMATS, RowLayout
from openmla.planning.arithmetic import ceildiv
from openmla.planning.blackwell.partitions import (
    Partitioned,
    Worker,
    allocated,
    argument_bytes,
)
from openmla.planning.blackwell.sparse.prefill import P_TMEM_ADDR, MLAPrefillSparse
from openmla.planning.blackwell.units import TMEM_COLS
from openmla.planning.family import Block, Pipeline
from openmla.planning.memory import Columns, Wanted
from openmla.problem import Problem

FP32 = 4
ELEMENT = 2
# log2 units that a row's maximum may grow before O is rescaled: O is 64 x 512 values.
RESCALE_THRESHOLD = 6.0
WORKERS = (
    Worker("load_k", 4, 96),
    Worker("load_v", 4, 96),
    Worker("mma", 1, 48),
    Worker("kv_valid_producer", 1, 48),
)


def layout_of(problem: Problem) -> RowLayout:
    """Where a row's columns and scales lie; plain e4m3 rows have no scales, as bf16 ones."""
    return FORMATS.get(problem.kv_dtype, BF16).layout(problem.d_nope, problem.d_rope)


@dataclass(frozen=True)
class SparseKernel(Partitioned):
    """The sparse kernel of one plan.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="sparse", heads=64, d_nope=512, d_rope=64, d_v=512, topk=64), "b200")
    >>> kernel = SparseKernel(p.config, p.problem)
    >>> kernel.arguments, kernel.block.memory.used
    (388, 172680)
    """

    config: MLAPrefillSparse
    problem: Problem

    workers = cached_property[tuple[Worker, ...]](lambda k: WORKERS)
    registers = cached_property[tuple[int, ...]](lambda k: tuple(w.registers for w in k.workers))
    dequantizes = cached_property[bool](lambda k: k.problem.kv_dtype not in ("bf16", "fp16"))
    # Columns of a row that are dequantized: all but those of bf16.
    raw_columns = cached_property[int](
        lambda k: (layout_of(k.problem).quantized or k.config.qk_depth) if k.dequantizes else 0
    )
    # Columns of Q in shared memory and in tensor memory.
    q_split = cached_property[tuple[int, int]](
        lambda k: (k.config.q_smem_depth, k.config.q_tmem_depth)
    )

    @property
    def scale_blocks(self) -> tuple[int, int]:
        """Scales of a key of K and of V; 0 where there are none."""
        layout = layout_of(self.problem)
        return layout.blocks, ceildiv(layout.latent, layout.block) if layout.block else 0

    def tiles(self) -> Iterator[Wanted]:
        config, keys = self.config, self.config.B_TOPK
        rows = config.PADDED_HEADS_PER_CTA
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
            kinds += ["k_rope_done"] if self.raw_columns < self.config.qk_depth else []
        return {"q_ready": 1, "q_copied": 1} | dict.fromkeys(kinds, self.config.num_mbars)

    @property
    def arguments(self) -> int:
        """Bytes of what the workers are called with, if pages follow one another evenly."""
        scaled = self.scale_blocks[0] > 0
        rope_alone = scaled and layout_of(self.problem).field("bf16") is not None
        # Q, K, V, the line of the list; Q again, for one warp at a time; tensor memory.
        pointers = 4 + 1 + 1 + scaled + rope_alone
        arrays = 2 + 2 * scaled + len(self.barriers())  # P, is_k_valid, scales
        # Keys of the list, rows, their step; steps, token, first head; the step of scales.
        tiles = 3 + self.dequantizes
        return argument_bytes(tiles=tiles, arrays=arrays, pointers=pointers, integers=6 + scaled)

    @cached_property
    def block(self) -> Block:
        config = self.config
        rows, keys = config.PADDED_HEADS_PER_CTA, config.B_TOPK
        widths = config.qk_depth, config.v_depth, config.qkv_dtype_size
        return Block(
            tile_rows=rows, tile_keys=keys, stages=config.num_mbars, threads=self.threads,
            registers=self.block_registers, memory=self.memory(),
            tensor_memory=allocated(self._columns()),
            pipeline=Pipeline(1, rows, keys, *widths, config.num_mbars, 0),
        )  # fmt: skip

    def _columns(self) -> tuple[Columns, ...]:
        config, atom = self.config, self.config.O_ATOM_PHYS_COLS
        outputs = Columns("O left", 0, atom), Columns("O right", atom, atom)
        scores, q = Columns("scores", P_TMEM_ADDR, config.score_cols), config.Q_TMEM_ADDR
        return (*outputs, scores, Columns("Q", q, TMEM_COLS - q))

    def explain(self) -> list[str]:
        """The plan's arithmetic, and what Triton makes of it."""
        compiled = self.compiled_lines(self._differences(), (RESCALE_THRESHOLD, 0.0))
        return [*self.config.explain(), *compiled]

    def _differences(self) -> Iterator[str]:
        """Where the kernel's bytes are not those of the plan, and why."""
        smem = self.config.smem
        yield f"weights leave registers in 16 bits: no fp32 P, {smem.S_SIZE * FP32} bytes"
        yield "row statistics stay in registers, and Triton passes arguments through shared memory"
        if self.dequantizes:
            yield f"raw rows of K have {self.config.B_TOPK * self.raw_columns} bytes of their own"
        if self.problem.heads > self.config.padded_num_q_heads:
            why = "over FP8 rows without a workspace, or " if self.dequantizes else ""
            yield f"{self.problem.heads} heads are two CTAs: no pair {why}before Triton 3.8"
