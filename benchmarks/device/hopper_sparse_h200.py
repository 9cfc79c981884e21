"""Check and time the sparse and latent Hopper kernel on an H200: over bf16 and fp16 rows, and whole
sequences over FP8 pages (hopper_fp8_h200.py has lists of FP8 rows).

    PYTHONPATH=src python benchmarks/device/hopper_sparse_h200.py --out DIR [--section NAME ...]

Sections: correctness, flash_mla, robustness, speed, latent, memcheck; and consan, only when it is
named (sections.py).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from sections import Found, Script, run

import openmla
from openmla import fastpath
from openmla.bench.gpu_timing import race
from openmla.bench.sparse import MATMUL, SHAPES, Inputs, Shape, run_sparse
from openmla.cache import LatentCache
from openmla.dispatch import device_target
from openmla.kernels.launch import launch
from openmla.operands import LatentOperands, Results, SparseOperands
from openmla.plan import plan
from openmla.testing import flash_mla
from openmla.testing.build import BuiltCase, Outcome, build
from openmla.testing.case import Case
from openmla.testing.compare import judge
from openmla.testing.memory import Memory
from openmla.testing.poison import differences

SECONDS = {
    "correctness": 90, "flash_mla": 60, "robustness": 80, "speed": 90, "latent": 60,
    "memcheck": 90, "consan": 300,
}  # fmt: skip
HEADS = (1, 8, 12, 16, 20, 40, 64, 96, 128)
DIMS = ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))
TOPK = (1, 63, 64, 65, 127, 128, 129, 300, 512, 1000)
LISTS = Case("sparse", 12, 512, 64, 512, q_lens=(40,), k_lens=(3000,), topk=200, scale=0.05)
PAGES = Case(
    "latent", 20, 512, 64, 512, q_lens=(70, 33, 5), k_lens=(70, 900, 2), scale=0.05, kv="bf16",
    page_size=64, spare=3,
)  # fmt: skip
CASES_EACH = 6


# Cases. Those of a group share a compiled kernel.


def groups() -> dict[str, list[Case]]:
    """Cases by the process they run in."""
    kinds: dict[str, Case] = {
        "lists": replace(LISTS, index_kind="mixed", spare=5),
        "lists lengths sink": replace(
            LISTS, topk_lengths="wild", sink="mixed", index_kind="duplicates"
        ),
        "lists fp16 max logits": replace(LISTS, dtype="fp16", return_max_logits=True),
        "lists pages": replace(LISTS, kv="bf16", page_size=24, index_kind="mixed"),
        "pages causal": PAGES,
        "pages full sink": replace(PAGES, causal=False, sink="normal", page_size=16),
    }
    for kv in ("fp8_656", "fp8_block64", "fp8_token"):
        kinds[f"pages {kv}"] = replace(PAGES, kv=kv)
    for latent, rope in DIMS[1:]:
        dims: dict[str, Any] = {"d_nope": latent, "d_rope": rope, "d_v": latent}
        kinds[f"lists {latent}+{rope}"] = replace(LISTS, **dims, index_kind="mixed", sink="normal")
        kinds[f"pages {latent}+{rope}"] = replace(PAGES, **dims)
    return {
        name: [varied(case, 100 * seed + i) for i in range(CASES_EACH)]
        for seed, (name, case) in enumerate(kinds.items())
    }


def varied(case: Case, seed: int) -> Case:
    """Any head count, lengths at the edges of blocks, every kind of numbers; always the same."""
    rng = random.Random(seed)
    values = rng.choice(("normal", "normal", "peaky", "rising", "large"))
    case = replace(case, heads=rng.choice(HEADS), values=values, seed=seed)
    if case.form == "sparse":
        return replace(case, topk=rng.choice(TOPK), q_lens=(rng.choice((1, 40, 300)),))
    batch = rng.choice((1, 2, 5))
    q_lens = tuple(rng.choice((0, 1, 3, 64, 130)) for _ in range(batch))
    k_lens = tuple(max(q + rng.choice((0, 1, 64, 300, -q // 2)), 0) for q in q_lens)
    return replace(case, q_lens=q_lens, k_lens=k_lens)


def attend(built: BuiltCase) -> Outcome:
    """The kernel itself; outputs start full of NaN."""
    op, case = built.operands, built.case
    assert isinstance(op, SparseOperands | LatentOperands)
    out = torch.full((*op.q.shape[:2], case.d_v), torch.nan, dtype=op.q.dtype, device="cuda")
    lse = torch.full(op.q.shape[:2], torch.nan, device="cuda")
    logits = lse.clone() if case.return_max_logits else None
    results = Results(out, lse, logits)
    launch(plan(op.problem(results), device_target(op.q.device), "hopper"), op, results)
    return Outcome(out, lse, logits)


# Sections, each in child processes.


def check_group(name: str) -> Iterator[dict[str, Any]]:
    """Every case against float64, with NaN in all other memory, and twice."""
    for case in groups()[name]:
        built = build(case, "cuda")
        outcome = attend(built)
        verdict = judge(built, outcome)
        problems = list(verdict.problems)
        poisoned = attend(build(case, memory=Memory("cuda", "nan")))
        problems += [f"poisoned: {p}" for p in differences(poisoned, outcome)]
        problems += [f"second run: {p}" for p in differences(attend(built), outcome)]
        yield {"case": str(case), "bound": verdict.bound, "row": verdict.worst_row,
               "lse": verdict.lse, "problems": problems}  # fmt: skip


def check_flash_mla(part: str) -> Iterator[dict[str, Any]]:
    """Every fourth case of FlashMLA's conventions."""
    for case in list(flash_mla.cases())[int(part) :: 4]:
        yield {"case": str(case), "problems": flash_mla.problems(case, "cuda")}


def robustness() -> Iterator[dict[str, Any]]:
    """Many launches, graphs, neighbors, large offsets."""
    for check in (many_launches, neighbors, graph, host_time, large_offsets):
        started = time.perf_counter()
        yield {"check": check.__name__, **check(), "seconds": time.perf_counter() - started}


def many_launches() -> dict[str, Any]:
    """1,000 launches, the same bits."""
    different = 0
    for shape in (Shape(128, 300, 4096, 512), Shape(20, 1000, 2048, 130)):
        inputs = Inputs(shape)
        first = inputs.openmla().clone()
        for _ in range(1000):
            different += int(not torch.equal(inputs.openmla(), first))
    return {"launches": 2000, "different": different, "ok": different == 0}


def neighbors() -> dict[str, Any]:
    """A token alone gives the bits it gives among others."""
    inputs = Inputs(Shape(96, 50, 2000, 300))
    whole, wrong = inputs.openmla().clone(), 0
    for token in range(50):
        rows = slice(token, token + 1)
        alone = openmla.mla_prefill_sparse(
            inputs.q[rows], inputs.kv, inputs.indices[rows], scale=576**-0.5, backend="hopper"
        )
        wrong += int(not torch.equal(alone, whole[rows]))  # type: ignore[arg-type]
    return {"different": wrong, "ok": wrong == 0}


def graph() -> dict[str, Any]:
    """Capture, change the inputs, replay."""
    shape = Shape(64, 300, 4096, 512)
    inputs, wrong = Inputs(shape), 0
    inputs.openmla()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        inputs.openmla()
    for seed in range(3):
        fresh = Inputs(shape, seed + 10)
        inputs.q.copy_(fresh.q)
        inputs.indices.copy_(fresh.indices)
        captured.replay()
        got = inputs.out.clone()
        wrong += int(not torch.equal(got, inputs.openmla()))
    return {"different": wrong, "ok": wrong == 0}


def host_time() -> dict[str, Any]:
    """Microseconds before a call returns, without waiting for the GPU: known, and planned anew."""
    inputs, found = Inputs(Shape(128, 64, 8192, 128)), {}
    for name, forget in (("known", False), ("new", True)):
        inputs.openmla()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            if forget:
                fastpath._known.clear()
            inputs.openmla()
        found[name] = (time.perf_counter() - start) / 200 * 1e6
        torch.cuda.synchronize()
    return {"microseconds": found, "ok": found["known"] < found["new"]}


def large_offsets() -> dict[str, Any]:
    """More than 2^31 elements of rows, queries and outputs, more than 65535 tokens."""
    tokens, heads, rows, topk = 70_000, 64, 2**22, 64
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    kv = torch.empty(rows, 576, **make).normal_()
    q = torch.empty(tokens, heads, 576, **make).normal_()
    indices = torch.randint(0, rows, (tokens, topk), device="cuda", dtype=torch.int32)
    indices[:, 0] = rows - 1
    out = openmla.mla_prefill_sparse(q, kv, indices, scale=0.04, backend="hopper")
    assert isinstance(out, torch.Tensor)
    named = indices[-64:].long()
    own = torch.arange(64 * topk, device="cuda", dtype=torch.int32).view(64, topk)
    alone = openmla.mla_prefill_sparse(
        q[-64:].clone(), kv[named.flatten()], own, scale=0.04, backend="hopper"
    )
    smallest = min(kv.numel(), q.numel(), out.numel())
    same = torch.equal(out[-64:], alone)  # type: ignore[arg-type]
    return {"elements": smallest, "ok": same and smallest > 2**31}


def speed(rounds: int) -> Iterator[dict[str, Any]]:
    for row in run_sparse(rounds, SHAPES):
        yield row.to_json()


# A chunk of tokens at the end of a sequence: heads, tokens, keys, format of the cache.
CHUNKS = (
    (128, 4096, 32768, "bf16"), (128, 512, 32768, "bf16"), (128, 128, 32768, "bf16"),
    (16, 2048, 65536, "bf16"), (128, 1024, 32768, "fp8_656"),
)  # fmt: skip


def chunk_call(heads: int, tokens: int, keys: int, form: str) -> Callable[[str], torch.Tensor]:
    """The chunk's attention over scattered pages, by backend."""
    pages = keys // 64
    cache = LatentCache.allocate(num_pages=pages, page_size=64, format=form, device="cuda")
    rows = torch.randn(keys, 576, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(pages, device="cuda", dtype=torch.int32)
    slots = (order[:, None] * 64 + torch.arange(64, device="cuda")).flatten().long()
    cache.append(rows[:, :512], rows[:, 512:], slots)
    q = torch.randn(tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
    lengths = torch.tensor([keys], device="cuda", dtype=torch.int32)
    cu = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)

    def call(backend: str) -> torch.Tensor:
        out = openmla.mla_prefill_latent(
            q, cache, order[None], lengths, cu_seqlens_q=cu, scale=576**-0.5, backend=backend
        )
        assert isinstance(out, torch.Tensor)
        return out

    return call


def latent(rounds: int) -> Iterator[dict[str, Any]]:
    """Whole sequences over pages, beside the portable kernel."""
    a, b = (torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for heads, tokens, keys, form in CHUNKS:
        call = chunk_call(heads, tokens, keys, form)
        got, other = (call(name).float() for name in ("hopper", "portable"))
        contestants = {name: partial(call, name) for name in ("hopper", "portable")}
        times = race({**contestants, "matmul": partial(torch.mm, a, b)}, max(rounds // 3, 2))
        flops = 2.0 * heads * 1088 * (tokens * (keys - tokens) + tokens * (tokens + 1) / 2)
        matmul = 2.0 * MATMUL**3 / times["matmul"].median
        yield {
            "chunk": f"{tokens} tokens of {keys}, {heads} heads, {form}",
            "milliseconds": {name: t.median for name, t in times.items()},
            "share": {name: flops / times[name].median / matmul for name in contestants},
            "ok": bool((got - other).norm() < 0.01 * other.norm()),
        }


def sanitize(count: int) -> None:
    """What runs under a sanitizer: so many small cases, one of each group in turn."""
    listed = [case for group in zip(*groups().values(), strict=True) for case in group]
    for case in listed[:count]:
        small = {"q_lens": tuple(min(q, 9) for q in case.q_lens), "topk": min(case.topk, 300)}
        attend(build(replace(case, **small), "cuda"))  # type: ignore[arg-type]


def groups_of(section: str) -> list[str]:
    """The processes of a section."""
    many = {"correctness": list(groups()), "flash_mla": [str(part) for part in range(4)]}
    return many.get(section, [""])


def report(section: str, found: Found) -> None:
    """What a person wants to see."""
    for name, group in found.items():
        results = group["results"]
        bad = [r for r in results if r.get("problems") or not r.get("ok", True)]
        print(f"{name:32s} {len(results)} results, {len(bad)} wrong, {group['ended']}")
        for r in bad[:4]:
            print("    " + json.dumps(r)[:600])
        if section == "latent":
            for r in results:
                share = ", ".join(f"{n} {x:.3f}" for n, x in r["share"].items())
                print(f"  {r['chunk']:44s} {share} of the matmul")
        if section == "speed":
            for r in results:
                print(f"  {r['shape']:40s} {r['timings']['openmla']['median']:.3f} ms "
                      f"{r['tflops']:.0f} of {r['matmul_tflops']:.0f} = {r['share']:.3f} (in a row "
                      f"{r['share_back_to_back']:.3f}, bar {r['bar']}) "
                      f"{r['gather_tb_per_s']:.2f} TB/s")  # fmt: skip
        if group["tail"]:
            print(group["tail"])


if __name__ == "__main__":
    run(
        Script(
            __file__,
            SECONDS,
            groups=groups_of,
            sources={
                "correctness": lambda name, _: check_group(name),
                "flash_mla": lambda name, _: check_flash_mla(name),
                "robustness": lambda *_: robustness(),
                "speed": lambda _, rounds: speed(rounds),
                "latent": lambda _, rounds: latent(rounds),
            },
            sanitize=sanitize,
            sanitized=28,
            report=report,
        )
    )
