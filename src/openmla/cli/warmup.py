"""`openmla warmup`: compile a model's kernels before its first request."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from openmla.aot.warmup import compile_model, problems_of
from openmla.errors import OpenMLAError


def warmup_command(
    model: Annotated[str, typer.Option(help="A model: deepseek-v3, glm-5 …")] = "deepseek-v3",
    device: Annotated[str, typer.Option(help="The GPU to compile for")] = "cuda",
    tp: Annotated[int, typer.Option(help="Ranks that share the heads")] = 1,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16 or an FP8 cache format (may be repeated)")
    ] = None,
) -> None:
    """Compile the kernels a model needs on this GPU into Triton's disk cache."""
    console = Console()
    dtypes = tuple(dtype or ("bf16",))
    try:
        total = len(problems_of(model, tp, dtypes))
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            reason = "torch finds no GPU here, and kernels are compiled where they will run"
            raise typer.BadParameter(reason)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("compiling", total=total)
            tell = progress.console.print
            for line in compile_model(model, torch.device(device), tp, dtypes, tell):
                progress.console.print(line, highlight=False)
                progress.advance(task)
    except OpenMLAError as error:
        raise typer.BadParameter(str(error)) from None
