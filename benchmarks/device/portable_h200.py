"""The portable kernels on one H200: correctness, tile candidates, bits, sizes.

    PYTHONPATH=src python benchmarks/device/portable_h200.py --out DIR

Every part runs in processes of its own with a time limit, so that one that fails or hangs does not
lose the rest. Writes DIR/portable_h200.json and prints a table. `--part NAME` runs one part alone
and prints one JSON object per line; the main process calls it that way.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

WORKERS = 12  # compiling, later fuzzing
FUZZ_CASES = 144
MATMUL = 8192
ONLY = "PORTABLE_H200_ONLY"


@dataclass(frozen=True)
class Tile:
    """A candidate: the fields that the portable launcher reads from a config."""

    BM: int
    BN: int
    num_stages: int
    num_warps: int
    bulk_copies: bool = False
    group_heads: int = 4
    widen: bool = False
    """Widen an FP8 cache into a workspace first."""
    split: None = None

    @property
    def branches(self) -> bool:
        """As the planner decides on this chip."""
        return self.BM >= 64

    @property
    def cache_read(self) -> Any:
        """As the planner writes it."""
        from openmla.plan.hopper_cache import PLAIN, CacheRead

        return CacheRead("workspace") if self.widen else PLAIN


def _dense_tiles() -> list[Tile]:
    shapes = [(128, 64, 3, 8), (128, 64, 2, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 64, 2, 4)]
    tiles = [Tile(*shape, bulk_copies=bulk) for bulk in (True, False) for shape in shapes]
    groups = [Tile(128, 64, 3, 8, True, group_heads=g) for g in (1, 2, 8, 16)]
    return [*tiles, Tile(128, 64, 4, 8, True), *groups]


ROW_TILES = [
    Tile(64, 64, 2, 8),
    Tile(64, 64, 3, 8),
    Tile(64, 32, 2, 8),
    Tile(64, 32, 3, 8),
]
FP8_TILES = [Tile(64, 64, 2, 8, widen=True), *ROW_TILES]
FEW_HEADS_TILES = [
    Tile(16, 64, 2, 4),
    Tile(16, 64, 2, 8),
    Tile(16, 64, 3, 4),
    Tile(16, 32, 2, 4),
    Tile(16, 32, 3, 4),
]
MORE_HEADS_TILES = [Tile(16, 64, 2, 4), Tile(32, 64, 2, 8), Tile(32, 64, 2, 4), Tile(32, 32, 2, 4)]


# One or two columns of values that nearly cancel: P in bf16 costs more than the rule grants a row.
LEAST_COLUMNS = 4


@dataclass(frozen=True)
class Shape:
    """One timed problem: `tokens` queries per sequence, `keys` keys or rows, top-k when sparse."""

    form: str
    heads: int
    tokens: int
    keys: int
    topk: int = 0
    format: str = ""
    """Cache format; plain rows when empty."""

    @property
    def flops(self) -> float:
        """As the peers count them: a causal dense product has half of the pairs."""
        if self.form == "dense":
            return 2 * self.heads * 320 * (self.tokens * self.keys - self.tokens**2 / 2)
        pairs = self.tokens * self.topk
        if self.form == "latent":
            pairs = self.tokens * self.keys - self.tokens**2 / 2
        return 2 * self.heads * 1088 * pairs

    @property
    def gathered_bytes(self) -> float:
        """What the index lists name, counted once per token."""
        row = {"": 1152, "bf16": 1152, "fp8_656": 656, "fp8_block64": 612}[self.format]
        return float(self.tokens * self.topk * row)


SHAPES: dict[str, tuple[Shape, list[Tile]]] = {
    "dense h128 1x8192": (Shape("dense", 128, 8192, 8192), _dense_tiles()),
    "dense h128 1x4096": (Shape("dense", 128, 4096, 4096), _dense_tiles()[:4]),
    "dense h16 1x8192": (Shape("dense", 16, 8192, 8192), _dense_tiles()[:4]),
    "sparse h128 bf16": (Shape("sparse", 128, 4096, 8192, 2048), ROW_TILES),
    "sparse h128 fp8_656": (Shape("sparse", 128, 4096, 8192, 2048, "fp8_656"), FP8_TILES),
    "sparse h128 fp8_block64": (
        Shape("sparse", 128, 4096, 8192, 2048, "fp8_block64"),
        FP8_TILES[:4],
    ),
    "sparse h16 bf16": (Shape("sparse", 16, 4096, 8192, 2048), FEW_HEADS_TILES),
    "sparse h32 bf16": (Shape("sparse", 32, 4096, 8192, 2048), MORE_HEADS_TILES),
    "sparse h16 fp8_656": (
        Shape("sparse", 16, 4096, 8192, 2048, "fp8_656"),
        [Tile(16, 64, 2, 4, widen=True), Tile(16, 64, 2, 4)],
    ),
    "latent h16": (Shape("latent", 16, 2048, 8192, 0, "bf16"), ROW_TILES),
    "latent h128": (Shape("latent", 128, 512, 8192, 0, "bf16"), ROW_TILES),
}


def operands(shape: Shape, small: bool = False) -> tuple[Any, Any]:
    """Random tensors of a shape; `small` has fewer tokens and compiles the same kernels."""
    import torch

    from openmla.cache import LatentCache
    from openmla.operands import DenseOperands, LatentOperands, Results, SparseOperands, Weights

    make = {"dtype": torch.bfloat16, "device": "cuda"}
    T, N, H = 256 if small else shape.tokens, shape.keys, shape.heads
    cu, cu_k = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (T, N))
    if shape.form == "dense":
        q = torch.randn(T, H, 192, **make)
        k, v = torch.randn(N, H, 128, **make), torch.randn(N, H, 128, **make)
        op = DenseOperands(q, k, torch.randn(N, 64, **make), v, cu, cu_k, True, Weights(192**-0.5))
        return op, Results(torch.empty(T, H, 128, **make), torch.empty(T, H, device="cuda"))
    q = torch.randn(T, H, 576, **make) / 10
    results = Results(torch.empty(T, H, 512, **make), torch.empty(T, H, device="cuda"))
    rows: Any = torch.randn(N, 576, **make) / 10
    if shape.format:
        cache = LatentCache.allocate(
            num_pages=N // 64, page_size=64, format=shape.format, device="cuda"
        )
        cache.append(rows[:, :512], rows[:, 512:], torch.arange(N, device="cuda"))
        rows = cache
    if shape.form == "latent":
        table = torch.randperm(N // 64, device="cuda").to(torch.int32)[None]
        lengths = torch.tensor([N], dtype=torch.int32, device="cuda")
        return LatentOperands(q, rows, table, lengths, cu, True, 512, Weights(192**-0.5)), results
    indices = torch.randint(0, N, (T, shape.topk), dtype=torch.int32, device="cuda")
    return SparseOperands(q, rows, indices, None, 512, Weights(192**-0.5)), results


def plan_for(tile: Tile) -> Any:
    """A plan with a candidate as its config."""
    from openmla.plan import Plan
    from openmla.problem import Problem

    problem = Problem(form="dense", heads=1, d_nope=128, d_rope=64, d_v=128)
    return Plan(problem, "h200", "portable", tile)


def run(tile: Tile, operands: Any, results: Any) -> None:
    """Launch a candidate."""
    from openmla.kernels.portable.launch import calls

    for call in calls(plan_for(tile), operands, results):
        call.run()


def chosen() -> list[str]:
    """Names of the shapes asked for."""
    return [name for name in SHAPES if re.search(os.environ.get(ONLY, ""), name)]


def say(**fields: Any) -> None:
    """One JSON line for the main process."""
    print(json.dumps(fields), flush=True)


def part_compile(first: int) -> None:
    """Compile every WORKERS-th candidate, so that timing finds it in Triton's disk cache."""
    from openmla.kernels.portable import launch

    jobs = [(name, tile) for name in chosen() for tile in SHAPES[name][1]]
    for name, tile in jobs[first::WORKERS]:
        op, results = operands(SHAPES[name][0], small=True)
        started = time.perf_counter()
        try:
            for call in launch.calls(plan_for(tile), op, results):
                made = call.kernel.warmup(grid=(call.programs,), **call.arguments)
                say(shape=name, tile=asdict(tile), shared=made.metadata.shared)
        except Exception as error:
            say(shape=name, tile=asdict(tile), error=repr(error)[-300:])
        say(seconds=time.perf_counter() - started)


def part_fuzz(first: int) -> None:
    """Judge random cases on the GPU against the float64 reference on the CPU."""
    import torch

    from openmla.operands import Results
    from openmla.testing.build import Outcome, build
    from openmla.testing.compare import judge
    from openmla.testing.draw import random_case

    narrow = (Tile(64, 32, 2, 4, True), Tile(64, 64, 2, 4), Tile(128, 32, 2, 8, True))
    wide = (Tile(16, 16, 2, 4), Tile(32, 32, 2, 8), Tile(16, 64, 2, 4, widen=True))
    seed, done = 10_000 + first, 0
    while done < FUZZ_CASES // WORKERS:
        case = random_case(seed)
        seed += WORKERS
        if case.dtype == "fp32" or case.cost > 30_000_000 or case.d_nope > 512:
            continue
        if case.d_v < LEAST_COLUMNS:
            continue
        if not any(case.form in name for name in chosen()):
            continue
        tile = (narrow if case.d_nope <= 256 else wide)[done % 3]
        if case.form != "dense" and case.d_v > 64 and done % 4 == 3:
            tile = Tile(64, 64, 2, 8)
        if tile.widen and case.kv in ("plain", "bf16"):
            tile = replace(tile, widen=False)
        done += 1
        try:
            built = build(case, device="cuda")
            q = built.operands.q
            dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
            out = built.memory.new((*q.shape[:2], case.d_v), dtype, case.out == "strided")
            rows = [q.new_empty(q.shape[:2], dtype=torch.float32) for _ in range(2)]
            lse = rows[0] if case.return_lse else None
            logits = rows[1] if case.return_max_logits else None
            for x in (out, *rows):
                x.fill_(torch.nan)
            run(tile, built.operands, Results(out, lse, logits))
            torch.cuda.synchronize()
            verdict = judge(built, Outcome(out, lse, logits))
            problems = list(verdict.problems)
            say(seed=seed - WORKERS, dtype=case.dtype, form=case.form, bound=verdict.bound,
                ok=not problems, case=str(case), problems=problems)  # fmt: skip
        except Exception as error:
            say(seed=seed - WORKERS, ok=False, case=str(case), problems=[repr(error)[-400:]])
            if "CUDA" in repr(error):
                return  # the context is gone


def part_time(name: str) -> None:
    """Time the candidates of one shape, with the matrix product before each."""
    import torch
    from triton.testing import do_bench

    from openmla.kernels.portable import launch

    shape, tiles = SHAPES[name]
    a, b = (torch.randn(MATMUL, MATMUL, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    op, results = operands(shape)
    reference = None

    def bench(run: Callable[[], object]) -> float:
        return float(do_bench(run, warmup=20, rep=60, return_mode="median"))

    for tile in tiles:
        matmul = 2 * MATMUL**3 / bench(lambda: a @ b) / 1e9
        try:
            calls = list(launch.calls(plan_for(tile), op, results))
            compiled = [c.kernel[(c.programs,)](**c.arguments) for c in calls]
            torch.cuda.synchronize()
            if reference is None:
                reference = results.out.clone()
            apart = float(
                (results.out.float() - reference.float()).norm() / reference.float().norm()
            )
            ms = bench(lambda calls=calls: [c.run() for c in calls])
            tflops = shape.flops / ms / 1e9
            say(shape=name, tile=asdict(tile), ms=ms, tflops=tflops, matmul=matmul,
                share=tflops / matmul, gathered_tbps=shape.gathered_bytes / ms / 1e9,
                registers=compiled[0].n_regs, spills=compiled[0].n_spills,
                shared=compiled[0].metadata.shared, apart=apart)  # fmt: skip
        except Exception as error:
            say(shape=name, tile=asdict(tile), error=repr(error)[-300:])
            if "CUDA" in repr(error):
                return


def part_cache(_: int) -> None:
    """append and gather: bit-equal to the CPU in every format, and their speed."""
    import torch
    from triton.testing import do_bench

    from openmla.cache import LatentCache
    from openmla.kernels.portable import cache_ops
    from openmla.problem import CACHE_FORMATS

    torch.manual_seed(0)
    for format in CACHE_FORMATS:
        host = LatentCache.allocate(num_pages=128, page_size=64, format=format)
        device = LatentCache.allocate(num_pages=128, page_size=64, format=format, device="cuda")
        x = torch.randn(4096, 576) * torch.logspace(-8, 4, 4096)[:, None]
        x[7], x[8, ::3] = 0, 0
        slots = torch.randperm(host.rows)[:4096]
        host.append(x[:, :512], x[:, 512:], slots)
        on_gpu, slots_gpu = x.cuda(), slots.cuda()
        device.append(on_gpu[:, :512], on_gpu[:, 512:], slots_gpu)
        same = torch.equal(host.data.view(torch.uint8), device.data.cpu().view(torch.uint8))
        if host.scales is not None and device.scales is not None:
            same = same and torch.equal(host.scales, device.scales.cpu())
        rows = device.gather(slots_gpu)
        read = torch.equal(host.gather(slots).view(torch.int16), rows.cpu().view(torch.int16))
        latent, rope = on_gpu[:, :512].bfloat16(), on_gpu[:, 512:].bfloat16()
        append_ms = do_bench(partial(cache_ops.append, device, latent, rope, slots_gpu))
        gather_ms = do_bench(partial(cache_ops.gather, device, slots_gpu, rows))
        say(format=format, append_equal=same, gather_equal=read, append_us=append_ms * 1e3,
            gather_us=gather_ms * 1e3)  # fmt: skip


def _sizes() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Bits and sizes, each a function that returns what it found."""
    import torch

    from openmla.kernels.portable import launch
    from openmla.operands import DenseOperands, Results, SparseOperands, Weights

    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}

    def repeat(name: str, tile: Tile, times: int = 1000) -> dict[str, Any]:
        shape = SHAPES[name][0]
        op, results = operands(Shape(shape.form, 16, 64, 4096, 256, shape.format))
        calls = list(launch.calls(plan_for(tile), op, results))
        first, different = None, 0
        for _ in range(times):
            results.out.fill_(torch.nan)
            for call in calls:
                call.run()
            if first is None:
                first = results.out.clone()
            different += int(not torch.equal(results.out, first))
        finite = bool(torch.isfinite(first).all())
        return {"launches": times, "different": different, "finite": finite, "calls": len(calls)}

    for name in ("dense h128 1x8192", "latent h16", "sparse h128 bf16", "sparse h128 fp8_656"):
        tile = Tile(64, 32, 2, 8, bulk_copies=name.startswith("dense"))
        if name.startswith("sparse"):
            tile = Tile(16, 64, 2, 4)
        yield f"repeat {name}", lambda name=name, tile=tile: repeat(name, tile)

    def dense_rows(T: int, H: int, length: int) -> dict[str, Any]:
        """T tokens in sequences of `length`; the last sequence is checked in fp32."""
        q = torch.randn(T, H, 192, **bf16)
        k, v = torch.randn(T, H, 128, **bf16), torch.randn(T, H, 128, **bf16)
        rope = torch.randn(T, 64, **bf16)
        cu = torch.arange(0, T + 1, length, dtype=torch.int32, device="cuda")
        op = DenseOperands(q, k, rope, v, cu, cu, True, Weights(192**-0.5))
        results = Results(torch.full((T, H, 128), torch.nan, **bf16))
        run(Tile(128, 64, 2, 8, bulk_copies=True), op, results)
        worst = 0.0
        for start in (0, T // length // 2 * length, T - length):
            part = slice(start, start + length)
            keys = torch.cat([k[part], rope[part, None].expand(-1, H, -1)], -1).float()
            s = torch.einsum("qhd,khd->hqk", q[part].float(), keys) * 192**-0.5
            future = torch.ones(length, length, device="cuda").triu(1).bool()
            p = s.masked_fill(future, -torch.inf).softmax(-1)
            want = torch.einsum("hqk,khv->qhv", p, v[part].float())
            worst = max(worst, float((results.out[part].float() - want).norm() / want.norm()))
        finite = bool(torch.isfinite(results.out).all())
        return {"tokens": T, "q_elements": q.numel(), "error": worst, "finite": finite}

    yield "dense past 65535 tokens", lambda: dense_rows(70_000, 2, 500)
    yield "dense past 2^31 elements", lambda: dense_rows(90_000, 128, 1000)

    def sparse_rows(T: int, rows: int, topk: int) -> dict[str, Any]:
        q, kv = torch.randn(T, 16, 576, **bf16) / 10, torch.randn(rows, 576, **bf16)
        indices = torch.randint(rows // 2, rows, (T, topk), dtype=torch.int32, device="cuda")
        results = Results(torch.full((T, 16, 512), torch.nan, **bf16))
        op = SparseOperands(q, kv, indices, None, 512, Weights(192**-0.5))
        run(Tile(16, 32, 2, 4), op, results)
        worst = 0.0
        for t in (0, T // 2, T - 1):
            k = kv[indices[t].long()].float()
            p = (q[t].float() @ k.T * 192**-0.5).softmax(-1)
            want = p @ k[:, :512]
            worst = max(worst, float((results.out[t].float() - want).norm() / want.norm()))
        finite = bool(torch.isfinite(results.out).all())
        return {"tokens": T, "kv_elements": kv.numel(), "error": worst, "finite": finite}

    yield "sparse past 65535 tokens", lambda: sparse_rows(70_000, 8192, 64)
    yield "sparse past 2^31 elements", lambda: sparse_rows(2048, 4_200_000, 128)


def part_sizes(_: int) -> None:
    """Bits over 1,000 launches, more than 65535 tokens, offsets past 2^31."""
    for name, check in _sizes():
        try:
            say(check=name, **check())
        except Exception as error:
            say(check=name, error=repr(error)[-300:])


PARTS: dict[str, Callable[[Any], None]] = {
    "compile": part_compile,
    "fuzz": part_fuzz,
    "time": part_time,
    "cache": part_cache,
    "sizes": part_sizes,
}


class Job:
    """A part in a process of its own."""

    def __init__(
        self, part: str, argument: str, limit: float, prefix: tuple[str, ...] = ()
    ) -> None:
        command = [*prefix, sys.executable, __file__, "--part", part, "--argument", argument]
        self.name, self.ends = f"{part} {argument}", time.monotonic() + limit
        env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if prefix else None
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    def finish(self) -> tuple[list[dict[str, Any]], str]:
        """(lines, what went wrong); what was printed before a timeout is kept."""
        failure = ""
        try:
            out, err = self.process.communicate(timeout=max(self.ends - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            failure = "timed out"
        if self.process.returncode and not failure:
            failure = f"exit {self.process.returncode}: {err[-600:]}"
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        return lines, failure


def run_all(jobs: list[Job], failures: list[str]) -> list[dict[str, Any]]:
    """Wait for several jobs."""
    lines = []
    for job in jobs:
        found, failure = job.finish()
        lines += found
        if failure:
            failures.append(f"{job.name}: {failure}")
    return lines


def provenance() -> dict[str, Any]:
    """Where and when."""
    import torch
    import triton

    query = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    ).stdout.strip()  # fmt: skip
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        f"nvidia-smi {query}": smi,
        "command": "python benchmarks/device/portable_h200.py",
        "timing": "triton.testing.do_bench, median, L2 flushed; matmul before every candidate",
    }


def sanitized() -> Job | None:
    """A few fuzz cases under compute-sanitizer, if it is installed."""
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    tool = next((p for p in places if p and os.path.exists(p)), None)
    prefix = ("--tool", "memcheck", "--error-exitcode", "9")
    return None if tool is None else Job("fuzz", "3", 150, (tool, *prefix))


def memcheck(job: Job | None) -> dict[str, Any]:
    """What the sanitizer said."""
    if job is None:
        return {"ran": False, "reason": "no compute-sanitizer"}
    lines, failure = job.finish()
    return {"ran": True, "cases": len(lines), "failure": failure}


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    fuzz = report["fuzz"]
    rejected = [line for line in fuzz if not line["ok"]]
    bf16 = sum(line.get("dtype") == "bf16" for line in fuzz)
    text = [f"fuzz: {len(fuzz)} cases ({bf16} bf16), {len(rejected)} rejected"]
    text += [f"  seed {x['seed']}: {x['case']}: {x['problems'][:2]}" for x in rejected[:8]]
    for name in SHAPES:
        lines = [x for x in report["times"] if x["shape"] == name]
        good = sorted((x for x in lines if "ms" in x), key=lambda x: x["ms"])
        if good:
            text.append(f"{name}  (matmul {statistics.median(x['matmul'] for x in good):.0f})")
        for x in good:
            t = x["tile"]
            extras = [k for k in ("bulk_copies", "widen") if t[k]] + [f"g{t['group_heads']}"]
            text.append(
                f"  {t['BM']:>3}x{t['BN']:<3} s{t['num_stages']} w{t['num_warps']} "
                f"{' '.join(extras):<22} {x['ms']:8.3f} ms {x['tflops']:6.1f} TF "
                f"share {x['share']:.3f} {x['gathered_tbps']:5.2f} TB/s "
                f"r{x['registers']} sp{x['spills']} {x['shared']} B apart {x['apart']:.1e}"
            )
        text += [f"  {x['tile']}: {x['error'][-160:]}" for x in lines if "error" in x]
    for section in ("cache", "sizes"):
        text += [f"{section}: {json.dumps(x)}" for x in report[section]]
    text += [f"memcheck: {report['memcheck']}"]
    text += [f"FAILURE {x}" for x in report["failures"]]
    return "\n".join(text)


def main() -> None:
    """Run everything, or one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=".")
    parser.add_argument("--part", choices=sorted(PARTS))
    parser.add_argument("--argument", default="0")
    parser.add_argument("--only", default="", help="only shapes whose name matches")
    options = parser.parse_args()
    os.environ[ONLY] = options.only or os.environ.get(ONLY, "")
    if options.part:
        named = options.argument if options.part == "time" else int(options.argument)
        PARTS[options.part](named)
        return
    started, failures = time.monotonic(), []
    report: dict[str, Any] = {"provenance": provenance(), "failures": failures}
    compiled = run_all([Job("compile", str(i), 120) for i in range(WORKERS)], failures)
    report["compile_seconds"] = math.fsum(x.get("seconds", 0) for x in compiled)
    report["times"] = []
    for name in chosen():
        report["times"] += run_all([Job("time", name, 60)], failures)
    # Nothing is timed from here on, so all the rest runs side by side.
    under_check = sanitized()
    fuzzing = [Job("fuzz", str(i), 120) for i in range(WORKERS)]
    sizes, cache = Job("sizes", "0", 120), Job("cache", "0", 60)
    report["fuzz"] = run_all(fuzzing, failures)
    report["cache"], report["sizes"] = run_all([cache], failures), run_all([sizes], failures)
    report["memcheck"] = memcheck(under_check)
    report["seconds"] = time.monotonic() - started
    Path(options.out).mkdir(parents=True, exist_ok=True)
    path = Path(options.out) / "portable_h200.json"
    path.write_text(json.dumps(report, indent=1))
    print(table(report))
    print(f"{report['seconds']:.0f} s, {path}")


if __name__ == "__main__":
    main()
