"""`openmla doctor`: versions, devices, and what would run where."""

import importlib.metadata
import platform
import shutil
import warnings
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from openmla import __version__
from openmla.dispatch import device_target, plan_for
from openmla.errors import OpenMLAError
from openmla.explain.support import support_table_markdown
from openmla.kernels.fallback import PortableFallback, launcher_of, run_plan
from openmla.problem import Problem

# One problem per form, at DeepSeek-V3 sizes.
EXAMPLES = {
    "mla_prefill": Problem(
        form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096
    ),
    "mla_prefill_latent": Problem(
        form="latent",
        heads=128,
        d_nope=512,
        d_rope=64,
        d_v=512,
        page_size=64,
        total_q=512,
        total_k=65536,
    ),
    "mla_prefill_sparse": Problem(
        form="sparse",
        heads=128,
        d_nope=512,
        d_rope=64,
        d_v=512,
        topk=2048,
        total_q=4096,
        total_k=65536,
    ),
}


def doctor_command(
    table: Annotated[
        bool, typer.Option("--table", help="Print what runs on which chip instead, as Markdown")
    ] = False,
) -> None:
    """Say what this machine has, which kernel each call gets, and what to do next."""
    if table:
        typer.echo(support_table_markdown())
        return
    console = Console()
    console.print(versions())
    console.print(devices())
    console.print(f"next: {next_step()}", highlight=False, soft_wrap=True)


def next_step() -> str:
    """One line: what to install, which slow path to know of, or what to run."""
    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") or shutil.which("rocm-smi"):
            return "there is a GPU that this torch does not see: install its CUDA or ROCm build"
        return "`openmla demo` checks these calls; `openmla plan --target h200` plans for a GPU"
    slow = []
    for call, problem in EXAMPLES.items():
        try:
            chosen = plan_for(problem, device_target(torch.device("cuda", 0)))
        except OpenMLAError as reason:
            return f"{call} does not run on this GPU: {reason}"
        old = [reason for reason in chosen.passed_over if "needs Triton" in reason]
        if old:
            return f"upgrade Triton: {call} runs on {chosen.backend} kernels, {old[0]}"
        slow += [call] if chosen.backend == "portable" and chosen.passed_over else []
    if slow:
        return f"{slow[0]} runs on the portable kernels, which are slower: the reason is above"
    return "`openmla warmup --model MODEL` compiles what the first request would wait for"


def versions() -> Table:
    """The packages that matter, and whether they are here."""
    table = Table("package", "version", title="versions", title_justify="left")
    table.add_row("openmla", __version__)
    table.add_row("python", platform.python_version())
    for name in ("torch", "triton", "numpy"):
        try:
            table.add_row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            table.add_row(name, "not installed")
    return table


def devices() -> Table:
    """Each device with the kernel family of each call, or the reason why there is none."""
    table = Table("device", "call", "runs on", title="devices", title_justify="left")
    found = [torch.device("cpu")]
    found += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in found:
        label = _label(device)
        for call, problem in EXAMPLES.items():
            table.add_row(label, call, _what_runs(problem, device))
            label = ""
    return table


def _label(device: torch.device) -> str:
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        return f"cpu ({torch.get_num_threads()} threads, {capability})"
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _what_runs(problem: Problem, device: torch.device) -> str:
    """The family that runs a problem. Its module is imported: this Triton may lack its names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PortableFallback)  # the reason is in the table
            chosen, _ = run_plan(lambda: plan_for(problem, device_target(device)), launcher_of)
    except OpenMLAError as reason:
        return f"nothing: {reason}"
    reasons = "".join(f"\n  not {reason}" for reason in chosen.passed_over)
    return f"{chosen.backend}, {chosen.word}{reasons}"
