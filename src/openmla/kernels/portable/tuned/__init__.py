"""Tiles of the plain Triton kernels that won a measurement, one JSON file per chip.

A file says where and when it was measured, and per tile what came out. `least_heads` bounds an
entry from below; of those that apply to a problem, the one with the most heads is meant.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Tile(NamedTuple):
    """Rows, keys per step, pipeline stages and warps of a candidate."""

    BM: int
    BN: int
    num_stages: int
    num_warps: int


class TunedTile(NamedTuple):
    """A winner, and the smallest head count it stands for."""

    form: str
    least_heads: int
    tile: Tile
    measured: str


@cache
def tuned_tiles(chip: str) -> tuple[TunedTile, ...]:
    """The winners on a chip; none where nothing was measured.

    >>> [t.tile.BM for t in tuned_tiles("h200")], tuned_tiles("a100")
    ([128, 64, 64, 32, 16], ())
    """
    path = Path(__file__).with_name(f"{chip}.json")
    if not chip.isidentifier() or not path.is_file():
        return ()
    return tuple(
        TunedTile(
            entry["form"],
            entry["least_heads"],
            Tile(*(entry[name] for name in Tile._fields)),
            entry["measured"],
        )
        for entry in json.loads(path.read_text())["tiles"]
    )


def tuned_tile(chip: str, form: str, heads: int) -> TunedTile | None:
    """The winner for a form and head count, if there is one.

    >>> tuned_tile("h200", "sparse", 16).tile
    Tile(BM=16, BN=64, num_stages=2, num_warps=4)
    """
    fitting = [t for t in tuned_tiles(chip) if t.form == form and t.least_heads <= heads]
    return max(fitting, key=lambda t: t.least_heads, default=None)
