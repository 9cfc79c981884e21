"""Check and time the sparse Hopper kernel over FP8 caches on an H200.

    PYTHONPATH=src python benchmarks/device/hopper_fp8_h200.py --out DIR [--section NAME ...]

Sections: correctness, robustness, speed, memcheck; and consan, only when it is named (sections.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from sections import Found, Script, run

from openmla.bench.gpu_timing import race
from openmla.cache import LatentCache
from openmla.dispatch import device_target
from openmla.kernels.hopper.sparse_launch import calls
from openmla.operands import Results, SparseOperands, Weights
from openmla.plan import Plan, hopper_cache, plan
from openmla.reference import sparse as reference_sparse
from openmla.testing.build import Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import compare
from openmla.testing.memory import Memory
from openmla.testing.poison import differences

SECONDS = {"speed": 75, "correctness": 75, "robustness": 60, "memcheck": 100, "consan": 580}
MATMUL = 8192
FUSED_BAR = 0.40
MODES = ("in_kernel", "workspace")

BASE = Case(
    "sparse", 20, 512, 64, 512, q_lens=(70,), k_lens=(3000,), topk=389, scale=0.05, spare=3,
    kv="fp8_656", page_size=64, index_kind="mixed",
)  # fmt: skip
FORMATS = ("fp8_656", "fp8_block32", "fp8_block64", "fp8_block128", "fp8_token")
NARROW = {
    "512+0": replace(BASE, kv="fp8_block64", d_rope=0, rope="none"),
    "256+64": replace(BASE, kv="fp8_block128", d_nope=256, d_v=256),
    "256+32": replace(BASE, kv="fp8_block32", d_nope=256, d_rope=32, d_v=256),
    "128+32": replace(BASE, kv="fp8_token", d_nope=128, d_rope=32, d_v=128),
}


def groups() -> dict[str, list[Case]]:
    """Cases by the process they run in; those of a group share a compiled kernel."""
    found = {
        name: [
            replace(BASE, kv=name),
            replace(BASE, kv=name, heads=128, topk=1001, values="peaky", q_lens=(16,)),
            replace(BASE, kv=name, heads=1, topk=1, index_kind="distinct"),
            replace(BASE, kv=name, heads=96, topk=64, index_kind="invalid"),
        ]
        for name in FORMATS
    }
    found |= {name: [case, replace(case, heads=65, topk=700)] for name, case in NARROW.items()}
    return found


def launch(chosen: Plan, op: SparseOperands, results: Results) -> None:
    """Run what a plan lists."""
    for call in calls(chosen, op, results):
        call.run()


def with_mode(chosen: Plan, mode: str) -> Plan:
    read = replace(chosen.config.cache_read, mode=mode)
    return replace(chosen, config=replace(chosen.config, cache_read=read))


def attend(op: SparseOperands, mode: str) -> Outcome:
    """One way of reading the cache; out starts full of NaN."""
    out = torch.full((*op.q.shape[:2], op.d_v), torch.nan, dtype=op.q.dtype, device="cuda")
    rows = torch.full(op.q.shape[:2], torch.nan, device="cuda")
    results = Results(out, rows)
    chosen = plan(op.problem(results), device_target(op.q.device), "hopper")
    launch(with_mode(chosen, mode), op, results)
    return Outcome(out, rows)


# Correctness, in a child process.


def check_group(name: str) -> Iterator[dict[str, Any]]:
    """Every case both ways: against float64, with NaN elsewhere, twice, and past a full space."""
    cap = hopper_cache.WORKSPACE_CAP
    for case in groups()[name]:
        op = build(case, "cuda").operands
        assert isinstance(op, SparseOperands)
        fused = attend(op, "in_kernel")
        verdict = compare(fused, reference_sparse(build(case).operands))
        problems = list(verdict.problems)
        poisoned = build(case, memory=Memory("cuda", "nan")).operands
        assert isinstance(poisoned, SparseOperands)
        for mode in MODES:
            problems += [f"{mode}: {p}" for p in differences(attend(poisoned, mode), fused)]
        for rows in (40, 2500):
            hopper_cache.WORKSPACE_CAP = rows * 2 * op.q.shape[2]
            small = attend(op, "workspace")
            problems += [f"room for {rows}: {p}" for p in differences(small, fused)]
        hopper_cache.WORKSPACE_CAP = cap
        problems += [f"second run: {p}" for p in differences(attend(op, "in_kernel"), fused)]
        yield {"case": str(case), "bound": verdict.bound, "row": verdict.worst_row,
               "problems": problems}  # fmt: skip


# Speed, in a child process.


@dataclass(frozen=True)
class Shape:
    """Queries over lists of rows from a region of `region` rows of a pool."""

    queries: int
    region: int = 8192
    pool: int = 1_000_000
    topk: int = 2048
    heads: int = 128
    cache_format: str = "fp8_656"

    @property
    def flops(self) -> float:
        return 2.0 * self.queries * self.heads * self.topk * (576 + 512)

    def operands(self) -> SparseOperands:
        """Rows outside the region, and their scales, are NaN."""
        generator = torch.Generator("cuda").manual_seed(1)
        pages = self.pool // 64
        cache = LatentCache.allocate(
            num_pages=pages, page_size=64, format=self.cache_format, device="cuda"
        )
        cache.data.view(torch.uint8).fill_(255)
        if cache.scales is not None:
            cache.scales.fill_(torch.nan)
        rows = torch.randperm(cache.rows, generator=generator, device="cuda")[: self.region]
        latent, rope = (
            torch.randn(self.region, width, generator=generator, device="cuda").bfloat16()
            for width in (512, 64)
        )
        cache.append(latent, rope, rows.sort().values)
        chance = torch.rand(self.queries, self.region, generator=generator, device="cuda")
        indices = rows.sort().values[chance.topk(self.topk).indices].int()
        q = torch.randn(self.queries, self.heads, 576, generator=generator, device="cuda")
        return SparseOperands(q.bfloat16(), cache, indices, None, 512, Weights(576**-0.5))


class Inputs:
    """A shape's tensors, and ways to compute it."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.op = shape, shape.operands()
        self.out = torch.empty(shape.queries, shape.heads, 512, device="cuda").bfloat16()
        self.results = Results(self.out, torch.empty(shape.queries, shape.heads, device="cuda"))
        problem = self.op.problem(self.results)
        self.chosen = plan(problem, device_target(self.out.device), "hopper")

    def run(self, mode: str = "") -> torch.Tensor:
        """The plan's way, or a given one."""
        launch(with_mode(self.chosen, mode) if mode else self.chosen, self.op, self.results)
        return self.out

    def bf16(self) -> Callable[[], None]:
        """The same attention over rows that are bf16 already, named by the same lists."""
        space = self.op.cache
        assert isinstance(space, LatentCache)
        named, lists = torch.unique(self.op.indices.long(), return_inverse=True)
        rows = space.gather(named)
        op = replace(self.op, cache=rows, indices=lists.int())
        results = Results(torch.empty_like(self.out), torch.empty_like(self.results.lse))
        chosen = plan(op.problem(results), device_target(self.out.device), "hopper")
        return lambda: launch(chosen, op, results)

    def fused(self, registers: tuple[int, int]) -> Callable[[], object]:
        """Widening in the kernel, with registers divided otherwise."""
        (call,) = calls(with_mode(self.chosen, "in_kernel"), self.op, self.results)
        call.arguments["REGISTERS"] = registers
        return call.run

    def stages(self) -> dict[str, float]:
        """Milliseconds of each kernel of the workspace, as they follow each other."""
        sums: dict[str, float] = {}
        for number in range(6):
            marks = []
            for call in calls(with_mode(self.chosen, "workspace"), self.op, self.results):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                call.run()
                end.record()
                marks.append((call.kernel.fn.__name__, call.arguments.get("SCALED", 0), start, end))
            torch.cuda.synchronize()
            for name, scaled, start, end in marks if number else ():
                key = f"{name}{' widening' if scaled else ''}"
                sums[key] = sums.get(key, 0.0) + start.elapsed_time(end) / 5
        return sums


def speed(rounds: int) -> Iterator[dict[str, Any]]:
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda").bfloat16() for _ in range(2))
    shapes = {
        "many, pool of 1000000": (Shape(4096), ("", "workspace"), 0.80),
        "64 queries": (Shape(64, pool=8192), MODES, FUSED_BAR),
        "256 queries": (Shape(256), MODES, 0.0),
        "1024 queries": (Shape(1024, region=65536), MODES, 0.0),
        "64 queries, fp8_block64": (Shape(64, pool=8192, cache_format="fp8_block64"), MODES, 0.0),
    }
    for name, (shape, modes, bar) in shapes.items():
        inputs = Inputs(shape)
        contestants: dict[str, Callable[[], object]] = {"matmul": lambda: torch.mm(a, b)}
        for mode in modes:
            contestants[mode or "plan"] = lambda x=inputs, m=mode: x.run(m)
        contestants["bf16 rows"] = inputs.bf16()
        if bar == FUSED_BAR:
            contestants["in_kernel 208/88"] = inputs.fused((208, 88))
        timings = race(contestants, rounds)
        ceiling = 2.0 * MATMUL**3 / timings["matmul"].median
        in_a_row = 2.0 * MATMUL**3 / timings["matmul"].back_to_back
        row: dict[str, Any] = {
            "shape": f"{name}: {shape}", "bar": bar, "plan": inputs.chosen.config.cache_read.mode,
            "matmul_tflops": ceiling * 1e-9,
        }  # fmt: skip
        for contestant, t in timings.items():
            row[contestant] = {
                "ms": t.median, "share": shape.flops / t.median / ceiling,
                "share_in_a_row": shape.flops / t.back_to_back / in_a_row,
            }  # fmt: skip
        same = torch.equal(inputs.run("in_kernel").clone(), inputs.run("workspace"))
        row |= {"same_bits": same and not bool(inputs.out.isnan().any())}
        yield row
        yield {"stages": inputs.stages()}
        del inputs, contestants


# Robustness, in a child process.


def robustness() -> Iterator[dict[str, Any]]:
    for check in (many_launches, graph, host_time, large_offsets):
        started = time.perf_counter()
        yield {"check": check.__name__, **check(), "seconds": time.perf_counter() - started}


def many_launches() -> dict[str, Any]:
    """1,000 launches either way, the same bits."""
    different = 0
    inputs = Inputs(Shape(300, region=4096, pool=64 * 100, heads=64, topk=400))
    first = inputs.run("in_kernel").clone()
    for _ in range(1000):
        for mode in MODES:
            different += int(not torch.equal(inputs.run(mode), first))
    return {"launches": 2000, "different": different, "ok": different == 0}


def graph() -> dict[str, Any]:
    """Capture, change lists and queries, replay."""
    wrong = 0
    inputs = Inputs(Shape(300, region=4096, pool=64 * 2000, heads=64, topk=400))
    for mode in MODES:
        inputs.run(mode)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            inputs.run(mode)
        for seed in range(3):
            inputs.op.q.normal_()
            inputs.op.indices.copy_(inputs.op.indices.roll(seed + 1, 0))
            inputs.op.indices[:, seed] = -1
            captured.replay()
            got = inputs.out.clone()
            wrong += int(not torch.equal(got, inputs.run(mode)))
    return {"different": wrong, "ok": wrong == 0}


def host_time() -> dict[str, Any]:
    """Microseconds before a call returns, without waiting for the GPU."""
    inputs = Inputs(Shape(64, region=4096, pool=64 * 100, topk=128, heads=64))
    found = {}
    for mode in MODES:
        for _ in range(20):
            inputs.run(mode)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            inputs.run(mode)
        found[mode] = (time.perf_counter() - start) * 1e4
        torch.cuda.synchronize()
    return {"microseconds": found, "ok": True}


def large_offsets() -> dict[str, Any]:
    """A cache of more than 2^31 bytes: lists name its last rows."""
    shape = Shape(64, region=8192, pool=64 * 60000, heads=16, topk=300)
    inputs = Inputs(shape)
    cache = inputs.op.cache
    assert isinstance(cache, LatentCache)
    outs = [inputs.run(mode).clone() for mode in MODES]
    named, lists = torch.unique(inputs.op.indices.long(), return_inverse=True)
    op = replace(inputs.op, cache=cache.gather(named), indices=lists.int())
    results = Results(torch.empty_like(inputs.out), torch.empty_like(inputs.results.lse))
    launch(plan(op.problem(results), device_target(inputs.out.device), "hopper"), op, results)
    same = all(torch.equal(out, results.out) for out in outs)
    return {"bytes": cache.data.numel(), "ok": same and cache.data.numel() > 2**31}


def sanitize_cases(count: int) -> None:
    """What runs under a sanitizer: so many small cases, in each way."""
    for case in (BASE, NARROW["256+32"])[:count]:
        small = replace(case, q_lens=(9,), topk=150, heads=12)
        op = build(small, "cuda").operands
        assert isinstance(op, SparseOperands)
        for mode in MODES:
            attend(op, mode)


def report(_section: str, found: Found) -> None:
    for name, group in found.items():
        print(f"{name}: {group['ended']}, {len(group['results'])} results {group['tail']}")
        for r in group["results"]:
            if "problems" not in r:
                print("   " + json.dumps(r))
            elif r["problems"]:
                print(f"   {r['case']}\n      " + "\n      ".join(r["problems"][:4]))
        bounds = [r["bound"] for r in group["results"] if "bound" in r]
        if bounds:
            bad = sum(bool(r["problems"]) for r in group["results"])
            print(f"   {len(bounds)} cases, {bad} wrong, bound {max(bounds):.2f}")


if __name__ == "__main__":
    run(
        Script(
            __file__,
            SECONDS,
            groups=lambda section: list(groups()) if section == "correctness" else [""],
            sources={
                "correctness": lambda name, _: check_group(name),
                "robustness": lambda *_: robustness(),
                "speed": lambda _, rounds: speed(rounds),
            },
            sanitize=sanitize_cases,
            sanitized=2,
            report=report,
        )
    )
