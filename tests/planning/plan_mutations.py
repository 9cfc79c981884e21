"""Damaged JSON of plans: one value somewhere is replaced, dropped, added or wrapped."""

from __future__ import annotations

import copy
import random
from typing import Any

Path = tuple[str | int, ...]
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    64,
    128,
    1000,
    2**20,
    2**31,
    2**40,
    2**62,
    -(2**62),
    2**70,
    0.0,
    0.5,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "x",
    "3",
    "bf16",
    "e4m3",
    "dense",
    "sparse",
    "workspace",
    "pages",
    "h200",
    "cpu",
    "sm_86:84x101376",
    "sm_90:1x1",
    [],
    [1],
    ["x"],
    [None],
    {},
    {"x": 1},
    {"class": "CacheRead"},
    {"class": 3},
    {"class": "CacheRead", "mode": "workspace"},
)


def places(value: Any, here: Path = ()) -> list[Path]:
    """Paths to everything inside a value."""
    inside = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    found = []
    for key, part in inside:
        found += [(*here, key), *places(part, (*here, key))]
    return found


def mutated(plan: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one to three changes; numbers are changed twice as often as anything else."""
    changed = copy.deepcopy(plan)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        *around, key = rng.choice(places(changed))
        home: Any = changed
        for step in around:
            home = home[step]
        how = rng.choice(("replace", "replace", "replace", "nudge", "drop", "add", "wrap"))
        value = home[key]
        if how == "nudge" and type(value) is int:
            home[key] = rng.choice(
                (value + 1, value - 1, 2 * value, value // 2, -value, 16 * value)
            )
        elif how == "drop" and isinstance(home, dict) and len(home) > 1:
            del home[key]
        elif how == "add" and isinstance(home, dict):
            home[rng.choice(("x", "class", "few", "cache_read"))] = rng.choice(STRANGE)
        elif how == "wrap":
            home[key] = rng.choice(([value], {"class": value}, str(value)))
        else:
            home[key] = copy.deepcopy(rng.choice(STRANGE))
    return changed
