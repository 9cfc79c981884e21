"""Tables of docs/training.md: speed of the sparse backward and of selections in both forms, from
result files, and the portable kernels' tiles, from their plans."""

from __future__ import annotations

from dataclasses import replace

from results import newest

from openmla import Problem, plan
from openmla.backward.problem import BackwardProblem
from openmla.indexer.loss_problem import LossProblem
from openmla.kernels.portable.backward.jobs import CHIPS
from openmla.planning import target_by_name
from openmla.planning.problems import AnyProblem

STAGES = {
    "statistics": "statistics",
    "entry_pass": "entry pass",
    "sort": "sort",
    "row_sum": "row sum",
}


def sparse_backward() -> str:
    """The plan's own numbers for both head counts, and those of the portable kernels."""
    found = newest("sparse-backward-h200", "times")
    plain = {row["shape"]: row for row in newest("sparse-backward-h200", "portable").rows}
    heads = " | ".join(f"{name}, ms" for name in STAGES.values())
    lines = [f"| heads | ms | TFLOP/s | {heads} | workspace, MB | portable, TFLOP/s |"]
    lines.append("|---" * (5 + len(STAGES)) + "|")
    for row in found.rows:
        if row["variant"] != "plan":
            continue
        stages = " | ".join(f"{row['stages_ms'][name]:.2f}" for name in STAGES)
        cells = f"{row['shape'][1:]} | {row['ms']:.1f} | {row['tflops']} | {stages}"
        lines.append(f"| {cells} | {row['workspace_mb']} | {plain[row['shape']]['tflops']} |")
    return "\n".join([*lines, "", found.source])


def selection_backward() -> str:
    """The dense form with a mask beside that without one, the portable kernels and lists."""
    found = newest("selection-backward-h200", "times")
    others = {"no mask": "no mask", "lists": "lists", "portable mask": "portable"}
    lines = ["| tokens | heads | `key_mask`, ms | " + " | ".join(others.values()) + " |"]
    lines.append("|---" * (3 + len(others)) + "|")
    for row in found.rows:
        tokens, heads = row["shape"].split(" h")
        over = (row["over"].get(name) for name in others)
        cells = " | ".join("" if ratio is None else f"{ratio:.2f}" for ratio in over)
        lines.append(f"| {tokens} | {heads} | {row['ms']['mask']:.1f} | {cells} |")
    told = "Times of the others over that with the mask: above 1 they are slower."
    return "\n".join([*lines, "", told, found.source])


V3 = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
LISTS = replace(V3, form="sparse", d_nope=512, d_v=512, topk=2048, causal=False)
CALLS: dict[str, AnyProblem] = {
    "dense 128 + 64 → 128": BackwardProblem.of(V3),
    "dense 192 + 64 → 256": BackwardProblem.of(replace(V3, d_nope=192, d_v=256)),
    "sparse 512 + 64": BackwardProblem.of(LISTS),
    "indexer's loss": LossProblem.of(V3, index_heads=64, index_dim=128, wants_gradients=True),
}


def portable_tiles() -> str:
    """For each chip that they are compiled for: the tile of a pass, and the bytes of a program."""
    lines = ["| | shared memory, B | " + " | ".join(CALLS) + " |", "|---" * (2 + len(CALLS)) + "|"]
    for chip in CHIPS:
        target = target_by_name(chip)
        cells = [f"{chip} ({target.arch})", f"{target.smem_per_block:,}"]
        for problem in CALLS.values():
            config = plan(problem, chip, "portable").config
            tile = f"{config.BM} x {config.BN}, {config.num_warps} warps"
            cells.append(f"{tile}: {config.smem_used:,}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def regions() -> dict[tuple[str, str], str]:
    """What stands in the page."""
    return {
        ("docs/training.md", "sparse backward"): sparse_backward(),
        ("docs/training.md", "selection backward"): selection_backward(),
        ("docs/training.md", "portable tiles"): portable_tiles(),
    }


def pictures() -> dict[str, str]:
    """None."""
    return {}
