"""The picture of docs/zigzag.svg: which rank has which queries, and how much each has to do.

`PYTHONPATH=src python tests/distributed/zigzag_picture.py > docs/zigzag.svg` draws it again.
"""

from openmla.distributed.shard import LAYOUTS, ContextShard, Layout, split
from openmla.explain import svg

CELL, MARGIN, HEAD = 14, 24, 56
# One hue per rank, as light as text on it needs; they repeat.
COLORS = ("#9ec5f4", "#f6c38b", "#a6d8a8", "#d9b3e6")
STYLE = (
    ".label{font:13px system-ui,sans-serif;fill:#1f2328}"
    ".note{font:12px system-ui,sans-serif;fill:#57606a}"
    ".inside{font:10px system-ui,sans-serif;fill:#1f2328}"
    "@media (prefers-color-scheme: dark){.label{fill:#e6edf3}.note{fill:#9ea7b3}}"
    + "".join(f".rank-{i}{{fill:{color}}}" for i, color in enumerate(COLORS))
)


def split_picture(length: int = 16, world: int = 4) -> str:
    """The causal triangle of one sequence, every query in the color of its rank, both ways."""
    panel = length * CELL
    parts: list[str] = [f"<style>{STYLE}</style>"]
    for number, layout in enumerate(reversed(LAYOUTS)):
        parts += _panel(MARGIN + number * (panel + 3 * MARGIN), split([length], world, 0, layout))
    size = (2 * panel + 5 * MARGIN, HEAD + panel + 2 * MARGIN)
    words = "Rows are queries, columns the keys they see; the color is the rank that has the query."
    return svg.picture(size, f"{length} tokens on {world} ranks", words, parts) + "\n"


def _panel(left: float, shard: ContextShard) -> list[str]:
    layout: Layout = shard.layout
    owner = {
        token: rank
        for rank in range(shard.world)
        for part in shard.at(rank).parts
        for token in range(part.start, part.end)
    }
    found = [
        svg.text(left, 20, layout),
        svg.text(left, 40, "row: a query, as long as the keys it sees", css="note"),
    ]
    for token, rank in owner.items():
        top = HEAD + token * CELL
        box = (left, top, (token + 1) * CELL, CELL - 1)
        found.append(
            svg.rect(box, f"rank-{rank % len(COLORS)}", hint=f"query {token}, rank {rank}")
        )
        found.append(svg.text(left + 4, top + CELL - 4, str(rank), css="inside"))
    pairs = ", ".join(str(shard.at(rank).pairs()) for rank in range(shard.world))
    foot = HEAD + sum(shard.lengths) * CELL + 18
    return [*found, svg.text(left, foot, f"pairs of ranks 0 to {shard.world - 1}: {pairs}")]


if __name__ == "__main__":
    print(split_picture(), end="")
