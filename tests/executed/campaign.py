"""Many cases on a target's compiled kernels, each under several schedules; a run can be resumed.

    PYTHONPATH=tests python tests/executed/campaign.py b200 --cases 60 --out results.json

The cases of cases.py, then others as `openmla check --execute` draws them, from what the target's
kernels declare to serve. Compiling takes longer than executing, so at most `--variants` kernels are
compiled, as different as the draws have them, and each runs several cases. Every case is in the
file as soon as it has run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton

from executed.cases import CASES
from gluon_sim.compiled import SCHEDULES
from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.compiling.jobs import CompileJob, job_key
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed.check import executed
from openmla.lab.testing.executed.prepare import ARCHITECTURES, planned
from openmla.lab.testing.fuzz import one_thread
from openmla.lab.testing.simulate.draw import simulated_case, tiles

MOST_TILES = 20
"""Tiles of 64 rows and 64 keys: a run of more takes longer than it shows."""
DRAWS_PER_CASE = 60
FREE = ("q_lens", "k_lens", "values", "index_kind", "topk_lengths", "spare")
"""Fields of a case that a compiled kernel does not depend on."""


def variant(case: Case, target: str) -> str:
    """What is compiled for a case: hashes of its launches; nothing where no kernel serves it."""
    try:
        _, _, launches = planned(build(case), target)
    except (InvalidArgument, Unsupported):
        return ""
    keys = [job_key(CompileJob("executed", call, ARCHITECTURES[target])) for call in launches]
    return "+".join(keys)


def profile(case: Case) -> tuple[object, ...]:
    """What tells cases of different kernels apart, roughly."""
    widths = (case.d_nope, case.d_rope, case.d_v) if case.form == "dense" else ()
    return (case.form, case.dtype, case.side_dtype, case.kv, case.rope, case.heads > 64, *widths)


def draws(target: str, cases: int, variants: int) -> Iterator[Case]:
    """Cases of at most so many compiled kernels, which differ as much as possible."""
    seen: set[tuple[object, ...]] = set()
    for seed in range(DRAWS_PER_CASE * cases):
        case = simulated_case(target, seed)
        if len(seen) == variants:
            return
        if profile(case) in seen or not 0 < tiles(case) <= MOST_TILES:
            continue
        key = variant(case, target)
        if key:
            seen.add(profile(case))
            yield case
            yield from siblings(case, key, target, -(-cases // variants) - 1)


def siblings(case: Case, key: str, target: str, count: int) -> Iterator[Case]:
    """Other lengths, lists and values for the same compiled kernel."""
    for seed in range(case.seed + 1, case.seed + 1 + 4 * DRAWS_PER_CASE):
        other = simulated_case(target, 10**6 + seed)
        if other.form != case.form:
            continue
        new = replace(case, seed=seed, **{name: getattr(other, name) for name in FREE})
        if new.values == "exact":
            new = replace(new, scale=0.25)
        if count == 0:
            return
        if 0 < tiles(new) <= MOST_TILES and variant(new, target) == key:
            count -= 1
            yield new


def line(case: Case, target: str) -> dict[str, Any]:
    """What became of a case; the seconds are those of the processor, of all its runs."""
    started = time.process_time()
    result, reports = executed(case, target, SCHEDULES)
    told = {"message": result.message, "kind": result.kind} if result.status != "right" else {}
    return {
        "status": result.status,
        **told,
        "bound": round(result.bound, 3),
        "runs": len(SCHEDULES),
        "instructions": sum(r.instructions for r in reports),
        "seconds": round(time.process_time() - started, 1),
        "notes": sorted({note for report in reports for note in report.notes}),
    }


def keep(path: Path, whole: dict[str, Any]) -> None:
    """Replace a file at once: a run may end at any time."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(whole, indent=1) + "\n")
    fresh.replace(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=ARCHITECTURES)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--variants", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default="0/1", help="3/16: the fourth of sixteen parts")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    lines: dict[str, dict[str, Any]] = kept.get("cases", {})
    with one_thread():
        drawn = draws(options.target, options.cases, options.variants)
        cases = [*CASES[options.target].values(), *drawn]
        part, parts = map(int, options.part.split("/"))
        for case in cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]:
            if str(case) not in lines and variant(case, options.target):
                lines[str(case)] = line(case, options.target)
                keep(options.out, {"triton": triton.__version__, "cases": lines})
                print(lines[str(case)]["status"], lines[str(case)]["seconds"], case, flush=True)


if __name__ == "__main__":
    main()
