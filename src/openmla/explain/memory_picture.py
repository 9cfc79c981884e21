"""Shared memory and tensor memory of a block, to scale.

A bar is as long as what one block may use; every region is drawn at its offset with its own length.
Regions too short for their label are named in the list under the bar, where all of them appear.
"""

from collections.abc import Sequence

from openmla.explain.svg import line, picture, rect, text, text_width
from openmla.planning.memory import Columns, MemoryMap, Region

WIDTH, MARGIN, BAR, ROW = 960, 12, 46, 20
COLUMNS = 3  # of the list under the bar


def smem_picture(smem: MemoryMap, what: str = "Shared memory") -> str:
    """Shared memory (or LDS) of one block."""
    return bar_picture(f"{what} of one block", smem.regions, smem.limit, "bytes")


def tmem_picture(columns: Sequence[Columns], limit: int) -> str:
    """Tensor memory of one block."""
    segments = [Region(c.name, _column_kind(c.name), c.first, c.count) for c in columns]
    return bar_picture("Tensor memory of one block", segments, limit, "columns")


def _column_kind(name: str) -> str:
    return {"S": "p", "s": "p", "O": "v", "Q": "q"}.get(name[0], "k")


def bar_picture(title: str, segments: Sequence[Region], limit: int, unit: str) -> str:
    """A bar of `limit` units with its segments, an axis and the list of all segments."""
    used = max((s.offset + s.size for s in segments), default=0)
    scale = (WIDTH - 2 * MARGIN) / max(limit, used)
    top = 30
    parts = [
        text(MARGIN, 18, f"{used:,} of {limit:,} {unit}, {limit - used:,} free", css="figure"),
        rect((MARGIN, top, limit * scale, BAR), "empty", rounded=4),
    ]
    for segment in segments:
        parts += _segment(segment, scale, top, unit)
    parts += _axis(limit, scale, top + BAR)
    first_row = top + BAR + 44
    parts += _names(segments, first_row, unit)
    rows = -(-len(segments) // COLUMNS)
    words = "; ".join(f"{s.name}: {s.size} {unit} from {s.offset}" for s in segments)
    return picture((WIDTH, first_row + rows * ROW), title, words, parts)


def _segment(segment: Region, scale: float, top: float, unit: str) -> list[str]:
    x, width = MARGIN + segment.offset * scale, segment.size * scale
    hint = f"{segment.name}: {segment.size:,} {unit} from {segment.offset:,}"
    parts = [rect((x, top, width, BAR), f"kind-{segment.kind} edge", hint=hint)]
    middle = x + width / 2
    size = f"{segment.size:,}"
    if text_width(segment.name) + 8 <= width:
        parts.append(text(middle, top + 20, segment.name, css="inside", anchor="middle"))
        if text_width(size, 11) + 8 <= width:
            parts.append(text(middle, top + 36, size, css="inside small", anchor="middle"))
    return parts


def _axis(limit: int, scale: float, y: float) -> list[str]:
    parts = []
    for quarter in range(5):
        at = limit * quarter // 4
        x = MARGIN + at * scale
        anchor = "start" if quarter == 0 else "end" if quarter == 4 else "middle"
        parts += [line(x, y + 3, x, y + 8), text(x, y + 21, f"{at:,}", css="note", anchor=anchor)]
    return parts


def _names(segments: Sequence[Region], top: float, unit: str) -> list[str]:
    """Swatch, name, size and offset of every segment, column by column."""
    rows = -(-len(segments) // COLUMNS)
    column_width = (WIDTH - 2 * MARGIN) / COLUMNS
    parts = []
    for index, segment in enumerate(segments):
        x = MARGIN + index // rows * column_width
        y = top + index % rows * ROW
        words = f"{segment.name}: {segment.size:,} from {segment.offset:,}"
        most = int((column_width - 26) / text_width("x"))
        parts.append(rect((x, y - 9, 10, 10), f"kind-{segment.kind}"))
        parts.append(text(x + 16, y, words if len(words) <= most else words[: most - 1] + "…"))
    return parts
