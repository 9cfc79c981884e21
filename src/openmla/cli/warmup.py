"""`openmla warmup`: compile a model's kernels before its first request."""

import time
from typing import Annotated

import torch
import typer
from rich.console import Console

from openmla.aot import warmup
from openmla.dispatch import device_target
from openmla.errors import OpenMLAError
from openmla.lab.progress import tracked


def warmup_command(
    model: Annotated[str, typer.Option(help="A model: deepseek-v3, glm-5 …")] = "deepseek-v3",
    device: Annotated[str, typer.Option(help="The GPU to compile for")] = "cuda",
    tp: Annotated[int, typer.Option(help="Ranks that share the heads")] = 1,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16 or a quantized cache format (may be repeated)")
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Most requests of a server's batches, for their kernels too", min=1)
    ] = 1,
    page_size: Annotated[int, typer.Option(help="Rows of a page of the cache; 0: 64", min=0)] = 0,
    range_keys: Annotated[
        int,
        typer.Option(help="Keys of a range that calls name; 0: they name none", min=0),
    ] = 0,
    jobs: Annotated[
        int, typer.Option(help="Processes that compile side by side; 0: one for each core", min=0)
    ] = 0,
) -> None:
    """Compile the kernels of a model on this GPU before its first request."""
    console = Console()
    dtypes = tuple(dtype or ("bf16",))
    try:
        problems = warmup.problems_of(model, tp, dtypes, page_size, range_keys)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            reason = "torch finds no GPU here, and kernels are compiled where they will run"
            raise typer.BadParameter(reason)
        processes = min(jobs or warmup.usable_cores(), warmup.MOST_PROCESSES)
        started, busy = time.perf_counter(), 0.0
        kernels: set[str] = set()
        batches: list[warmup.Asked] = []
        if torch.device(device).type == "cuda" and (processes > 1 or requests > 1):
            target = device_target(torch.device(device))
            if requests > 1:
                size = requests, tp, dtypes, page_size, range_keys
                batches = warmup.batches_of(model, target, *size)
            groups = [*warmup.groups_of(problems, target), *([batch] for batch in batches)]
            compiled = warmup.compile_side_by_side(groups, target, processes)
            what = f"compiling, {processes} at a time"
            busy += sum(tracked(compiled, console, what, len(groups)))
        one = model, torch.device(device), tp, dtypes, page_size, range_keys
        loaded = warmup.compile_model(*one, tell=console.print)
        for warmed in tracked(loaded, console, "loading", len(problems)):
            kernels |= warmed.kernels
            busy += warmed.seconds
            console.print(str(warmed), highlight=False)
        console.print(_summary(len(kernels), time.perf_counter() - started, busy, processes))
        if batches:
            of_one = {k for problem in problems for k in warmup.kernels_of(problem, target)}
            more = {k for batch in batches for k in warmup.kernels_of(batch, target)} - of_one
            whose = f"batches of up to {requests} requests"
            console.print(f"{len(more)} more are in Triton's disk cache, for {whose}")
    except OpenMLAError as error:
        raise typer.BadParameter(str(error)) from None


def _summary(kernels: int, seconds: float, busy: float, processes: int) -> str:
    """How many kernels are ready, and what compiling them side by side saved."""
    line = f"{kernels} kernels are ready after {seconds:.0f} s"
    if processes > 1:
        line += f"; {processes} processes worked {busy:.0f} s on them"
    return line
