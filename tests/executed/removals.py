"""Synchronization taken out of compiled kernels, one at a time; a run can be resumed.

    PYTHONPATH=tests python tests/executed/removals.py b200 --out removals.json [--only dense]

Cases are long enough that every slot of shared memory is used again, and their scores rise, so that
accumulators are rescaled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from executed.campaign import keep
from executed.cases import dense, latent, sparse
from gluon_sim.compiled import SCHEDULES
from openmla.errors import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed.prepare import prepare
from openmla.lab.testing.executed.sensitivity import Removal, sensitivity
from openmla.lab.testing.fuzz import one_thread

_RISING: dict[str, Any] = {"values": "rising", "scale": -0.3, "seed": 5}
_PEAKY: dict[str, Any] = {"values": "peaky", "scale": 1.0, "seed": 5, "q_lens": (1,)}
_SHORT = {"heads": 1, "q_lens": (20, 70, 30), "k_lens": (700, 100, 300), "causal": False}
_LONG = {"heads": 1, "q_lens": (200, 130, 150), "k_lens": (600, 200, 300)}

CASES: dict[str, dict[str, Case]] = {
    "h200": {
        "dense, one tile": dense(0, 0, **_SHORT, **_RISING),
        "dense": dense(0, 0, **_LONG, **_RISING),
        "dense fp8": dense(0, 0, **_LONG, **_RISING, dtype="e4m3"),
        "latent": latent("bf16", q_lens=(12,), k_lens=(330,), **{**_RISING, "scale": 0.1}),
        "sparse 656": sparse("fp8_656", **{**_PEAKY, "q_lens": (5,)}, topk=320, k_lens=(400,)),
    },
    "b200": {
        "dense, one tile": dense(0, 0, **_SHORT, **_RISING),
        "dense": dense(0, 0, **_LONG, **_RISING),
        "sparse": sparse("bf16", **_PEAKY, topk=320, k_lens=(400,)),
        "sparse 656": sparse("fp8_656", **_PEAKY, topk=256, k_lens=(400,)),
        "pair": sparse("bf16", **_PEAKY, heads=128, topk=500, k_lens=(600,)),
    },
    "mi355x": {
        "dense": dense(40, 300, heads=1, seed=1),
        "dense fp8": dense(40, 300, heads=1, dtype="e4m3", seed=1),
        "sparse": sparse("bf16", **_PEAKY, topk=200, k_lens=(400,)),
        "sparse 656": sparse("fp8_656", **_PEAKY, topk=200, k_lens=(400,)),
    },
}

SCHEDULE_OF = {"h200": SCHEDULES[:2], "b200": SCHEDULES[:2], "mi355x": SCHEDULES}
"""In PTX, races are found by what orders accesses, whatever happens first."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=CASES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="")
    parser.add_argument("--part", default="0/1", help="3/16: every sixteenth, from the fourth on")
    options = parser.parse_args()
    first, step = map(int, options.part.split("/"))
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name, case in CASES[options.target].items():
        done: dict[str, dict[str, str]] = kept.setdefault(name, {})
        if options.only in name:
            for removal in removed(case, options.target, set(done), (first, step)):
                done[str(removal.where)] = {"kind": removal.kind, "noticed": removal.noticed}
                keep(options.out, kept)
            print(name, sum(bool(r["noticed"]) for r in done.values()), "of", len(done), flush=True)


def removed(case: Case, target: str, known: set[str], part: tuple[int, int]) -> Iterator[Removal]:
    """What becomes of a case when one synchronization is missing, but for those that are known."""
    with one_thread():
        try:
            prepared = prepare(case, target)
            last = len(prepared.launches) - 1
            yield from sensitivity(prepared, last, SCHEDULE_OF[target], known, part)
        except Unsupported as error:
            print(error, flush=True)


if __name__ == "__main__":
    main()
