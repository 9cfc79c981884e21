"""Every seeded defect of the dense Blackwell kernel is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from gluon_sim import Kind, Limits, intercept
from kernels.blackwell.dense.defects import DEFECTS, DenseDefect, load_defect
from kernels.blackwell.dense.test_kernel import EDGES, FULL_TABLE, LIGHT, PEAKY
from kernels.blackwell.simulated import PAIR, plan_of
from kernels.judging import as_built, light_keys, on
from kernels.mutants import assert_found
from kernels.shared_keys import with_shared_keys
from openmla.kernels.blackwell.dense.plan import FIRST_DENSE_PAIR
from openmla.kernels.triton_version import TRITON
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import DenseOperands

TWO = Case("dense", 1, 128, 64, 128, q_lens=(140,), k_lens=(200,))
CASES = {
    "two blocks": TWO,
    "ring turns": replace(TWO, k_lens=(520,)),
    "falling": replace(TWO, k_lens=(380,), values="rising", scale=-0.07),
    "fp8": replace(TWO, dtype="e4m3"),
    "scales": replace(TWO, dtype="e4m3", q_scale=True, k_scale=True, k_lens=(700,)),
    "edges": EDGES,
    "full table": FULL_TABLE,
    "peaky": PEAKY,
    "half an edge": replace(TWO, q_lens=(129,), k_lens=(130,)),
    "light keys": LIGHT,
    "light keys, bf16": replace(LIGHT, dtype="bf16"),
    "seven tiles": replace(TWO, q_lens=(1537,), k_lens=(20,), causal=False),  # one has a row
    # The last row's words end where its memory does.
    "mask": replace(TWO, k_lens=(290,), key_mask="half"),
    "window": replace(TWO, q_lens=(200,), k_lens=(700,), window=300),
    "window of a second tile": replace(TWO, q_lens=(300,), k_lens=(300,), window=200),
    "groups": replace(TWO, heads=6, group=3, q_lens=(20,), k_lens=(70,)),
    "fp32 out": replace(TWO, heads=2, q_lens=(20,), k_lens=(70,), out="given", fp32_out=True),
    "shared keys": replace(TWO, q_lens=(20, 30), k_lens=(70, 130)),
    "fp8 rope": replace(TWO, rope="cache", kv="fp8_block32", page_size=64),
}

CHANGES = {"shared keys": partial(with_shared_keys, seed=2)}


def test_there_are_enough() -> None:
    assert len({d.name for d in DEFECTS}) == len(DEFECTS) >= 8


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: DenseDefect, tmp_path: Path) -> None:
    if defect.num_qo == PAIR and TRITON < FIRST_DENSE_PAIR:
        pytest.skip("this Triton has no barriers for a pair of CTAs")
    run = partial(_run, load_defect(defect, tmp_path), defect.case, defect.num_qo)
    assert_found(defect.kind, run)


def _run(
    mutant: ModuleType, name: str, num_qo: int, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    change = CHANGES.get(name, light_keys if name.startswith("light keys") else as_built)
    built = change(on(CASES[name], "nan"))
    results = new_results(built)
    assert isinstance(built.operands, DenseOperands)
    outcome = Outcome(results.out, results.lse)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in mutant.calls(plan_of(built, num_qo), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(change(on(CASES[name])), outcome).ok


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    import openmla.kernels.blackwell.dense.launch as kernel

    assert _run(kernel, name, 2, "random", 1) == (set(), True)
