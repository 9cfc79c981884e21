"""The portable family's plans of the indexer: plain Triton for any CUDA or ROCm GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from openmla.indexer.problem import KEY_DTYPES, IndexProblem
from openmla.kernels.gluon.select.plan import selection
from openmla.kernels.portable.plan import require_bf16_products
from openmla.planning.family import Kernel
from openmla.planning.serves import (
    MOST_PAGE_ROWS,
    YES_OR_NO,
    OneOf,
    Range,
    index_scores,
    index_selection,
)
from openmla.planning.target import Target
from openmla.problem import MAX_HEADS

GLUON_SELECT = "select_gluon"
"""The selection that Hopper, Blackwell and CDNA4 share; it needs cp.async and nothing newer."""
CP_ASYNC = ("sm_80", "sm_86", "sm_89", "sm_120")
"""Chips without a family of their own that it was compiled for and executed as."""
COLUMNS = 128
"""Heads of all queries of a product: wider tiles spill, narrower ones read keys more often."""
LEAST_HEADS = 16  # the narrowest operand of tl.dot
FP4_KEYS = 32
"""Keys of a step over FP4 rows where products are not wgmma's, which need 64: more spill."""


@dataclass(frozen=True, slots=True)
class PortableScoresConfig:
    """Tile of one program: `queries` x `heads` (padded) columns, BN keys a step."""

    heads: int
    queries: int
    native_products: bool
    """e4m3 products by the tensor cores; elsewhere, and over FP4 keys, keys and queries are widened
    to bf16."""
    chunk: int = 2048
    """Keys of one program: 128 queries over 1M keys are 32768 programs."""
    BN: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def why_unsupported(self) -> str:
        """Every tile of this kind compiles."""
        return ""

    def explain(self) -> list[str]:
        """What the numbers mean."""
        kind = "e4m3" if self.native_products else "bf16 (widened)"
        return [
            f"{kind} products of {self.BN} keys with {self.queries} x {self.heads} heads, "
            f"{self.num_warps} warps, {self.num_stages} stages",
            f"a program has {self.queries} queries and {self.chunk} keys",
        ]


@dataclass(frozen=True, slots=True)
class PortableSelectConfig:
    """One program per row; `block` scores at a time."""

    block: int = 2048
    num_warps: int = 8

    def why_unsupported(self) -> str:
        """Every config runs."""
        return ""

    def explain(self) -> list[str]:
        """What the numbers mean."""
        return [f"a row is read 5 times, {self.block} scores at a time, by {self.num_warps} warps"]


def _scores(problem: IndexProblem, target: Target) -> PortableScoresConfig:
    require_bf16_products(target)
    heads = max(LEAST_HEADS, 1 << (problem.heads - 1).bit_length())
    native = target.vendor == "nvidia" and target.has_e4m3 and problem.key_dtype == "e4m3"
    config = PortableScoresConfig(heads, max(COLUMNS // heads, 1), native)
    if problem.key_dtype == "e2m1" and target.arch != "sm_90":
        return replace(config, BN=FP4_KEYS)
    return config


def _select(problem: IndexProblem, target: Target) -> PortableSelectConfig:
    return PortableSelectConfig()


INDEX_KERNELS = (
    Kernel(
        name="scores",
        serves=index_scores(
            Range(1, MAX_HEADS),
            Range(0, MOST_PAGE_ROWS),
            YES_OR_NO,
            key_dtype=OneOf(*KEY_DTYPES),
        ),
        config=PortableScoresConfig,
        choose=_scores,
        launcher="openmla.kernels.portable.indexer.launch",
    ),
    selection(name=GLUON_SELECT, archs=CP_ASYNC),
    Kernel(
        name="select",
        serves=index_selection("keeps", aligned_16=YES_OR_NO),
        config=PortableSelectConfig,
        choose=_select,
        launcher="openmla.kernels.portable.indexer.launch",
    ),
)
