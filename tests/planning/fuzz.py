"""Random problems against the planner: `python tests/planning/fuzz.py --problems 1000000`.

Every problem is planned on a random target with a random backend. The answer must be a plan within
the target's budget or `Unsupported` with a reason, and the same when asked again.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.problem import IndexProblem
from openmla.planning import BACKENDS, cached_plan
from openmla.planning.budget import over_budget
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import Plan
from openmla.planning.target import TARGETS, target_by_name
from openmla.problem import CACHE_FORMATS, Problem

choose_plan = cached_plan.__wrapped__  # the planner, not what it said before

_TARGETS = (*TARGETS, "sm_86:84x101376", "sm_100:152x232448", "sm_75:40x65536", "gfx90a:104x65536")
DENSE_DIMS = (
    (128, 64, 128),
    (192, 64, 256),
    (64, 64, 128),
    (128, 0, 128),
    (256, 0, 256),
    (64, 32, 64),
)
LATENT_DIMS = ((512, 64), (512, 0), (256, 64), (256, 32), (128, 32))
_ODD_WIDTHS = (1, 8, 16, 24, 40, 48, 80, 96, 112, 160, 224, 320, 384, 448, 576, 1024, 2048)
_LENGTHS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 512, 1000, 4096, 8192, 65536, 131072, 2**20, 2**33)
_PAGES = (0, 1, 7, 8, 16, 32, 48, 64, 96, 128, 256, 1024)
_ELEMENTS = ("bf16", "bf16", "bf16", "fp16", "e4m3", "e4m3", "fp32")
_ROW_DTYPES = (*CACHE_FORMATS, "bf16", "fp16", "e4m3")


@dataclass
class Tally:
    """What came out, and the first findings."""

    answers: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)


def random_step(rng: random.Random) -> IndexProblem:
    """A legal step of the indexer, with lengths at the edges."""
    flags = ("add_starts", "keeps", "wants_counts", "wants_mask")
    return IndexProblem(
        form=rng.choice(("scores", "select")),
        heads=rng.choice((1, 16, 32, 64, 128, rng.randint(1, 128))),
        page_size=rng.choice(_PAGES),
        topk=rng.choice((1, 64, 2048, 4097, 8192, rng.randint(1, 2**20))),
        total_q=rng.choice(_LENGTHS),
        width=rng.choice(_LENGTHS),
        batch=rng.choice((0, 1, 2, 128, 4096)),
        aligned_16=rng.random() < 0.8,
        **{flag: rng.random() < 0.3 for flag in flags},
    )


def random_problem(rng: random.Random) -> AnyProblem:
    """A legal problem: usually a model's dims, sometimes any, with lengths at the edges."""
    if rng.random() < 0.2:
        return random_step(rng)
    form = rng.choice(("dense", "latent", "sparse"))
    odd = rng.random() < 0.15
    values: dict[str, Any] = {
        "form": form,
        "heads": rng.choice((1, 4, 5, 8, 16, 20, 32, 40, 64, 96, 128, rng.randint(1, 128))),
        "causal": rng.random() < 0.8,
        "has_sink": rng.random() < 0.2,
        "wants_lse": rng.random() < 0.5,
        "batch": rng.choice((0, 1, 1, 2, 7, 64, 4096)),
        "total_q": rng.choice(_LENGTHS),
        "total_k": rng.choice(_LENGTHS),
        "aligned_16": rng.random() < 0.95,
        "page_size": rng.choice(_PAGES),
        "q_dtype": rng.choice(_ELEMENTS),
        "has_q_scale": rng.random() < 0.1,
        "has_k_scale": rng.random() < 0.1,
    }
    values |= _dense_fields(rng, values, odd) if form == "dense" else _row_fields(rng, odd)
    if form == "sparse":
        values["topk"] = rng.choice((0, 1, 100, 512, 2048, 2049))
        values["has_topk_lengths"] = rng.random() < 0.3
    return Problem(**values)


def _dense_fields(rng: random.Random, values: dict[str, Any], odd: bool) -> dict[str, Any]:
    nope, rope, v = rng.choice(DENSE_DIMS)
    if odd:
        nope, v = rng.choice(_ODD_WIDTHS), rng.choice(_ODD_WIDTHS)
    same = rng.random() < 0.8
    kv_dtype = values["q_dtype"] if same else rng.choice(_ELEMENTS)
    source = rng.choice(("shared", "shared", "per_head", "cache")) if rope else "none"
    rope_dtype = rng.choice(_ROW_DTYPES) if source == "cache" or not same else kv_dtype
    return {
        "d_nope": nope,
        "d_rope": rope,
        "d_v": v,
        "kv_dtype": kv_dtype,
        "v_dtype": kv_dtype,
        "rope": source,
        "rope_dtype": rope_dtype,
    }


def _row_fields(rng: random.Random, odd: bool) -> dict[str, Any]:
    latent, rope = rng.choice(LATENT_DIMS)
    d_v = latent
    if odd:
        latent = rng.choice(_ODD_WIDTHS)
        d_v = rng.randint(1, latent)
    dtype = rng.choice(_ROW_DTYPES)
    return {
        "d_nope": latent,
        "d_rope": rope,
        "d_v": d_v,
        "kv_dtype": dtype,
        "v_dtype": dtype,
        "rope_dtype": dtype,
        "rope": "cache" if rope else "none",
    }


def check_one(problem: Problem, target: str, backend: str) -> tuple[str, str]:
    """The answer in one word (a backend, or "unsupported"), and what is wrong with it."""
    first, second = _answer(problem, target, backend), _answer(problem, target, backend)
    if first != second:
        return "finding", "two answers to one question"
    if isinstance(first, str):
        return ("unsupported", "") if first else ("finding", "Unsupported without a reason")
    if backend != "auto" and first.backend != backend:
        return "finding", f"asked for {backend}, got {first.backend}"
    return first.backend, over_budget(first)


def _answer(problem: Problem, target: str, backend: str) -> Plan | str:
    try:
        return choose_plan(problem, target_by_name(target), backend, None)
    except Unsupported as error:
        return error.reason


def run(problems: int, seed: int, progress: bool = False) -> Tally:
    """Plan that many problems, twice each."""
    rng, tally, start = random.Random(seed), Tally(), time.perf_counter()
    for done in range(1, problems + 1):
        problem = random_problem(rng)
        target = rng.choice(_TARGETS)
        backend = "auto" if rng.random() < 0.7 else rng.choice(BACKENDS)
        try:
            answer, finding = check_one(problem, target, backend)
        except InvalidArgument as error:
            answer, finding = "finding", f"InvalidArgument: {error}"
        tally.answers[answer] += 1
        if finding:
            call = json.dumps([problem.to_json(), target, backend])
            tally.findings.append(f"{finding}: {call}")
        if progress and done % 50_000 == 0:
            rate = 2 * done / (time.perf_counter() - start)
            print(
                f"{done} problems, {rate:.0f} plans/s, {len(tally.findings)} findings", flush=True
            )
    return tally


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="random problems against the planner")
    parser.add_argument("--problems", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    tally = run(options.problems, options.seed, progress=True)
    seconds = time.perf_counter() - start
    print(f"{options.problems} problems planned twice in {seconds:.1f} s", end=", ")
    print(f"{2 * options.problems / seconds:.0f} plans/s")
    print(", ".join(f"{name} {count}" for name, count in sorted(tally.answers.items())))
    for finding in tally.findings[:20]:
        print("FINDING", finding)
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
