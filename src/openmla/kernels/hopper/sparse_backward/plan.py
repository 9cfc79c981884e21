"""HopperSparseBackwardConfig: gradients of the sparse form on Hopper.

    statistics    what weights are relative to, and delta, of every query and head
    entry pass    a block has 64 heads of a query and walks its list: d_q, and what every entry
                  gives to its row
    row sum       a warp has a row and adds its entries, in the order of queries

Five products, no recomputation: an entry's part is complete in one step of the walk, because the
products sum over the heads of the block. No atomics: parts wait in a workspace of bounded size, and
every row adds its own, so bits are the same every time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from openmla.arithmetic import ceildiv, require_int, verdict_lines
from openmla.backward.problem import ONE_DELTA, SPARSE_BACKWARD_FORM, BackwardProblem
from openmla.kernels.hopper.chip import (
    FP32,
    WGMMA_M,
    HopperBlock,
    Registers,
    accumulator_registers,
    barriers,
    launch_tail,
    register_reasons,
    smem_reasons,
)
from openmla.planning.family import Block, Kernel
from openmla.planning.memory import Wanted
from openmla.planning.serves import (
    ALIGNED,
    ANY,
    DTYPES,
    LENGTHS,
    OneOf,
    Range,
    Serves,
    alike,
    either,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

ELEMENT = 2
ENTRIES = 64  # of a step
OWN = ENTRIES // 2  # entries whose scores a warp-group computes
CHUNK = 64  # columns of a part that are in registers at a time
CONSUMERS = 2
# What the partitions are handed through shared memory, and a TMA descriptor of it (Triton 3.7).
ARGUMENTS, DESCRIPTOR = 312, 48
PART_CAP = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HopperSparseBackwardVariant:
    """The launches of a backward pass."""

    tokens: int
    """Queries whose entries share the workspace; 0 where there is nothing to compute."""


@dataclass(frozen=True, kw_only=True)
class HopperSparseBackwardConfig(HopperBlock):
    """A block of the entry pass."""

    heads: int
    latent: int
    rope: int
    part_cap: int = PART_CAP
    """Bytes of what entries give to rows, of one launch. With half of it, sorts of more launches
    make the whole 1.2 times as slow (H200, 2026-11-18)."""
    consumer_registers: int = 232
    producer_registers: int = 40
    """With 224 + 56 and 216 + 72 registers the entry pass is 1 % and 3 % slower (H200, 2026-11-18:
    benchmarks/device/sparse_backward_h200.py)."""
    sm_count: int = 132

    def __post_init__(self) -> None:
        for name in ("heads", "latent", "part_cap", "sm_count"):
            require_int(name, getattr(self, name), 1)
        require_int("rope", self.rope, 0)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.latent + self.rope

    @property
    def head_blocks(self) -> int:
        """Blocks of 64 heads of a query."""
        return ceildiv(self.heads, WGMMA_M)

    @cached_property
    def registers(self) -> Registers:
        return Registers(CONSUMERS, self.consumer_registers, self.producer_registers)

    @property
    def accumulators(self) -> int:
        """Registers of a warp-group: d_q of half of the columns, and scores and dP, or a chunk of a
        part."""
        d_q = accumulator_registers(self.width // 2)
        return d_q + max(2 * accumulator_registers(OWN), accumulator_registers(CHUNK))

    def _buffers(self) -> Iterator[Wanted]:
        rows = {"k": self.width, "q": self.width, "d_out": self.latent}
        for name, columns in rows.items():
            yield Wanted(name, name, WGMMA_M * columns * ELEMENT)
        for name in ("p", "d_s"):
            yield Wanted(name, "scores", WGMMA_M * ENTRIES * ELEMENT)
        yield Wanted("bias", "scores", ENTRIES * FP32)
        yield from barriers(("q_ready", 1), ("k_ready", 2), ("k_empty", 2), ("valid_ready", 1))
        yield Wanted("arguments", "scratch", ARGUMENTS + DESCRIPTOR * bool(self.rope))
        yield from launch_tail(self.registers, 0)

    # Launches and their workspaces.

    def bytes_of(self, problem: BackwardProblem) -> int:
        """Bytes of the parts of one query."""
        return problem.topk * self.head_blocks * self.width * ELEMENT

    def variant(self, problem: BackwardProblem) -> HopperSparseBackwardVariant:
        """The launches that a problem takes: the only place that decides.

        Where the workspace holds only some queries, they are as many as keep all SMs busy to the
        end, or nearly: whole waves, and launches of nearly equal size.
        """
        each = self.bytes_of(problem)
        if not each or not problem.total_q or not problem.total_k:
            return HopperSparseBackwardVariant(tokens=0)
        most = max(1, self.part_cap // each)
        if most >= problem.total_q:
            return HopperSparseBackwardVariant(tokens=problem.total_q)
        waves = most * self.head_blocks // self.sm_count
        if waves:
            most = waves * self.sm_count // self.head_blocks
        return HopperSparseBackwardVariant(
            tokens=ceildiv(problem.total_q, ceildiv(problem.total_q, most))
        )

    def workspace(self, problem: BackwardProblem) -> int:
        """Bytes besides the gradients: parts, the sums so far, statistics, and which entries name
        a row (the lists, sorted, and the numbers of their entries)."""
        tokens = self.variant(problem).tokens
        listed = tokens * problem.topk
        order = listed * (4 + 4 + 8) + (problem.total_k + 1) * 8
        sums = problem.total_k * self.width * FP32 if tokens < problem.total_q else 0
        return (
            tokens * self.bytes_of(problem) + sums + order + 2 * FP32 * problem.total_q * self.heads
        )

    # Verdict and words.

    def _broken_limits(self) -> Iterator[str]:
        yield from register_reasons(self.registers, self.accumulators, "d_q, scores and dP")
        yield from smem_reasons(self.smem_used, "Q, d_out, rows and scores")

    def explain(self) -> list[str]:
        """How each number came about."""
        lines = [
            f"entry pass: 64 heads of a query, {ENTRIES} entries a step, {self.accumulators} "
            f"accumulator registers of {self.registers.consumer}, {self.smem_used} bytes of shared "
            "memory",
            f"row sum: {self.head_blocks} parts an entry, in the order of queries; no atomics",
        ]
        return lines + verdict_lines(self.why_unsupported())


def _lines(config: HopperSparseBackwardConfig, problem: BackwardProblem) -> list[str]:
    tokens = config.variant(problem).tokens
    return [
        *config.explain(),
        f"{tokens} queries a launch; workspace: {config.workspace(problem)} bytes",
    ]


def _block(config: HopperSparseBackwardConfig, problem: BackwardProblem) -> Block:
    return Block(
        tile_rows=WGMMA_M,
        tile_keys=ENTRIES,
        stages=1,
        threads=config.registers.threads,
        memory=config.smem_map,
        registers=config.registers.most,
    )


def _choose(problem: Any, target: Target) -> HopperSparseBackwardConfig:
    return HopperSparseBackwardConfig(
        heads=problem.heads,
        latent=problem.d_nope,
        rope=problem.d_rope,
        sm_count=target.sm_count,
    )


SERVED = Serves(
    {
        "form": OneOf(SPARSE_BACKWARD_FORM),
        DTYPES: OneOf(*alike("bf16")),
        "heads": Range(1, MAX_HEADS),
        ("d_nope", "d_v"): OneOf((128, 128), (256, 256), (512, 512)),
        "d_rope": OneOf(0, 64),
        "rope": OneOf("none", "shared"),
        "topk": ANY,
        **LENGTHS,
        **either("causal", "has_topk_lengths", "has_sink", "wants_lse", "has_d_lse"),
        "aligned_16": ALIGNED,
    },
    (ONE_DELTA,),
)


TIMED_HEADS = 64


def _not_timed(config: HopperSparseBackwardConfig, problem: BackwardProblem) -> str:
    """Other widths and fewer heads, which leave rows of a block empty, were right on an H200; but
    nobody knows whether the portable kernels are faster."""
    timed = (config.latent, config.rope) == (512, 64) and config.heads >= TIMED_HEADS
    return "" if timed else "because with these widths or so few heads it was not timed yet"


HOPPER_SPARSE_BACKWARD = Kernel(
    name="sparse_backward",
    serves=SERVED,
    config=HopperSparseBackwardConfig,
    choose=_choose,
    variant=HopperSparseBackwardConfig.variant,
    block=_block,
    explain=_lines,
    slower=_not_timed,
    launcher="openmla.kernels.hopper.sparse_backward.launch",
)
