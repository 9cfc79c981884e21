"""The portable indexer in Triton's interpreter, on a CPU, and compiled for every kind of GPU."""

from __future__ import annotations

import pytest

from kernels.portable.interpreting import Interpreting

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "done"),
    [
        ("scores", 33),
        ("edges", 34),
        pytest.param("more_edges", 322, marks=pytest.mark.long),
        ("fp4_scores", 27),
        pytest.param("fp4_defects", 8, marks=pytest.mark.seeded),
        ("select", 55),
        pytest.param("defects", 6, marks=pytest.mark.seeded),
        pytest.param("append_defects", 8, marks=pytest.mark.seeded),
        ("paging", 34),
        ("wild", 11),
        pytest.param("far", 2, marks=pytest.mark.long),  # a minute: rows beyond 2^31 elements
    ],
)
def test_interpreted(interpreted: Interpreting, part: str, done: int) -> None:
    *problems, counts = interpreted("interpreted_indexer", part)
    assert not problems
    assert counts == {"done": done, "rejected": 0}
