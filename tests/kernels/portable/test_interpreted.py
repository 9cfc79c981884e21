"""The portable kernels in Triton's interpreter, on a CPU: the acceptance rule, poisons, bits."""

from __future__ import annotations

import pytest

from kernels.portable.edges import CASES, DEFECTS, SPLIT, WIDE
from kernels.portable.interpreting import Interpreting

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "first", "number", "done"),
    [
        # More of them: TRITON_INTERPRET=1 python tests/kernels/portable/interpreted.py fuzz 0 120
        ("fuzz", 1000, 8, 9),
        pytest.param("fuzz", 2000, 8, 9, marks=pytest.mark.long),
        ("shared", 5000, 6, 6),
        pytest.param("shared", 5000, 12, 12, marks=pytest.mark.long),
        ("poison", 3000, 4, 4),
        ("far", 4000, 8, 8),
        ("wild", 0, 1, len(CASES) + 2),
        pytest.param("wild", 1, 3, len(CASES) + 2, marks=pytest.mark.long),
        ("used", 0, 1, len(CASES)),
        pytest.param("used", 1, 4, len(CASES), marks=pytest.mark.long),
        ("neighbors", 0, 2, 2),
        pytest.param("neighbors", 0, 4, 4, marks=pytest.mark.long),
        ("ranges", 0, 5, 5),
        pytest.param("chunks", 0, 1, 3, marks=pytest.mark.long),
        pytest.param("chunks", 0, 2, 6, marks=pytest.mark.long),
        ("cache", 0, 4, 52),
        ("packed", 0, 1, 31),
        pytest.param("packed", 0, 3, 93, marks=pytest.mark.long),
        ("e4m3", 0, 1, 1),
        ("quantize", 0, 9, 9),
        ("far heads", 0, 3, 3),
        ("far pages", 0, 1, 1),
        ("light", 0, 1, 2),
        ("edges", 0, len(CASES), 4 * len(CASES) + len(SPLIT) - 4 * len(WIDE)),
        pytest.param("defects", 0, len(DEFECTS), len(DEFECTS), marks=pytest.mark.seeded),
    ],
)
def test_interpreted(
    interpreted: Interpreting, part: str, first: int, number: int, done: int
) -> None:
    *problems, counts = interpreted("interpreted", part, first, number)
    assert not problems
    assert counts == {"done": done, "rejected": 0}
