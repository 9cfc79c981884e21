"""The indexer without a GPU: the float64 reference and the CPU kernels. They serve all."""

from __future__ import annotations

from dataclasses import dataclass

from openmla.indexer.problem import INDEX_FORMS, KEY_DTYPES, IndexProblem
from openmla.planning.family import Kernel
from openmla.planning.serves import ANY, YES_OR_NO, OneOf, Serves
from openmla.planning.target import Target

EVERY_STEP = Serves(
    {
        "form": OneOf(*INDEX_FORMS),
        "heads": ANY,  # IndexProblem itself allows 1 to 128
        "page_size": ANY,
        "topk": ANY,
        "add_starts": YES_OR_NO,
        "keeps": YES_OR_NO,
        "wants_counts": YES_OR_NO,
        "wants_mask": YES_OR_NO,
        "total_q": ANY,
        "width": ANY,
        "batch": ANY,
        "key_dtype": OneOf(*KEY_DTYPES),
        "aligned_16": YES_OR_NO,
    }
)


@dataclass(frozen=True, slots=True)
class CpuIndexConfig:
    """A block of scores: 512 keys in fp32 and the 8 x 64 x 512 products of a group are 1.3 MB."""

    block_keys: int = 512
    group_queries: int = 8
    batch_queries: int = 128
    """Queries that are widened at once: 4 MB of fp32. A multiple of the group."""

    def why_unsupported(self) -> str:
        """Every config runs."""
        return ""

    def explain(self) -> list[str]:
        """What the numbers mean."""
        return [f"scores: {self.group_queries} queries x {self.block_keys} keys at a time, in fp32"]


def _lines(config: CpuIndexConfig, problem: IndexProblem) -> list[str]:
    return config.explain() if problem.form == "scores" else ["one row at a time: a partial sort"]


def _config(problem: IndexProblem, target: Target) -> CpuIndexConfig:
    return CpuIndexConfig()


DEFINITION = Kernel(
    name="indexer",
    serves=EVERY_STEP,
    config=type(None),
    choose=lambda problem, target: None,
    launcher="openmla.indexer.reference",
    explain=lambda config, problem: ["the definition in float64, one row at a time"],
)
"""The reference's kernel of the indexer."""
CPU_INDEXER = Kernel(
    name="indexer",
    serves=EVERY_STEP,
    config=CpuIndexConfig,
    choose=_config,
    explain=_lines,
    launcher="openmla.kernels.cpu.indexer.launch",
)
