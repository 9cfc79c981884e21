"""The portable sparse backward in Triton's interpreter: the rule, bits, seeded defects."""

from __future__ import annotations

import pytest

import openmla
from kernels.portable.interpreting import Interpreting
from openmla import Unsupported
from openmla.backward.problem import BackwardProblem
from openmla.problem import Problem

pytest.importorskip("triton")

V32 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    total_q=4096,
    total_k=8192,
    topk=2048,
    causal=False,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "first", "number"),
    [
        # More: TRITON_INTERPRET=1 python …/interpreted_sparse_backward.py fuzz 0 60
        ("fuzz", 100, 4),
        pytest.param("fuzz", 200, 16, marks=pytest.mark.long),
        ("edges", 0, 2),
        ("bits", 0, 1),
        pytest.param("bits", 1, 2, marks=pytest.mark.long),
        pytest.param("defects", 0, 11, marks=pytest.mark.seeded),
    ],
)
def test_interpreted(interpreted: Interpreting, part: str, first: int, number: int) -> None:
    *problems, counts = interpreted("interpreted_sparse_backward", part, first, number)
    assert not problems
    assert counts == {"done": number, "rejected": 0}


@pytest.mark.parametrize("chip", ["a100", "h200", "mi355x"])
def test_chips_with_compiled_kernels_have_a_plan(chip: str) -> None:
    plan = openmla.plan(BackwardProblem.of(V32), chip, backend="portable")
    assert (plan.backend, plan.kernel_name) == ("portable", "sparse_backward")
    # 2048 entries of 576 columns in fp32 are 4.5 MiB of a query.
    assert plan.variant.tokens == 113
    assert "BM = " in plan.explain()


def test_others_refuse() -> None:
    for chip in ("rtx4090", "b200"):
        with pytest.raises(Unsupported, match="compiled for"):
            openmla.plan(BackwardProblem.of(V32), chip)
