"""Which plan a call gets, given the Triton that is installed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmla import dispatch
from openmla.errors import Unsupported
from openmla.planning.target import TARGETS
from openmla.problem import Problem

DENSE = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
SPARSE = replace(DENSE, form="sparse", d_nope=512, d_v=512, topk=64)


@pytest.mark.parametrize("problem", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize(
    ("version", "backend"), [((3, 7), "portable"), ((3, 8), "cdna4"), ((3, 10), "cdna4")]
)
def test_an_old_triton_runs_the_portable_kernels(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, version: tuple[int, ...], backend: str
) -> None:
    monkeypatch.setattr(dispatch, "triton_version", lambda: version)
    chosen = dispatch.plan_for(problem, TARGETS["mi355x"])
    assert chosen.backend == backend
    assert any("Triton 3.8" in reason for reason in chosen.passed_over) == (version < (3, 8))


def test_an_explicit_backend_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_version", lambda: (3, 6))
    with pytest.raises(Unsupported, match=r"needs Triton 3\.8 or later"):
        dispatch.plan_for(DENSE, TARGETS["mi355x"], "cdna4")


def test_the_version_is_two_numbers() -> None:
    assert len(dispatch.triton_version()) == 2 and dispatch.triton_version() >= (3, 6)


SPARSE_128 = replace(SPARSE, heads=128, topk=2048, total_q=64)


@pytest.mark.parametrize(("version", "ctas"), [((3, 6), 1), ((3, 7), 1), ((3, 8), 2), ((3, 9), 2)])
def test_a_pair_of_ctas_waits_for_its_triton(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], ctas: int
) -> None:
    """The plan says what runs: no launcher replaces its config."""
    monkeypatch.setattr(dispatch, "triton_version", lambda: version)
    chosen = dispatch.plan_for(SPARSE_128, TARGETS["b200"])
    assert (chosen.backend, chosen.config.ctas) == ("blackwell", ctas)
    assert bool(chosen.passed_over) == (ctas == 1)
