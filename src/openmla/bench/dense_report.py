"""The dense GPU benchmark as a table, as JSON with provenance, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from openmla.bench.dense import Row
from openmla.bench.provenance import gpu_provenance


def table(rows: list[Row], matmul: float) -> Table:
    """One line per shape."""
    title = f"openmla bench dense, matmul {matmul:.0f} TFLOP/s in the same run"
    result = Table(title=title, title_justify="left")
    for column in ("shape", "ms", "TFLOP/s", "cuDNN", "kernel", "layer", "bars"):
        result.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        peer = f"{row.tflops('cudnn'):.0f}" if "cudnn" in row.timings else "–"
        shape = row.shape
        bars = f"{shape.bar_kernel:.2f} / {shape.bar_layer:.2f}" if shape.bar_kernel else ""
        result.add_row(
            str(shape), f"{row.timings['openmla'].median:.3f}", f"{row.tflops('openmla'):.0f}",
            peer, _ratio(row.over("cudnn")), _ratio(row.over("cudnn layer")), bars,
        )  # fmt: skip
    return result


def write_json(path: Path, rows: list[Row], matmul: float, command: str) -> None:
    """One file per run."""
    found = {"matmul_tflops": matmul, "rows": [row.to_json() for row in rows]}
    save_record(path, {**gpu_provenance(command), **found})


def save_record(path: Path, record: dict[str, Any]) -> None:
    """As JSON, in a folder that may have to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def plot(path: Path, rows: list[Row], matmul: float) -> None:
    """Bars of TFLOP/s: openmla and cuDNN, with and without assembling K; the matmul as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"openmla": "openmla", "cudnn": "cuDNN", "cudnn layer": "cuDNN + assembling K"}
    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 1.5))
    for number, (name, label) in enumerate(names.items()):
        places = [i + 0.27 * (number - 1) for i in range(len(rows))]
        rates = [row.tflops(name) if name in row.timings else 0.0 for row in rows]
        axes.barh(places, rates, height=0.25, label=label)
    axes.axvline(matmul, color="gray", linestyle=":", label="8192³ matmul")
    axes.set_yticks(range(len(rows)), [str(row.shape) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value else "–"
