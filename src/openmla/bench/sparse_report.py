"""The sparse GPU benchmark as a table, as JSON with provenance, and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from openmla.bench.dense_report import save_record
from openmla.bench.provenance import gpu_provenance
from openmla.bench.sparse import Row


def table(rows: list[Row]) -> Table:
    """One line per shape."""
    title = "openmla bench sparse, shares of an 8192³ bf16 matmul timed in between"
    result = Table(title=title, title_justify="left")
    for column in ("shape", "ms", "TFLOP/s", "matmul", "share", "in a row", "TB/s", "bar"):
        result.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        shape = row.shape
        bar = f"{shape.bar:.2f}" if shape.bar else ""
        bar = f"{shape.bar_gather:.1f} TB/s" if shape.bar_gather else bar
        result.add_row(
            str(shape), f"{row.timings['openmla'].median:.3f}", f"{row.tflops:.0f}",
            f"{row.matmul:.0f}", f"{row.share():.3f}", f"{row.share(True):.3f}",
            f"{row.gather:.2f}", bar,
        )  # fmt: skip
    return result


def write_json(path: Path, rows: list[Row], command: str) -> None:
    """One file per run."""
    save_record(path, {**gpu_provenance(command), "rows": [row.to_json() for row in rows]})


def plot(path: Path, rows: list[Row]) -> None:
    """Bars of TFLOP/s, and the matmul of the same minutes beside each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 0.45 * len(rows) + 1.5))
    places = range(len(rows))
    axes.barh([i - 0.18 for i in places], [r.tflops for r in rows], height=0.33, label="openmla")
    axes.barh(
        [i + 0.18 for i in places], [r.matmul for r in rows], height=0.33, color="lightgray",
        label="8192³ matmul",
    )  # fmt: skip
    axes.set_yticks(places, [str(row.shape) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("TFLOP/s")
    axes.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
