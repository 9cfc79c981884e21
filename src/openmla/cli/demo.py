"""`openmla demo`: dense, latent and sparse calls on this machine, checked against float64."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

import openmla
from openmla.cli.options import DEVICE_HELP, device_here
from openmla.dispatch import plan_call
from openmla.formats import V32
from openmla.lab.bench.report import duration
from openmla.lab.progress import progress
from openmla.lab.testing.cases import BuiltCase, Case, Outcome, build
from openmla.lab.testing.compare import Verdict, judge
from openmla.lab.testing.fuzz import one_thread
from openmla.operands import DenseOperands, Results

V3 = Case("dense", heads=16, d_nope=128, d_rope=64, d_v=128)
LATENT = replace(V3, form="latent", d_nope=512, d_v=512, kv="bf16", page_size=64, scale=192**-0.5)
SPARSE = replace(LATENT, form="sparse", topk=256, topk_lengths="ragged", index_kind="mixed")
# What it shows, and the case: DeepSeek-V3 widths, 16 heads, small enough for the float64 reference.
CASES = {
    "dense, ragged": replace(V3, q_lens=(190, 33, 0, 65), k_lens=(190, 33, 5, 260)),
    "dense, rope in pages": replace(
        V3, q_lens=(96,), k_lens=(224,), rope="cache", kv="bf16", page_size=64
    ),
    "dense, fp8": replace(
        V3,
        q_lens=(128,),
        k_lens=(128,),
        dtype="e4m3",
        side_dtype="bf16",
        q_scale=True,
        k_scale=True,
    ),
    "latent, paged": replace(LATENT, q_lens=(48, 16), k_lens=(300, 16)),
    "latent, fp8 pages": replace(LATENT, q_lens=(48,), k_lens=(300,), kv="fp8_block64"),
    "sparse, plain rows": replace(SPARSE, q_lens=(64,), k_lens=(1024,), kv="plain"),
    f"sparse, {V32.name}, sink": replace(
        SPARSE, q_lens=(64,), k_lens=(1024,), kv=V32.name, sink="normal"
    ),
}


SECONDS_BETWEEN_LINES = 2.0
REPEATS = 5


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    built: BuiltCase
    out: torch.Tensor
    seconds: float
    verdict: Verdict


def demo_command(device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "auto") -> None:
    """Run dense, latent and sparse calls on this machine, and check each against float64."""
    where = device_here(device)
    console = Console()
    lines: list[Line] = []
    total = len(CASES) + 1
    # The calls are small: a second thread would only wait for the first, and for other programs.
    with one_thread(), progress(console, "demo", total, every=SECONDS_BETWEEN_LINES) as tell:
        for done, (what, case) in enumerate(CASES.items()):
            tell(done, what)
            built = build(case, device=where)
            lines.append(_line(what, built, built.run))
        tell(total - 1, "chunked prefill")
        lines.append(_chunked(build(replace(V3, q_lens=(64,), k_lens=(512,)), device=where)))
    console.print(_table(lines, where))
    if not all(line.verdict.ok for line in lines):
        for line in lines:
            if not line.verdict.ok:
                console.print(f"{line.what}: {line.verdict.report()}", style="red", markup=False)
        raise typer.Exit(1)
    console.print(
        "All right: every result is as close to the float64 reference as its dtype allows\n"
        "(error: relative, of all elements together; bound: the worst element's share of its own)."
    )


def _line(what: str, built: BuiltCase, run: Callable[[], Outcome]) -> Line:
    outcome = run()  # warms up: the first call allocates, and on a GPU it compiles
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        outcome = run()
        if built.operands.q.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return Line(what, built, outcome.out, statistics.median(times), judge(built, outcome))


def _chunked(built: BuiltCase) -> Line:
    """New tokens see a long context in two chunks and themselves causally; three states merged."""
    op = built.operands
    if not isinstance(op, DenseOperands) or op.k_rope is None:
        raise TypeError("the chunked demo needs a dense case with a rope tensor")
    k_rope = op.k_rope
    new = op.q.shape[0]
    context = op.k_nope.shape[0] - new
    cu = torch.tensor([0, new], dtype=torch.int32, device=op.q.device)

    def attend(first: int, last: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        keys = slice(first, last)
        cu_k = torch.tensor([0, last - first], dtype=torch.int32, device=op.q.device)
        state = openmla.mla_prefill(
            op.q,
            op.k_nope[keys],
            k_rope[keys],
            op.v[keys],
            cu_seqlens_q=cu,
            cu_seqlens_k=cu_k,
            causal=causal,
            return_lse=True,
        )
        return state[0], state[1]

    def run() -> Outcome:
        states = [
            attend(0, context // 2, causal=False),
            attend(context // 2, context, causal=False),
            attend(context, context + new, causal=True),
        ]
        return Outcome(*openmla.merge_many(*zip(*states, strict=True)))

    return _line("dense, chunks merged", built, run)


def _table(lines: list[Line], device: torch.device) -> Table:
    where = "one CPU thread" if device.type == "cpu" else str(device)
    title = f"openmla demo: DeepSeek-V3 widths, 16 heads, {where}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("call", no_wrap=True)
    for column in ("queries", "keys"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    for column in ("time", "error", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for line in lines:
        case, verdict = line.built.case, line.verdict
        keys = case.topk if case.form == "sparse" else case.total_k
        table.add_row(
            line.what,
            str(case.total_q),
            str(keys),
            plan_call(line.built.operands, Results(line.out)).backend,
            duration(line.seconds),
            f"{verdict.frobenius:.1e}",
            f"{verdict.bound:.0%}",
            "[green]right[/]" if verdict.ok else "[red]WRONG[/]",
        )
    return table
