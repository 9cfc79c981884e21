"""`openmla bench`: time openmla and its peers in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console

from openmla.cli.options import writable_file
from openmla.errors import InvalidArgument
from openmla.lab.progress import progress
from openmla.records import parse_json

if TYPE_CHECKING:
    from openmla.lab.bench.report import Report

T = TypeVar("T")
BENCHMARKS = ("cpu", "dense", "few", "sparse")
ANYWHERE = ("cpu", "few")
"""Benchmarks that need no GPU."""


def bench_command(
    what: Annotated[
        str,
        typer.Argument(
            help="cpu: every form on the CPU; dense, sparse: that form on a GPU; few: few queries "
            "over many keys, on a GPU or the CPU; auto: dense if there is a GPU, cpu otherwise"
        ),
    ] = "auto",
    target: Annotated[
        str, typer.Option(help="dense, sparse: the GPU that this must be, such as h200")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each contestant")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 keeps torch's choice")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="on a CPU: small shapes, a few seconds")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Also write the results here")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="all but cpu: also draw them here, as SVG")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Compare with this earlier JSON; marks what moved by 3 %")
    ] = None,
) -> None:
    """Time openmla and its peers on this machine, side by side."""
    if what == "auto":
        what = "dense" if torch.cuda.is_available() else "cpu"
    if what not in BENCHMARKS:
        raise typer.BadParameter(f"expected auto, {', '.join(BENCHMARKS)}, got {what!r}")
    if what not in ANYWHERE:
        _check_gpu(what, target)
    elif target or (plot is not None and what == "cpu"):
        raise typer.BadParameter(f"target and plot go with dense and sparse, not with {what}")
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    writable_file("json", json, makes_folders=True)
    writable_file("plot", plot, makes_folders=True)
    before = _record(against) if against is not None else None
    options = f"--rounds {rounds} --threads {threads}" + " --quick" * quick
    command = f"openmla bench {what}" + f" --target {target}" * bool(target) + f" {options}"
    console = Console()
    report = _run(console, what, rounds, quick)
    console.print(report.table())
    if json is not None or before is not None:
        from openmla.lab.bench.provenance import provenance

        given = provenance(command, gpu=what != "cpu" and torch.cuda.is_available())
    if json is not None:
        _save(json, lambda path: report.write_json(path, given))
    if before is not None:
        _compare(console, {**given, **report.record}, before)
    if plot is not None:
        _save(plot, report.write_picture)


def _check_gpu(what: str, target: str) -> None:
    """There must be a GPU, and the one that was asked for."""
    if not torch.cuda.is_available():
        raise typer.BadParameter(f"{what} needs a CUDA GPU, and torch sees none here")
    if target:
        from openmla.planning.target import target_by_name, target_of_device

        try:
            wanted = target_by_name(target)
        except InvalidArgument as error:
            raise typer.BadParameter(str(error)) from None
        found = target_of_device(torch.device("cuda", torch.cuda.current_device()))
        if found.name != wanted.name:
            raise typer.BadParameter(f"target {wanted.name}, but this GPU is {found.name}")


def _run(console: Console, what: str, rounds: int, quick: bool) -> Report:
    """Run a benchmark, and say which case is done."""
    from openmla.lab.bench import cpu, dense, few, sparse

    with progress(console, "cases", None) as tell:
        if what == "cpu":
            tell(0, "seconds each" if quick else "which takes minutes; --quick has small shapes")
        else:
            tell(0, "the first compiles kernels, and slow peers take a while")

        def seen(rows: Iterator[T]) -> Iterator[T]:
            for done, row in enumerate(rows, 1):
                tell(done, f"done: {row}")
                yield row

        if what == "cpu":
            return cpu.report(seen(cpu.run_cpu(rounds, quick)))
        if what == "few":
            return few.report(seen(few.run_few(rounds, quick)))
        if what == "sparse":
            return sparse.report(seen(sparse.run_sparse(rounds)))
        matmul = dense.matmul_tflops(rounds)
        return dense.report(seen(dense.run_dense(rounds)), matmul)


def _record(path: Path) -> dict[str, Any]:
    from openmla.lab.bench.against import checked

    try:
        return checked(parse_json("against", path.read_bytes()))
    except (OSError, InvalidArgument) as error:
        raise typer.BadParameter(f"against: cannot read {path}: {error}") from None


def _compare(console: Console, now: dict[str, Any], before: dict[str, Any]) -> None:
    from openmla.lab.bench.against import changes, table

    found = changes(now, before)
    if not found:
        raise typer.BadParameter("against: that file has none of these cases")
    console.print(table(found, now, before))
    moved = sum(change.moved for change in found)
    console.print(f"{moved} of {len(found)} figures moved by more than 3 %", highlight=False)


def _save(path: Path, write: Callable[[Path], None]) -> None:
    try:
        write(path)
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}") from None
    typer.echo(f"written to {path}")
