"""Which call do I need? Questions from top to bottom, a call beside each."""

from __future__ import annotations

from typing import NamedTuple

from openmla.explain.svg import line, rect, standalone, text

# Narrow enough for a phone, where a wider picture would show its questions alone.
WIDTH, QUESTION, CALL, LEFT, HEIGHT, GAP = 368, 164, 170, 198, 78, 24
LINE = 17
CSS = ".box{fill:var(--paper);stroke:var(--soft);stroke-width:1}"


class Step(NamedTuple):
    """A question, and the call that "yes" leads to."""

    question: tuple[str, ...]
    call: tuple[str, ...]
    note: str


STEPS = (
    Step(
        ("A whole model,", "or a whole layer?"),
        ("optimize(model), or", "MLAAttention"),
        "they choose the form",
    ),
    Step(
        ("One prompt over", "several GPUs?"),
        ("distributed.prefill",),
        "and _latent, _sparse",
    ),
    Step(
        ("Does each query", "attend to its own", "selection of rows", "(V3.2, GLM-5)?"),
        ("mla_prefill_sparse",),
        "rows by index_topk",
    ),
    Step(
        ("A window and a list,", "or two caches (V4)?"),
        ("mla_attend",),
        "one softmax for both",
    ),
    Step(
        ("Few new tokens over", "a long latent cache?"),
        ("mla_prefill_latent",),
        "queries absorbed",
    ),
    Step(
        ("New tokens after", "a cached prefix?"),
        ("both calls, then", "merge_states"),
        "dense new, latent prefix",
    ),
    Step(("Otherwise:", "whole prompts"), ("mla_prefill",), "K and V per head"),
)


def pictures() -> dict[str, str]:
    """The questions and their answers."""
    parts = []
    for number, step in enumerate(STEPS):
        y, last = 8 + number * (HEIGHT + GAP), number == len(STEPS) - 1
        middle = y + HEIGHT / 2
        parts += [rect((2, y, QUESTION, HEIGHT), "box", rounded=8)]
        first = middle + 5 - LINE / 2 * (len(step.question) - 1)
        parts += [text(12, first + LINE * i, words) for i, words in enumerate(step.question)]
        parts += [rect((LEFT, y, CALL, HEIGHT), "kind-k", rounded=8)]
        first = middle + 5 - LINE / 2 * len(step.call)
        lines = [*((words, "inside") for words in step.call), (step.note, "inside small")]
        parts += [
            text(LEFT + 10, first + LINE * i, words, css=css)
            for i, (words, css) in enumerate(lines)
        ]
        parts += _arrow(QUESTION + 2, middle, LEFT, middle)
        if not last:
            parts += [text(QUESTION + 6, middle - 6, "yes", css="note")]
            parts += _arrow(WIDTH / 4, y + HEIGHT, WIDTH / 4, y + HEIGHT + GAP)
            parts += [text(WIDTH / 4 + 8, y + HEIGHT + 17, "no", css="note")]
    height = 16 + len(STEPS) * (HEIGHT + GAP) - GAP
    words = "; ".join(f"{' '.join(step.question)} {' '.join(step.call)}" for step in STEPS)
    svg = standalone((WIDTH + 2, height), "Which call do I need?", words, parts, CSS)
    return {"which-call.svg": svg}


def regions() -> dict[tuple[str, str], str]:
    """None: the page has its own table, with links."""
    return {}


def _arrow(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    """A line with a head; straight down or to the right."""
    across = y1 == y2
    ends = [(x2 - 6, y2 - 4), (x2 - 6, y2 + 4)] if across else [(x2 - 4, y2 - 6), (x2 + 4, y2 - 6)]
    return [line(x1, y1, x2, y2), *(line(x, y, x2, y2) for x, y in ends)]
