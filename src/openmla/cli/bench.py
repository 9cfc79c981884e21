"""`openmla bench`: time openmla and its peers in one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

BENCHMARKS = ("cpu", "dense", "sparse")


def bench_command(
    what: Annotated[
        str,
        typer.Argument(
            help="cpu: every form on the CPU; dense, sparse: that form on a GPU; "
            "auto: dense if there is a GPU, cpu otherwise"
        ),
    ] = "auto",
    target: Annotated[
        str, typer.Option(help="dense, sparse: the GPU that this must be, such as h200")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each contestant")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 keeps torch's choice")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="cpu: small shapes, a few seconds")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the results here")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="dense, sparse: also draw them here (.svg, .png)")
    ] = None,
) -> None:
    """Time openmla and its peers on this machine: medians, interleaved, one process."""
    if what == "auto":
        what = "dense" if torch.cuda.is_available() else "cpu"
    if what not in BENCHMARKS:
        raise typer.BadParameter(f"expected auto, {', '.join(BENCHMARKS)}, got {what!r}")
    if what != "cpu":
        _check_gpu(what, target)
    elif target or plot is not None:
        raise typer.BadParameter(f"target and plot go with dense and sparse, not with {what}")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    options = f"--rounds {rounds} --threads {threads}" + " --quick" * quick
    command = f"openmla bench {what}" + f" --target {target}" * bool(target) + f" {options}"
    if what == "cpu":
        _cpu(rounds, quick, json, command)
    elif what == "dense":
        _dense(rounds, json, plot, command)
    else:
        _sparse(rounds, json, plot, command)


def _check_gpu(what: str, target: str) -> None:
    """There must be a GPU, and the one that was asked for."""
    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{what} needs a CUDA GPU, and torch sees none here")
    if target:
        from openmla.errors import InvalidArgument
        from openmla.planning.target import target_by_name, target_of_device

        try:
            wanted = target_by_name(target)
        except InvalidArgument as error:
            raise typer.BadParameter(str(error)) from None
        found = target_of_device(torch.device("cuda", torch.cuda.current_device()))
        if found.name != wanted.name:
            raise typer.BadParameter(f"target {wanted.name}, but this GPU is {found.name}")


def _cpu(rounds: int, quick: bool, json: Path | None, command: str) -> None:
    from openmla.bench.cpu import Row, run_cpu
    from openmla.bench.report import table, write_json

    console = Console()
    rows: list[Row] = []
    with _progress(console) as progress:
        step = progress.add_task("first case (slow peers take a while)")
        for row in run_cpu(rounds, quick):
            rows.append(row)
            progress.update(step, description=f"done: {row.case} {row.dtype}")
    console.print(table(rows))
    if json is not None:
        _save(json, lambda path: write_json(path, rows, command))


def _dense(rounds: int, json: Path | None, picture: Path | None, command: str) -> None:
    from openmla.bench.dense import Row, matmul_tflops, run_dense
    from openmla.bench.dense_report import plot, table, write_json

    console = Console()
    rows: list[Row] = []
    with _progress(console) as progress:
        step = progress.add_task("first shape (kernels are compiled)")
        matmul = matmul_tflops(rounds)
        for row in run_dense(rounds):
            rows.append(row)
            progress.update(step, description=f"done: {row.shape}")
    console.print(table(rows, matmul))
    if json is not None:
        _save(json, lambda path: write_json(path, rows, matmul, command))
    if picture is not None:
        _save(picture, lambda path: plot(path, rows, matmul))


def _sparse(rounds: int, json: Path | None, picture: Path | None, command: str) -> None:
    from openmla.bench.sparse import Row, run_sparse
    from openmla.bench.sparse_report import plot, table, write_json

    console = Console()
    rows: list[Row] = []
    with _progress(console) as progress:
        step = progress.add_task("first shape (kernels are compiled)")
        for row in run_sparse(rounds):
            rows.append(row)
            progress.update(step, description=f"done: {row.shape}")
    console.print(table(rows))
    if json is not None:
        _save(json, lambda path: write_json(path, rows, command))
    if picture is not None:
        _save(picture, lambda path: plot(path, rows))


def _save(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"written to {path}")


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)
