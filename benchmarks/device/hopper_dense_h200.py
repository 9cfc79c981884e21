"""Check and time the dense Hopper kernel on an H200.

    PYTHONPATH=src python benchmarks/device/hopper_dense_h200.py --out DIR [--section NAME ...]

Sections: correctness, robustness, speed, memcheck; and consan, only when it is named (sections.py).
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sections import Found, Script, run

import openmla
from openmla.bench.dense import SHAPES, Inputs, Shape, matmul_tflops, run_dense
from openmla.dispatch import device_target
from openmla.kernels.launch import launch
from openmla.operands import DenseOperands, Results
from openmla.plan import plan
from openmla.reference import dense as reference_dense
from openmla.testing.build import BuiltCase, Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import compare
from openmla.testing.memory import Memory
from openmla.testing.poison import differences

DIMS = ((128, 64, 128), (192, 64, 256), (64, 64, 128), (128, 0, 128), (256, 0, 256), (64, 32, 64))
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 300, 511, 640)
SECONDS = {"correctness": 90, "robustness": 90, "speed": 120, "memcheck": 120, "consan": 580}


# Cases. One profile is one compiled kernel; its cases differ in lengths, heads and numbers.


class Profile(NamedTuple):
    """Options that are compiled in: fields of a Case, and the number of query tiles."""

    dims: tuple[int, int, int]
    num_qo: int
    options: dict[str, Any]


def profiles() -> dict[str, Profile]:
    """What is compiled, by name."""
    v3, found = DIMS[0], {}
    pages = {"rope": "cache", "kv": "bf16"}
    found["V3 causal 2Q"] = Profile(v3, 2, {})
    found["V3 causal 1Q"] = Profile(v3, 1, {"return_lse": False})
    found["V3 full fp16 sink 2Q"] = Profile(
        v3, 2, {"causal": False, "dtype": "fp16", "sink": "mixed"}
    )
    found["V3 per head, negative scale"] = Profile(v3, 2, {"rope": "per_head", "scale": -0.1})
    found["V3 pages of 64"] = Profile(v3, 2, {**pages, "page_size": 64, "sink": "normal"})
    found["V3 pages of 16"] = Profile(v3, 1, {**pages, "page_size": 16})
    found["V3 pages of 256"] = Profile(v3, 2, {**pages, "page_size": 256})
    for dims in DIMS[1:]:
        name = "+".join(map(str, dims[:2])) + f"-{dims[2]}"
        none: dict[str, Any] = {} if dims[1] else {"rope": "none"}
        found[f"{name} causal 2Q"] = Profile(dims, 2, none)
        other = {**pages, "page_size": 48} if dims[1] else {**none, "dtype": "fp16"}
        found[f"{name} full 1Q"] = Profile(dims, 1, {**other, "causal": False, "sink": "normal"})
    return found


def covering_cases(profile: Profile, count: int, seed: int) -> list[Case]:
    """Lengths at tile edges, any head count, every kind of numbers; always the same."""
    rng = random.Random(seed)
    cases = []
    for number in range(count):
        batch = rng.choice((1, 2, 3, 5))
        q_lens = tuple(rng.choice((0, *EDGES)) for _ in range(batch))
        k_lens = tuple(
            max(q + rng.choice((0, 0, 1, 64, 300, -q // 2)), 0) if rng.random() < 0.9 else 0
            for q in q_lens
        )
        if not sum(q_lens) or not sum(k_lens):
            q_lens, k_lens = (129,), (257,)
        values = rng.choice(("normal", "normal", "peaky", "rising", "large"))
        case = Case(
            "dense", rng.choice((1, 2, 3, 5, 8)), *profile.dims, q_lens, k_lens, values=values,
            spare=rng.choice((0, 0, 1, 7)), seed=seed * 1000 + number,
            rope="shared" if profile.dims[1] else "none",
        )  # fmt: skip
        cases.append(replace(case, **profile.options))
    return cases


def split_cases() -> list[Case]:
    """Short chunks on long contexts: these go through partial sums and a merge."""
    base = Case("dense", 2, 128, 64, 128, q_lens=(64,), k_lens=(9000,))
    return [
        base,
        replace(base, q_lens=(1,), k_lens=(16384,), heads=1),
        replace(base, q_lens=(200, 64, 300), k_lens=(8200, 300, 300), spare=3),
        replace(base, heads=8, q_lens=(512,), k_lens=(4096,)),
        replace(base, q_lens=(130,), k_lens=(5000,), causal=False, dtype="fp16", sink="normal"),
        replace(base, q_lens=(33,), k_lens=(6000,), rope="cache", kv="bf16", page_size=64),
        replace(base, d_nope=192, d_v=256, q_lens=(64,), k_lens=(4700,)),
        replace(base, d_nope=64, d_rope=32, d_v=64, q_lens=(64,), k_lens=(4200,), values="rising"),
    ]


CASES_EACH = 5


def groups() -> dict[str, list[tuple[Case, int]]]:
    """Cases with their number of query tiles (0: the plan's choice), by the process they run in."""
    found = {
        name: [(case, p.num_qo) for case in covering_cases(p, CASES_EACH, seed)]
        for seed, (name, p) in enumerate(profiles().items(), start=1)
    }
    split = [(case, 0) for case in split_cases()]
    found |= {"split same kernel": split[:4], "split a": split[4:6], "split b": split[6:]}
    return {**found, "split 2Q": [(case, 2) for case in split_cases()[:3]]}


def attend(built: BuiltCase, num_qo: int = 0) -> Outcome:
    """The kernel with a given number of query tiles; out starts full of NaN."""
    op, case = built.operands, built.case
    assert isinstance(op, DenseOperands)
    out = torch.full((*op.q.shape[:2], case.d_v), torch.nan, dtype=op.q.dtype, device="cuda")
    lse = torch.full(op.q.shape[:2], torch.nan, device="cuda") if case.return_lse else None
    results = Results(out, lse)
    chosen = plan(op.problem(results), device_target(op.q.device), "hopper")
    if num_qo:
        chosen = replace(chosen, config=chosen.config.with_num_qo(num_qo))
    launch(chosen, op, results)
    return Outcome(out, lse)


def strided(built: BuiltCase) -> BuiltCase:
    """K and V as views of one projection's output, as in a model; Q and rope with row gaps."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    tokens, heads, d_nope = op.k_nope.shape
    both = torch.full((tokens, heads, d_nope + op.v.shape[2]), torch.nan).to(op.q)
    both[..., :d_nope] = op.k_nope
    both[..., d_nope:] = op.v
    wide = torch.full((*op.q.shape[:2], op.q.shape[2] + 8), torch.nan).to(op.q)
    wide[..., : op.q.shape[2]] = op.q
    changed = {"q": wide[..., : op.q.shape[2]], "k_nope": both[..., :d_nope]}
    changed["v"] = both[..., d_nope:]
    operands = replace(op, **changed)
    return replace(built, operands=operands, arguments={**built.arguments, **changed})


# Correctness, in a child process.


def check_group(name: str) -> Iterator[dict[str, Any]]:
    """Every case of a group against float64, twice, with NaN in all other memory, and strided."""
    for number, (case, num_qo) in enumerate(groups()[name]):
        built = build(case, "cuda")
        outcome = attend(built, num_qo)
        truth = reference_dense(build(case).operands)
        verdict = compare(outcome, truth)
        problems = list(verdict.problems)
        if number % 2 == 0 and case.rope != "cache":
            problems += [
                f"strided: {p}" for p in differences(attend(strided(built), num_qo), outcome)
            ]
        poisoned = attend(build(case, memory=Memory("cuda", "nan")), num_qo)
        problems += [f"poisoned: {p}" for p in differences(poisoned, outcome)]
        problems += [f"second run: {p}" for p in differences(attend(built, num_qo), outcome)]
        yield {"case": str(case), "num_qo": num_qo, "bound": verdict.bound,
               "row": verdict.worst_row, "lse": verdict.lse, "problems": problems}  # fmt: skip


# Robustness, in a child process.


def robustness() -> Iterator[dict[str, Any]]:
    """Many launches, graphs, neighbors, large offsets, host time."""
    for check in (many_launches, neighbors, graph, streams, host_time, large_offsets):
        started = time.perf_counter()
        yield {"check": check.__name__, **check(), "seconds": time.perf_counter() - started}


def many_launches() -> dict[str, Any]:
    """1,000 launches, the same bits."""
    shapes = (Shape(16, 512, 512, batch=3), Shape(4, 64, 16384), Shape(8, 1000, 1000))
    different = 0
    for shape in shapes:
        inputs = Inputs(shape)
        first = inputs.openmla().clone()
        for _ in range(1000):
            different += int(not torch.equal(inputs.openmla(), first))
    return {"launches": 1000 * len(shapes), "different": different, "ok": different == 0}


def neighbors() -> dict[str, Any]:
    """A request alone gives the bits it gives in any batch."""
    generator = torch.Generator().manual_seed(5)
    lens_q, lens_k = [64, 300, 1, 700, 128, 40], [9000, 300, 513, 1400, 128, 5000]
    heads = 8
    wrong = 0
    q, k, rope, v = (
        torch.randn(n, *rest, generator=generator).bfloat16().cuda()
        for n, rest in (
            (sum(lens_q), (heads, 192)), (sum(lens_k), (heads, 128)), (sum(lens_k), (64,)),
            (sum(lens_k), (heads, 128)),
        )
    )  # fmt: skip
    cu = [torch.tensor([0, *torch.tensor(x).cumsum(0)]).int().cuda() for x in (lens_q, lens_k)]
    whole, lse = openmla.mla_prefill(
        q, k, rope, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True, backend="hopper"
    )
    for b in range(len(lens_q)):
        rows = slice(int(cu[0][b]), int(cu[0][b + 1]))
        keys = slice(int(cu[1][b]), int(cu[1][b + 1]))
        alone = [torch.tensor([0, n]).int().cuda() for n in (lens_q[b], lens_k[b])]
        out, own = openmla.mla_prefill(
            q[rows], k[keys], rope[keys], v[keys], cu_seqlens_q=alone[0], cu_seqlens_k=alone[1],
            return_lse=True, backend="hopper",
        )  # fmt: skip
        wrong += int(not torch.equal(out, whole[rows])) + int(not torch.equal(own, lse[rows]))
    return {"different": wrong, "ok": wrong == 0}


def graph() -> dict[str, Any]:
    """Capture, change the inputs, replay."""
    wrong = 0
    for shape in (Shape(16, 512, 512, batch=2), Shape(4, 64, 16384)):
        inputs = Inputs(shape)
        inputs.openmla()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            inputs.openmla()
        for seed in range(3):
            fresh = Inputs(shape, seed + 10)
            inputs.q.copy_(fresh.q)
            inputs.v.copy_(fresh.v)
            captured.replay()
            got = inputs.out.clone()
            wrong += int(not torch.equal(got, inputs.openmla()))
    return {"different": wrong, "ok": wrong == 0}


def streams() -> dict[str, Any]:
    """Two streams at once do not share a counter."""
    inputs = [Inputs(Shape(16, 1024, 1024), seed) for seed in range(2)]
    expected = [x.openmla().clone() for x in inputs]
    lanes = [torch.cuda.Stream() for _ in inputs]
    wrong = 0
    torch.cuda.synchronize()
    for _ in range(50):
        for x, lane in zip(inputs, lanes, strict=True):
            with torch.cuda.stream(lane):
                x.openmla()
        torch.cuda.synchronize()
        pairs = zip(inputs, expected, strict=True)
        wrong += sum(int(not torch.equal(x.out, y)) for x, y in pairs)
    return {"different": wrong, "ok": wrong == 0}


def host_time() -> dict[str, Any]:
    """Microseconds of the public call before it returns, without waiting for the GPU."""
    plain, split = Shape(16, 256, 256), Shape(4, 64, 16384)
    found = {name: _host_time([Inputs(x)]) for name, x in {"plain": plain, "split": split}.items()}
    # Token counts and addresses that were never seen before, in every call.
    others = [Inputs(replace(plain, q_len=n, k_len=n)) for n in range(128, 428)]
    found["new counts"] = _host_time(others)
    return {"microseconds": found, "ok": max(found["plain"], found["new counts"]) < 50}


def _host_time(inputs: list[Inputs]) -> float:
    for x in (inputs[0], inputs[-1]) * 10:
        x.openmla()
    torch.cuda.synchronize()
    samples = []
    for number in range(300):
        x = inputs[number % len(inputs)]
        start = time.perf_counter()
        x.openmla()
        samples.append((time.perf_counter() - start) * 1e6)
        if number % 50 == 0:
            torch.cuda.synchronize()
    return statistics.median(samples)


def large_offsets() -> dict[str, Any]:
    """More than 2^31 elements in q, k, v and out: the last request has the bits it has alone."""
    heads, length, count = 128, 1025, 129
    shape = Shape(heads, length, length, batch=count)
    tokens = length * count
    make = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.empty(tokens, heads, 192, **make).normal_()
    k, v = (torch.empty(tokens, heads, 128, **make).normal_() for _ in range(2))
    rope = torch.empty(tokens, 64, **make).normal_()
    cu = torch.arange(0, tokens + 1, length, device="cuda", dtype=torch.int32)
    out, lse = openmla.mla_prefill(
        q, k, rope, v, cu_seqlens_q=cu, return_lse=True, backend="hopper"
    )
    smallest = min(q.numel(), k.numel(), v.numel(), out.numel())
    last = slice(tokens - length, tokens)
    alone, own = openmla.mla_prefill(
        q[last].clone(), k[last].clone(), rope[last].clone(), v[last].clone(),
        cu_seqlens_q=cu[:2], return_lse=True, backend="hopper",
    )  # fmt: skip
    same = torch.equal(alone, out[last]) and torch.equal(own, lse[last])
    # And with heads far apart: [heads, tokens, d] seen as [tokens, heads, d].
    apart = v.transpose(0, 1).contiguous().transpose(0, 1)
    again = openmla.mla_prefill(q, k, rope, apart, cu_seqlens_q=cu, backend="hopper")
    same = same and torch.equal(again, out)
    return {"shape": str(shape), "elements": smallest, "ok": same and smallest > 2**31}


# Speed, in a child process.


def speed(rounds: int) -> Iterator[dict[str, Any]]:
    yield {"matmul_tflops": matmul_tflops(rounds)}
    for row in run_dense(rounds, SHAPES):
        yield row.to_json()
    yield {"matmul_tflops": matmul_tflops(rounds)}


# Sanitizers, in children of their own.


def sanitize_cases(count: int) -> None:
    """What runs under a sanitizer: so many small covering cases, and a split one after several."""
    small = (
        (replace(case, q_lens=tuple(min(q, 130) for q in case.q_lens),
                 k_lens=tuple(min(k, 260) for k in case.k_lens)), profile.num_qo)
        for seed, profile in enumerate(profiles().values(), start=300)
        for case in covering_cases(profile, 2, seed)
    )  # fmt: skip
    for case, num_qo in itertools.islice(small, count):
        attend(build(case, "cuda"), num_qo)
    if count > 1:
        attend(build(split_cases()[0], "cuda"))


def report_correctness(found: Found) -> None:
    for name, group in found.items():
        bad = [r for r in group["results"] if r["problems"]]
        worst = max((r["bound"] for r in group["results"]), default=0.0)
        expected = len(groups()[name.partition(":")[2]])
        print(f"{name:30s} {len(group['results'])}/{expected} cases, {len(bad)} wrong, "
              f"bound {worst:.2f}, {group['ended']}")  # fmt: skip
        for r in bad[:4]:
            print(f"    {r['case']}\n      " + "\n      ".join(r["problems"][:3]))
        if group["tail"]:
            print(group["tail"])


def report_speed(results: list[dict[str, Any]]) -> None:
    for r in results:
        if "matmul_tflops" in r:
            print(f"matmul {r['matmul_tflops']:.0f} TFLOP/s")
            continue
        ours = r["timings"]["openmla"]
        bars = f"bars {r['bar_kernel']:.2f}/{r['bar_layer']:.2f}" if r["bar_kernel"] else ""
        peer = f"{r['tflops']['cudnn']:5.0f}" if "cudnn" in r["tflops"] else "    -"
        print(f"{r['shape']:38s} {ours['median']:8.3f} ms {r['tflops']['openmla']:5.0f} "
              f"cudnn {peer} kernel {r['kernel']:.3f} (row {r['kernel_back_to_back']:.3f}) "
              f"layer {r['layer']:.3f} (row {r['layer_back_to_back']:.3f}) {bars}")  # fmt: skip


def report(section: str, found: Found) -> None:
    """What a person wants to see."""
    if section == "correctness":
        report_correctness(found)
        return
    group = found[section]
    if section == "speed":
        report_speed(group["results"])
    else:
        for result in group["results"]:
            print(json.dumps(result))
    if group["tail"]:
        print(group["ended"], group["tail"])


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
            sanitized=24,
            report=report,
        )
    )
