"""Speed of the sparse backward: the table of docs/training.md, from a result file."""

from __future__ import annotations

from results import newest

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


def regions() -> dict[tuple[str, str], str]:
    """What stands in the page."""
    return {("docs/training.md", "sparse backward"): sparse_backward()}


def pictures() -> dict[str, str]:
    """None."""
    return {}
