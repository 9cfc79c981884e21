"""What runs where: every feature on every target, found by really planning it.

`openmla doctor --table` prints the table of docs/support.md.
"""

from dataclasses import dataclass, replace
from typing import Any

from openmla.backward.problem import BackwardProblem
from openmla.errors import Unsupported
from openmla.indexer.loss_problem import LossProblem
from openmla.indexer.problem import IndexProblem
from openmla.planning import NEWEST_TRITON, cached_plan
from openmla.planning.evidence import MEANING, WORDS
from openmla.planning.problems import AnyProblem
from openmla.planning.target import TARGETS, target_by_name
from openmla.problem import Problem, RowSource

TABLE_TARGETS = ("cpu", "h200", "b200", "mi355x", "mi300x", "a100", "l40s", "rtx5090")
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"

_DENSE = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096
)
_GLM5 = replace(_DENSE, heads=64, d_nope=192, d_v=256)
_FP8: dict[str, Any] = dict.fromkeys(("q_dtype", "kv_dtype", "v_dtype", "rope_dtype"), "e4m3")
_DENSE_FP8 = replace(_DENSE, **_FP8)
_LATENT = replace(_DENSE, form="latent", d_nope=512, d_v=512, page_size=64)
_SPARSE = replace(_LATENT, form="sparse", topk=2048)
_V4 = replace(_SPARSE, heads=64, d_rope=0, rope="none", kv_dtype="fp8_584", has_sink=True)
_WINDOW = replace(_V4, topk=0, span=True, table_keys=4096)
_ENTRIES = RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=4096)
_SCORES = IndexProblem(form="scores", heads=64, page_size=64, total_q=4096, width=131072)
_SELECT = IndexProblem(form="select", topk=2048, total_q=4096, width=131072)
FEATURES: dict[str, AnyProblem] = {
    "dense 128+64 → 128, bf16": _DENSE,
    "dense 128+64 → 128, bf16, `key_mask`": replace(_DENSE, has_key_mask=True),
    "dense 128+64 → 128, bf16, `k_start`": replace(_DENSE, has_k_start=True),
    "dense 128+64 → 128, bf16, `window`": replace(_DENSE, window=128),
    "dense 128+64 → 128, bf16, 8 query heads for each of K and V": replace(_DENSE, group=8),
    "dense 128+64 → 128, bf16, fp32 out": replace(_DENSE, fp32_out=True),
    "dense 128+64 → 128, rope from a paged cache": replace(_DENSE, rope="cache", page_size=64),
    "dense 128+64 → 128, fp8": _DENSE_FP8,
    "dense 128+64 → 128, fp8, values bf16": replace(_DENSE_FP8, v_dtype="bf16"),
    "dense 192+64 → 256, bf16 (GLM-5)": _GLM5,
    "dense 192+64 → 256, fp8": replace(_GLM5, **_FP8),
    "dense 128+64 → 128, fp8, scales of tokens": replace(
        _DENSE_FP8, has_q_scale=True, has_k_scale=True
    ),
    "dense 64+64 → 128, bf16": replace(_DENSE, d_nope=64),
    "dense 64+32 → 64, bf16 (MiniCPM3)": replace(_DENSE, heads=40, d_nope=64, d_rope=32, d_v=64),
    "dense 128+0 → 128, bf16": replace(_DENSE, d_rope=0, rope="none"),
    "dense 128+0 → 128, fp8": replace(_DENSE_FP8, d_rope=0, rope="none"),
    "dense 256+0 → 256, bf16": replace(_DENSE, d_nope=256, d_rope=0, d_v=256, rope="none"),
    "latent 512+64, bf16 pages": _LATENT,
    "latent 512+64, bf16 pages, `window`": replace(_LATENT, window=128),
    "latent 512+64, fp8 pages": replace(_LATENT, kv_dtype="fp8_block128"),
    "latent 512+64, bf16 pages, 16 heads, tables of 32768 keys": replace(
        _LATENT, heads=16, total_k=32768, table_keys=32768
    ),
    "latent 512+64, fp8 pages, 16 heads, tables of 32768 keys": replace(
        _LATENT, heads=16, total_k=32768, table_keys=32768, kv_dtype="fp8_block128"
    ),
    "latent 512+64, fp8 queries and pages": replace(_LATENT, q_dtype="e4m3", kv_dtype="fp8_token"),
    "latent 512+64, bf16 pages, invariant": replace(_LATENT, invariant=True),
    "latent 512+0, fp8_584 pages": replace(
        _LATENT, d_rope=0, rope="none", kv_dtype="fp8_584", v_dtype="fp8_584", rope_dtype="fp8_584"
    ),
    "latent 256+64, bf16 pages": replace(_LATENT, d_nope=256, d_v=256),
    "sparse 512+64, 128 heads, bf16": _SPARSE,
    "sparse 512+64, 16 heads, bf16": replace(_SPARSE, heads=16),
    "sparse 512+64, 20 heads, bf16": replace(_SPARSE, heads=20),
    "sparse 512+64, fp8_656 cache": replace(_SPARSE, kv_dtype="fp8_656"),
    "sparse 512+64, fp8_block64 cache": replace(_SPARSE, kv_dtype="fp8_block64"),
    "sparse 512+64, nvfp4_352 cache, pools of 32768 rows": replace(
        _SPARSE, kv_dtype="nvfp4_352", total_k=32768
    ),
    "sparse 512+64, fp8 queries and cache": replace(_SPARSE, q_dtype="e4m3", kv_dtype="fp8_token"),
    "sparse 512+64, fp8 throughout": replace(_SPARSE, page_size=0, **_FP8),
    "sparse 512+0, bf16": replace(_SPARSE, d_rope=0, rope="none"),
    "window and list 512+0, fp8_584 (DeepSeek-V4)": replace(_WINDOW, second=_ENTRIES),
    "window and list 512+0, fp8_584, `turn_back`": replace(
        _WINDOW, second=_ENTRIES, turned_back=64
    ),
    "window and list 512+0, fp8_584, pools of a million rows": replace(
        _WINDOW, total_k=1 << 20, second=replace(_ENTRIES, total_k=1 << 20)
    ),
    "window and list 512+0, fp8_528_v41 and fp4_288 (DeepSeek-V4.1)": replace(
        _WINDOW, kv_dtype="fp8_528_v41", second=replace(_ENTRIES, kv_dtype="fp4_288")
    ),
    "window and list 512+0, fp8_528_v41 and fp4_288, pools of a million rows": replace(
        _WINDOW,
        kv_dtype="fp8_528_v41",
        total_k=1 << 20,
        second=replace(_ENTRIES, kv_dtype="fp4_288", total_k=1 << 20),
    ),
    "index scores, 64 heads, pages of 64": _SCORES,
    "index scores, 64 heads, contiguous keys": replace(_SCORES, page_size=0),
    "index scores, 32 heads, pages of 64, FP4 keys (DeepSeek-V4.1)": replace(
        _SCORES, heads=32, key_dtype="e2m1"
    ),
    "selection of 2048": _SELECT,
    "selection of 2048, with bits for `key_mask`": replace(_SELECT, wants_mask=True),
    "gradients of dense 128+64 → 128, bf16": BackwardProblem.of(_DENSE),
    "gradients of dense 128+64 → 128, bf16, `key_mask`": BackwardProblem.of(
        replace(_DENSE, has_key_mask=True)
    ),
    "gradients of dense 192+64 → 256, bf16 (GLM-5)": BackwardProblem.of(_GLM5),
    "gradients of sparse 512+64, plain rows, bf16": BackwardProblem.of(
        replace(_SPARSE, page_size=0)
    ),
    "loss of an indexer of 64 heads, bf16": LossProblem.of(_DENSE, index_heads=64, index_dim=128),
}
"""Rows of the support table."""


@dataclass(frozen=True, slots=True)
class Support:
    """One cell: the family that is planned, the one that calls run, or the reason for none."""

    family: str
    runs: str
    reason: str
    word: str = ""
    """How what runs is known to work there: measured, simulated or portable."""
    exists: bool = True
    """Whether the planned kernel is there; it may still run only when its backend is named."""

    def __str__(self) -> str:
        if not self.family:
            return "–"
        runs = self.word if self.runs in ("cpu", "portable") else f"{self.word} ({self.runs})"
        if self.family == self.runs:
            return runs
        other = f"{self.family} {'when named' if self.exists else 'planned'}"
        return f"{runs}; {other}" if self.runs else other


def support_of(problem: AnyProblem, target: str) -> Support:
    """What serves a problem on a target, by asking the planner."""
    asked = problem, target_by_name(target), "auto"
    try:
        chosen = cached_plan(*asked, None)
    except Unsupported as error:
        return Support("", "", error.reason)
    try:
        run = cached_plan(*asked, NEWEST_TRITON)
        runs, word = run.backend, str(run.word)
    except Unsupported:
        runs, word = "", ""
    exists = bool(chosen.kernel.launcher)
    return Support(chosen.backend, runs, "; ".join(chosen.passed_over), word, exists)


def support_table() -> dict[str, dict[str, Support]]:
    """Feature -> target -> what serves it."""
    return {
        feature: {target: support_of(problem, target) for target in TABLE_TARGETS}
        for feature, problem in FEATURES.items()
    }


def support_table_markdown() -> str:
    """The table of docs/support.md, between its markers."""
    table = support_table()
    arch = [TARGETS[name].arch for name in TABLE_TARGETS]
    heads = [n if n == a else f"{n} ({a})" for n, a in zip(TABLE_TARGETS, arch, strict=True)]
    lines = [
        BEGIN,
        *(f"- **{word}**: {MEANING[word]}." for word in WORDS),
        "- *when named*: a kernel that runs only with its `backend=`, for the reason that "
        "`openmla plan` gives.",
        "- –: no kernel; the reasons are below the table.",
        "",
        "| | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    for feature, row in table.items():
        lines.append(f"| {feature} | " + " | ".join(str(cell) for cell in row.values()) + " |")
    gaps = _gaps(table)
    if gaps:
        lines += ["", *gaps]
    return "\n".join([*lines, END])


def _gaps(table: dict[str, dict[str, Support]]) -> list[str]:
    """One line per reason for a cell without any plan."""
    where: dict[str, list[str]] = {}
    for feature, row in table.items():
        for target, cell in row.items():
            if not cell.family:
                where.setdefault(cell.reason, []).append(f"{feature} on {target}")
    return [f"- {reason}: {', '.join(places)}." for reason, places in where.items()]
