"""What runs where: every feature on every target, found by really planning it.

>>> is_implemented("hopper", "latent"), is_implemented("blackwell", "latent")
(True, False)

`openmla doctor --table` prints the table of the README.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from openmla.errors import Unsupported
from openmla.plan import Plan, plan
from openmla.plan.target import TARGETS, Target, target_by_name
from openmla.problem import FORMS, Problem

# Kernel families whose kernels exist, by form. Nothing else may be launched: dispatch asks here.
IMPLEMENTED = frozenset(
    {(family, form) for family in ("reference", "cpu", "portable") for form in FORMS}
    | {(family, form) for family in ("blackwell", "cdna4") for form in ("dense", "sparse")}
    | {("hopper", form) for form in FORMS}
)
# Plans of those families that still have no kernel, by the class of their config.
WITHOUT_KERNEL = frozenset({"FA4Config", "MLAPrefillSparseQKVFP8"})

TABLE_TARGETS = ("cpu", "h200", "b200", "mi355x", "mi300x", "a100", "l40s", "rtx5090")
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"

_DENSE = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096
)
_GLM5 = replace(_DENSE, heads=64, d_nope=192, d_v=256)
_DENSE_FP8 = replace(_DENSE, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3", rope_dtype="e4m3")
_LATENT = replace(_DENSE, form="latent", d_nope=512, d_v=512, page_size=64)
_SPARSE = replace(_LATENT, form="sparse", topk=2048)
FEATURES = {
    "dense 128+64 → 128, bf16": _DENSE,
    "dense 128+64 → 128, rope from a paged cache": replace(_DENSE, rope="cache", page_size=64),
    "dense 128+64 → 128, fp8": _DENSE_FP8,
    "dense 192+64 → 256, bf16 (GLM-5)": _GLM5,
    "dense 64+64 → 128, bf16": replace(_DENSE, d_nope=64),
    "dense 64+32 → 64, bf16 (MiniCPM3)": replace(_DENSE, heads=40, d_nope=64, d_rope=32, d_v=64),
    "dense 128+0 → 128, bf16": replace(_DENSE, d_rope=0, rope="none"),
    "dense 256+0 → 256, bf16": replace(_DENSE, d_nope=256, d_rope=0, d_v=256, rope="none"),
    "latent 512+64, bf16 pages": _LATENT,
    "latent 512+64, fp8 pages": replace(_LATENT, kv_dtype="fp8_block128"),
    "latent 256+64, bf16 pages": replace(_LATENT, d_nope=256, d_v=256),
    "sparse 512+64, 128 heads, bf16": _SPARSE,
    "sparse 512+64, 16 heads, bf16": replace(_SPARSE, heads=16),
    "sparse 512+64, 20 heads, bf16": replace(_SPARSE, heads=20),
    "sparse 512+64, fp8_656 cache": replace(_SPARSE, kv_dtype="fp8_656"),
    "sparse 512+64, fp8_block64 cache": replace(_SPARSE, kv_dtype="fp8_block64"),
    "sparse 512+64, fp8 throughout": replace(
        _SPARSE, q_dtype="e4m3", kv_dtype="e4m3", rope_dtype="e4m3", v_dtype="e4m3"
    ),
    "sparse 512+0, bf16": replace(_SPARSE, d_rope=0, rope="none"),
}


@dataclass(frozen=True, slots=True)
class Support:
    """One cell: the family that is planned, the one that runs today, or the reason for none."""

    family: str
    runs: str
    reason: str

    def __str__(self) -> str:
        if not self.family:
            return "–"
        if self.family == self.runs:
            return f"**{self.runs}**"
        return f"**{self.runs}**, {self.family} planned" if self.runs else f"{self.family} planned"


def is_implemented(family: str, form: str) -> bool:
    """Whether the family has a kernel for the form today."""
    return (family, form) in IMPLEMENTED


def on_request(chosen: Plan) -> str:
    """Why the kernel of a plan runs only when its backend is named; empty when it need not be.

    The portable kernel splits the keys of a chunk that is too short to fill the GPU; Hopper's does
    not. Otherwise Hopper's is 1.8 to 1.9 times as fast on an H200, over FP8 pages too if their rows
    are widened once.
    """
    if (chosen.backend, chosen.problem.form) != ("hopper", "latent"):
        return ""
    if chosen.config.cache_read.mode == "in_kernel":
        return "it would widen rows of FP8 pages at every visit, which has not been timed on a GPU"
    tiles, programs = chosen.config.tiles(chosen.problem.total_q), chosen.config.sm_count
    if tiles >= programs:
        return ""
    return f"its {tiles} tiles do not fill {programs} SMs, and it does not split keys"


def has_kernel(chosen: Plan) -> bool:
    """Whether the kernel of a plan exists today and runs without being asked for."""
    known = is_implemented(chosen.backend, chosen.problem.form)
    return known and type(chosen.config).__name__ not in WITHOUT_KERNEL and not on_request(chosen)


@lru_cache(maxsize=4096)
def runnable_plan(problem: Problem, target: Target, backend: str = "auto") -> Plan:
    """The first plan, in the planner's order, whose kernel exists. An explicit backend stays."""
    chosen = plan(problem, target, backend)
    reason = on_request(chosen)
    if chosen.runs_today or (reason and backend != "auto"):
        return chosen
    if backend == "auto":
        why = (
            f"runs when named, {reason}" if reason else "planned, its kernel is not implemented yet"
        )
        missing = f"{chosen.backend}: {why}"
        for family in target.families:
            if family == chosen.backend or not is_implemented(family, problem.form):
                continue
            other = plan(problem, target, family)
            if other.runs_today:
                return replace(other, passed_over=(*chosen.passed_over, missing))
    raise Unsupported(
        f"{chosen.backend} is planned for {target.name}, but its {problem.form} kernel is not "
        "implemented yet",
        nearest="the same call on CPU tensors",
    )


def support_of(problem: Problem, target: str) -> Support:
    """What serves a problem on a target, by asking the planner."""
    try:
        chosen = plan(problem, target)
    except Unsupported as error:
        return Support("", "", error.reason)
    try:
        runs = runnable_plan(problem, target_by_name(target)).backend
    except Unsupported:
        runs = ""
    return Support(chosen.backend, runs, "; ".join(chosen.passed_over))


def support_table() -> dict[str, dict[str, Support]]:
    """Feature -> target -> what serves it."""
    return {
        feature: {target: support_of(problem, target) for target in TABLE_TARGETS}
        for feature, problem in FEATURES.items()
    }


def support_table_markdown() -> str:
    """The README's table, between its markers."""
    table = support_table()
    arch = [TARGETS[name].arch for name in TABLE_TARGETS]
    heads = [n if n == a else f"{n} ({a})" for n, a in zip(TABLE_TARGETS, arch, strict=True)]
    lines = [
        BEGIN,
        "**Bold** runs today. Planned: `openmla.plan` has worked out tiles, memory and pipeline,"
        " but the kernel is not in this version, or runs only when its backend is named. Printed by"
        " `openmla doctor --table`.",
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


def readme_has_table(readme: str) -> bool:
    """Whether a README's text holds the table as it would be generated now."""
    return support_table_markdown() in readme
