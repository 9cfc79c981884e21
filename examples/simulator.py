"""Hopper's dense kernel on this CPU: races and deadlocks would be named, and a picture is drawn.

    pip install ./gluon-sim . && python examples/simulator.py [timeline.svg]

The launch is the one that an H200 would get: the same plan, the same host code, the same kernel.
"""

import sys
from pathlib import Path

from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results, plan_on, simulated


def main(picture: str = "") -> None:
    # One head of DeepSeek-V3: 128 queries at the end of 512 keys.
    built = build(Case("dense", 1, 128, 64, 128, q_lens=(128,), k_lens=(512,)))
    results = new_results(built)
    plan = plan_on("h200", built.operands, results, sm_count=1)
    outcome, reports = simulated(plan, built.operands, results, schedule="timed")
    print(*reports, sep="\n")

    verdict = judge(built, outcome)
    print(f"accepted: {verdict.ok}, {verdict.bound:.2f} of the error that is allowed")

    timeline = reports[0].timeline
    assert timeline is not None  # a timed run has one
    for lane in timeline.lanes():
        print(f"{lane:24} busy {timeline.busy(lane):4.0%} of nominal time")
    if picture:
        Path(picture).write_text(timeline.svg())


if __name__ == "__main__":
    main(*sys.argv[1:])
