"""Timelines of the Hopper kernels, drawn by the simulator.

A nominal clock runs beside the simulation (gluon_sim/report/timeline.py): round numbers per SM,
good for seeing who waits for whom, not a performance model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gluon_sim.report.timeline import Event, Timeline
from openmla.explain.svg import line, rect, standalone, text, text_width
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case
from openmla.lab.testing.simulate import new_results, plan_on, simulated

CASES = {
    "hopper-dense": Case("dense", 1, 128, 64, 128, q_lens=(128,), k_lens=(896,), causal=False),
    "hopper-latent": Case(
        "sparse", 64, 512, 64, 512, q_lens=(2,), k_lens=(600,), topk=384, scale=192**-0.5
    ),
}
TITLES = {
    "hopper-dense": "Dense kernel: one tile of 128 queries over 7 blocks of 128 keys",
    "hopper-latent": "Latent kernel: two tokens of 64 heads, 3 steps of 128 rows each",
}
# Lanes of the simulator -> what they are, in the order they are drawn.
LANES = {
    "copy": "copies",
    "mma": "tensor core",
    "consumer#0": "consumer 0",
    "consumer#1": "consumer 1",
    "left": "left",
    "right": "right",
    "producer": "producer",
    "load": "producer",
}
KINDS = {
    "exp": "p",
    "vector": "stats",
    "memory": "scratch",
    "global": "scratch",
    "copy": "k",
    "mma": "qk",
    "wait": "",
}
LEGEND = {
    "copy": "copies",
    "mma": "products",
    "exp": "exponentials",
    "vector": "other arithmetic",
    "global": "loads and stores",
    "wait": "waiting",
}
WIDTH, LEFT, TOP, ROW, BAR = 960, 130, 30, 30, 20
SMALLEST = 0.4  # pixels: what is narrower is not drawn


def timeline(name: str) -> Timeline:
    """The run of a case on the plan that an H200 with one SM would get."""
    built = build(CASES[name])
    results = new_results(built)
    plan = plan_on("h200", built.operands, results, sm_count=1)
    _, reports = simulated(plan, built.operands, results, schedule="timed")
    reports[0].raise_if_bad()
    return reports[0].timeline


def lanes(found: Timeline) -> dict[str, str]:
    """What a lane is called here -> what the simulator calls it."""
    named = {lane.split("/")[-1].split()[-1]: lane for lane in found.lanes()}
    return {label: named[key] for key, label in LANES.items() if key in named}


def pictures() -> dict[str, str]:
    """One per case."""
    return {f"{name}.svg": _picture(TITLES[name], timeline(name)) for name in CASES}


def regions() -> dict[tuple[str, str], str]:
    """None: the page says in words what the pictures show."""
    return {}


def _picture(title: str, found: Timeline) -> str:
    end = max(event.end for event in found.events)
    scale = (WIDTH - LEFT - 8) / end
    parts = [text(0, 16, title, css="figure")]
    for number, (label, lane) in enumerate(lanes(found).items()):
        y = TOP + number * ROW
        parts += [text(0, y + 14, label), rect((LEFT, y, end * scale, BAR), "empty")]
        for kind, start, stop in _merged(e for e in found.events if e.lane == lane):
            if KINDS[kind] and (stop - start) * scale >= SMALLEST:
                box = (LEFT + start * scale, y, (stop - start) * scale, BAR)
                parts.append(rect(box, f"kind-{KINDS[kind]}", rounded=0))
    bottom = TOP + len(lanes(found)) * ROW
    parts.append(line(LEFT, bottom, LEFT + end * scale, bottom))
    parts.append(text(LEFT, bottom + 16, "0", css="note"))
    clocks = f"{end:,.0f} nominal clocks"
    parts.append(text(LEFT + end * scale, bottom + 16, clocks, css="note", anchor="end"))
    parts += _legend({e.kind for e in found.events}, bottom + 40)
    busy = [f"{label} busy {found.busy(lane):.0%}" for label, lane in lanes(found).items()]
    return standalone((WIDTH, bottom + 52), title, f"{clocks}; " + "; ".join(busy), parts)


def _merged(events: Iterable[Event]) -> Iterator[tuple[str, float, float]]:
    """Bars of one lane; those of one color that touch are one."""
    bars: list[tuple[str, float, float]] = []
    for event in sorted(events, key=lambda e: e.start):
        kind = "global" if event.kind == "memory" else event.kind
        if bars and bars[-1][0] == kind and event.start - bars[-1][2] < 1:
            bars[-1] = (kind, bars[-1][1], max(event.end, bars[-1][2]))
        else:
            bars.append((kind, event.start, event.end))
    return iter(bars)


def _legend(kinds: set[str], y: float) -> list[str]:
    parts, x = [], float(LEFT)
    for kind, words in LEGEND.items():
        if kind in kinds:
            css = f"kind-{KINDS[kind]}" if KINDS[kind] else "empty"
            parts += [rect((x, y - 10, 12, 12), css), text(x + 18, y, words)]
            x += 34 + text_width(words)
    return parts
