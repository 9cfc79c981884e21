"""The pipeline of one tile as a timeline: a row per worker, a box per step, gaps are waiting."""

from collections.abc import Sequence

from openmla.explain.schedule import Step, busy_share
from openmla.explain.svg import line, picture, rect, text, text_width

WIDTH, LEFT, RIGHT, TOP, ROW, BAR = 960, 104, 12, 18, 44, 30
_KINDS = {"load K": "k", "load V": "v", "qk": "qk", "softmax": "p", "pv": "pv"}
_WORDS = {
    "load K": "load K",
    "load V": "load V",
    "qk": "Q times K",
    "softmax": "softmax",
    "pv": "P times V",
}


def pipeline_picture(steps: Sequence[Step]) -> str:
    """The timeline; the number in a box is its key block."""
    steps = list(steps)
    workers = list(dict.fromkeys(step.worker for step in steps))
    workers.sort(key=lambda worker: (worker != "load", worker != "matrix", worker))
    end = max(step.end for step in steps)
    scale = (WIDTH - LEFT - RIGHT) / end
    parts = []
    for row, worker in enumerate(workers):
        y = TOP + row * ROW
        share = f"{100 * busy_share(steps, worker):.0f} % busy"
        parts += [text(0, y + 13, worker, css="figure"), text(0, y + 28, share, css="note")]
        parts.append(rect((LEFT, y, end * scale, BAR), "empty"))
        parts += [_box(step, y, scale) for step in steps if step.worker == worker]
    bottom = TOP + len(workers) * ROW
    parts += _axis(end, scale, bottom)
    parts += _legend({step.kind for step in steps}, bottom + 44)
    words = "; ".join(
        f"{worker} busy {100 * busy_share(steps, worker):.0f} percent" for worker in workers
    )
    title = f"Pipeline of the first {max(s.block for s in steps) + 1} key blocks of one tile"
    return picture((WIDTH, bottom + 56), title, words, parts)


def _box(step: Step, y: float, scale: float) -> str:
    x, width = LEFT + step.start * scale, (step.end - step.start) * scale
    hint = f"{_WORDS[step.kind]}, block {step.block}: clock {step.start:,} to {step.end:,}"
    box = rect((x, y, width, BAR), f"kind-{_KINDS[step.kind]} edge", hint=hint)
    label = str(step.block)
    if text_width(label) + 4 > width:
        return box
    return box + text(x + width / 2, y + 20, label, css="inside", anchor="middle")


def _axis(end: int, scale: float, y: float) -> list[str]:
    parts = [line(LEFT, y, LEFT + end * scale, y)]
    for quarter in range(5):
        at = end * quarter // 4
        anchor = "start" if quarter == 0 else "end" if quarter == 4 else "middle"
        words = f"{at:,} clocks" if quarter == 4 else f"{at:,}"
        parts.append(text(LEFT + at * scale, y + 16, words, css="note", anchor=anchor))
    return parts


def _legend(kinds: set[str], y: float) -> list[str]:
    parts = []
    x = float(LEFT)
    for kind, css in ((kind, css) for kind, css in _KINDS.items() if kind in kinds):
        parts += [rect((x, y - 10, 12, 12), f"kind-{css}"), text(x + 18, y, _WORDS[kind])]
        x += 36 + text_width(_WORDS[kind])
    parts += [rect((x, y - 10, 12, 12), "empty"), text(x + 18, y, "waiting")]
    return parts
