"""Drawn gradients on a GPU: each is right by the acceptance rule, and the same twice, or refused.

    python tests/gpu/gradient_fuzz.py [--cases 1000] [--seconds 600] [--jobs 8] [--out FILE]

A kind is what kernels are compiled for: a backend, widths and options. Every process takes a kind,
and draws lengths, heads, lists, values and gradients for it, so that little is compiled and much is
run. Around the operands is NaN or Inf. Exits nonzero if a case was wrong, if one was refused that
Hopper's and the portable kernels have, and if fewer were drawn than asked for. `--seconds`: no case
begins after that.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from openmla import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import GradientCase, GradientOutcome, build_gradients
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.row_gradients import build_row_gradients, judge_rows_twice


class Kind(NamedTuple):
    """What is not drawn."""

    backend: str
    case: Case
    d_lse: bool = False


_V3 = Case("dense", 4, 128, 64, 128, q_lens=(3,), k_lens=(3,), dtype="bf16")
_V32 = Case("sparse", 4, 512, 64, 512, q_lens=(3,), k_lens=(3,), topk=3, scale=0.05, dtype="bf16")
REFUSED = "refused"
KINDS = {
    "hopper causal": Kind("hopper", _V3),
    "hopper full, sink": Kind("hopper", replace(_V3, causal=False, sink="mixed")),
    "hopper gradient of lse": Kind("hopper", _V3, d_lse=True),
    "hopper rope per head": Kind("hopper", replace(_V3, rope="per_head")),
    "hopper sink, gradient of lse": Kind("hopper", replace(_V3, sink="normal"), d_lse=True),
    "hopper key mask": Kind("hopper", replace(_V3, key_mask="half")),
    "hopper key mask, sink": Kind("hopper", replace(_V3, key_mask="half", sink="mixed")),
    "hopper few bits, gradient of lse": Kind(
        "hopper", replace(_V3, key_mask="few", causal=False), d_lse=True
    ),
    "hopper 192 + 64": Kind("hopper", replace(_V3, d_nope=192, d_v=256)),
    "portable key mask": Kind("portable", replace(_V3, key_mask="half")),
    "portable few bits, sink": Kind(
        "portable", replace(_V3, key_mask="few", sink="normal", causal=False)
    ),
    "hopper lists": Kind("hopper", _V32),
    "hopper lists, lengths, sink": Kind(
        "hopper", replace(_V32, topk_lengths="ragged", sink="mixed")
    ),
    "hopper lists, gradient of lse": Kind("hopper", _V32, d_lse=True),
    "hopper narrow lists": Kind("hopper", replace(_V32, d_nope=128, d_v=128)),
    "portable lists": Kind("portable", replace(_V32, sink="normal"), d_lse=True),
    # A gradient that no kernel has.
    REFUSED: Kind("hopper", replace(_V3, dtype="fp16")),
}


def drawn(kind: Kind, seed: int) -> GradientCase:
    """Case number `seed` of a kind."""
    rng = random.Random(f"gradient {seed}")
    number = rng.randint(1, 3)
    rest: dict[str, Any] = {
        "values": rng.choice(("normal", "normal", "peaky")),
        "spare": rng.choice((0, 0, 3)),
        "seed": seed,
    }
    if kind.case.form == "dense":
        rest["heads"] = rng.choice((4, 8))
        rest["q_lens"] = tuple(rng.choice((1, 5, 31, 64, 65, 70)) for _ in range(number))
        rest["k_lens"] = tuple(rng.choice((1, 40, 64, 129, 190, n)) for n in rest["q_lens"])
    else:
        rest["heads"] = rng.choice((1, 5, 16, 64, 65, 128))
        rest["q_lens"] = (rng.choice((1, 3, 9)),)
        rest["k_lens"] = (rng.choice((1, 100, 300)),)
        rest["topk"] = rng.choice((1, 63, 64, 65, 130, 200))
        rest["index_kind"] = rng.choice(("mixed", "duplicates"))
    d_out = rng.choice(("normal", "normal", "small"))
    return GradientCase(replace(kind.case, **rest), d_out, kind.d_lse)


def run_gradients(kind: Kind, case: GradientCase, background: str) -> tuple[Any, GradientOutcome]:
    """A case with its tensors, and its gradients; raises Unsupported where it is refused."""
    memory = Memory("cuda", background)
    sparse = case.case.form == "sparse"
    built: Any = build_row_gradients(case, memory) if sparse else build_gradients(case, memory)
    return built, built.run(kind.backend)


def run_case(kind: Kind, case: GradientCase, background: str) -> list[str]:
    """What is wrong with a case; empty if nothing is. Raises Unsupported where it is refused."""
    built, found = run_gradients(kind, case, background)
    again = built.run(kind.backend)
    problems = [
        f"d_{name} differs in a second run"
        for name, x in found.gradients.items()
        if not torch.equal(x, again.gradients[name])
    ]
    judge: Any = judge_rows_twice if case.case.form == "sparse" else judge_twice
    for verdict in judge(built, found.gradients, found.saved):
        problems += verdict.problems
    return problems


def run_kind(name: str, cases: int, seconds: float) -> None:
    """In a process of its own: so many cases of a kind, or as many as there is time for."""
    torch.set_num_threads(1)
    kind, began = KINDS[name], time.monotonic()
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    refused: Counter[str] = Counter()
    for seed in range(cases):
        if time.monotonic() - began > seconds:
            break
        case = drawn(kind, seed)
        try:
            problems = run_case(kind, case, ("nan", "inf", "zero")[seed % 3])
        except Unsupported as error:
            counts["refused"] += 1
            refused[error.reason] += 1
            continue
        counts["wrong" if problems else "right"] += 1
        wrong += [f"seed {seed}: {case}: {p}" for p in problems[:3]]
    result = {"kind": name, **counts, "problems": wrong[:10], "reasons": dict(refused)}
    print("RESULT " + json.dumps(result), flush=True)


def problems_of(results: list[dict[str, Any]], cases: int) -> list[str]:
    """What speaks against the results of all kinds; empty if nothing does.

    >>> problems_of([{"kind": "hopper lists", "right": 7}, {"kind": REFUSED, "refused": 8}], 15)
    []
    >>> problems_of([{"kind": "hopper lists", "right": 7, "refused": 1}], 8)
    ['hopper lists: 1 refused']
    """
    found, drawn = [], 0
    for result in results:
        unwanted = ("wrong", "right" if result["kind"] == REFUSED else "refused")
        found += [f"{result['kind']}: {result[x]} {x}" for x in unwanted if result.get(x)]
        drawn += sum(result.get(x, 0) for x in ("right", "wrong", "refused"))
    return found if drawn >= cases else [*found, f"{drawn} of {cases} cases were drawn"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    each = -(-options.cases // len(KINDS))
    if options.child is not None:
        run_kind(options.child, each, options.seconds)
        return 0
    began, waiting, running, results = time.monotonic(), list(KINDS), {}, []
    while waiting or running:
        while waiting and len(running) < options.jobs:
            name = waiting.pop(0)
            left = max(options.seconds - (time.monotonic() - began), 1.0)
            command = [sys.executable, __file__, "--child", name]
            command += ["--cases", str(options.cases), "--seconds", str(left)]
            running[name] = subprocess.Popen(
                command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        name, process = next(iter(running.items()))
        text, _ = process.communicate()
        del running[name]
        found = [json.loads(x[7:]) for x in text.splitlines() if x.startswith("RESULT ")]
        results += found or [{"kind": name, "wrong": 1, "problems": [text[-1500:]]}]
        print(json.dumps(results[-1]), flush=True)
    totals = {n: sum(r.get(n, 0) for r in results) for n in ("right", "wrong", "refused")}
    print(totals, f"{time.monotonic() - began:.0f} s", flush=True)
    if options.out:
        options.out.write_text(json.dumps({"totals": totals, "kinds": results}, indent=1) + "\n")
    problems = problems_of(results, options.cases)
    print(*problems, sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
