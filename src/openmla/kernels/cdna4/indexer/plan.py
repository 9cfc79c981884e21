"""CDNA4's plans of the indexer: scores by a kernel for gfx950, and the selection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from openmla.arithmetic import Limited
from openmla.indexer.problem import IndexProblem
from openmla.kernels.cdna4.chip import FIRST_TRITON
from openmla.kernels.gluon.select.plan import GluonSelectConfig, select_config, selection
from openmla.modular.cdna4.layout.dma import WAVE
from openmla.planning.family import Kernel
from openmla.planning.serves import OneOf, Range, index_scores
from openmla.planning.target import Target

COLUMNS = 128
"""Heads of all queries of a block: with their weights they take 128 registers of each lane."""
PAGES = Range(0, 1024, 4)  # rows: a page's begin at multiples of 16 bytes


@dataclass(frozen=True)
class Cdna4ScoresConfig(Limited):
    """Four waves with 128 / heads queries and 32 keys each at a time: see kernels' scores.py."""

    heads: int
    page_size: int
    warps: int = 4
    chunk: int = 2048
    """Keys of a block: queries are loaded once for all of them."""

    @cached_property
    def queries(self) -> int:
        return COLUMNS // self.heads

    def _broken_limits(self) -> Iterator[str]:
        yield from ()

    def explain(self) -> list[str]:
        """What the numbers mean."""
        return [
            f"{self.warps} waves, {self.queries} queries x {self.heads} heads in registers",
            f"blocks of {self.queries} queries x {self.chunk} keys, 128 at a time",
        ]


def _scores(problem: IndexProblem, target: Target) -> Cdna4ScoresConfig:
    return Cdna4ScoresConfig(problem.heads, problem.page_size)


def _selection(problem: IndexProblem, target: Target) -> GluonSelectConfig:
    """NVIDIA's config with twice the lanes and half of the vectors in each. With fewer
    registers the kernel spills."""
    config = select_config(problem, target)
    return replace(
        config,
        lanes=WAVE,
        chunk_vectors=config.chunk_vectors // 2,
        list_vectors=config.list_vectors // 2,
        loads_to_lds=True,
        max_registers=168 if config.long_rows else 128,
    )


INDEX_KERNELS = (
    Kernel(
        name="scores",
        serves=index_scores(OneOf(32, 64, 128), PAGES),
        config=Cdna4ScoresConfig,
        choose=_scores,
        launcher="openmla.kernels.cdna4.indexer.launch",
        first_triton=FIRST_TRITON,
    ),
    selection(_selection, FIRST_TRITON),
)
