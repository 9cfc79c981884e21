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
    jobs: Annotated[
        int, typer.Option(help="Processes that compile side by side; 0: one for each core", min=0)
    ] = 0,
) -> None:
    """Compile the kernels of a model on this GPU before its first request."""
    console = Console()
    dtypes = tuple(dtype or ("bf16",))
    try:
        problems = warmup.problems_of(model, tp, dtypes)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            reason = "torch finds no GPU here, and kernels are compiled where they will run"
            raise typer.BadParameter(reason)
        processes = min(jobs or warmup.usable_cores(), warmup.MOST_PROCESSES)
        started, busy = time.perf_counter(), 0.0
        kernels: set[str] = set()
        if processes > 1 and torch.device(device).type == "cuda":
            target = device_target(torch.device(device))
            groups = len(warmup.groups_of(problems, target))
            compiled = warmup.compile_side_by_side(problems, target, processes)
            what = f"compiling, {processes} at a time"
            busy += sum(tracked(compiled, console, what, groups))
        loaded = warmup.compile_model(model, torch.device(device), tp, dtypes, console.print)
        for warmed in tracked(loaded, console, "loading", len(problems)):
            kernels |= warmed.kernels
            busy += warmed.seconds
            console.print(str(warmed), highlight=False)
        console.print(_summary(len(kernels), time.perf_counter() - started, busy, processes))
    except OpenMLAError as error:
        raise typer.BadParameter(str(error)) from None


def _summary(kernels: int, seconds: float, busy: float, processes: int) -> str:
    """How many kernels are ready, and what compiling them side by side saved."""
    line = f"{kernels} kernels are ready after {seconds:.0f} s"
    if processes > 1:
        line += f"; {processes} processes worked {busy:.0f} s on them"
    return line
