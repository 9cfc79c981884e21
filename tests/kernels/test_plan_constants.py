"""Numbers that kernels are written with are the plan's, and the ones that `openmla plan` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmla.kernels.blackwell.sparse import softmax as blackwell_sparse
from openmla.kernels.hopper.dense import softmax as hopper_dense
from openmla.kernels.hopper.latent import softmax as hopper_latent
from openmla.lab.compiling.table import discover
from openmla.planning import plan
from openmla.problem import Problem

DENSE = Problem(form="dense", heads=64, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
SPARSE = replace(DENSE, form="sparse", d_nope=512, d_v=512, topk=2048)

FAMILY = {"h200": "hopper", "b200": "blackwell"}


@pytest.mark.parametrize(
    ("problem", "target", "module"),
    [
        (DENSE, "h200", hopper_dense),
        (SPARSE, "h200", hopper_latent),
        (SPARSE, "b200", blackwell_sparse),
    ],
    ids=["hopper dense", "hopper latent", "blackwell sparse"],
)
def test_thresholds_are_those_that_are_printed(problem: Problem, target: str, module) -> None:  # type: ignore[no-untyped-def]
    threshold = module.THRESHOLD.value
    assert threshold > 0
    line = f"O is rescaled when a row's maximum grew by more than 2^{threshold:g}"
    assert line in plan(problem, target, FAMILY[target]).config_lines()


def test_what_is_compiled_in_can_be_a_key() -> None:
    """Triton keeps compiled kernels by their constants: a list among them fails at launch."""
    calls = [job.call for job in discover()]
    for call in calls:
        constants = [v for v in call.arguments.values() if isinstance(v, (list, tuple))]
        assert isinstance(hash(tuple(constants)), int), call.kernel
    assert calls
