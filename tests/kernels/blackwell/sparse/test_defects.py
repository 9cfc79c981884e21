"""Every seeded defect of the sparse Blackwell kernel is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from gluon_sim import Kind, Limits, intercept
from kernels.blackwell.simulated import plan_of
from kernels.blackwell.sparse.defects import DEFECTS, SparseDefect, load_defect
from kernels.mutants import assert_found
from openmla.lab.testing.build import Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.simulate import new_results

BF16 = Case(
    "sparse",
    8,
    512,
    64,
    512,
    q_lens=(1,),
    k_lens=(300,),
    topk=150,
    scale=0.07,
    index_kind="mixed",
    seed=1,
)
CASES = {
    "bf16": BF16,
    "rising": replace(BF16, values="rising", scale=1.0, index_kind="distinct", topk=200),
    "fp8": replace(BF16, kv="fp8_block32"),
    "latent": Case(
        "latent",
        8,
        512,
        64,
        512,
        kv="bf16",
        page_size=16,
        q_lens=(1, 2),
        k_lens=(40, 70),
        scale=0.3,
        seed=1,
    ),
    "window": Case(
        *("latent", 8, 512, 64, 512),
        **{"kv": "bf16", "page_size": 16, "scale": 0.3, "seed": 1},
        q_lens=(1, 2),
        k_lens=(40, 170),
        window=70,
    ),
    "256+64": replace(
        BF16, d_nope=256, d_v=256, values="rising", scale=1.0, index_kind="distinct", topk=200
    ),
    "512+0": replace(BF16, d_rope=0, rope="none"),
    "fp8 queries": replace(
        BF16, dtype="e4m3", kv="fp8_token", q_lens=(2,), topk=70, q_scale=True, scale=0.3
    ),
    "row_max-129": replace(BF16, topk=129, index_kind="distinct"),
}


def test_there_are_enough() -> None:
    assert len({d.name for d in DEFECTS}) == len(DEFECTS) >= 16


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    """A few schedules must show what the defect breaks."""
    assert_found(defect.kind, partial(run_on, load_defect(defect, tmp_path), CASES[defect.case]))


def run_on(
    mutant: ModuleType, case: Case, schedule: str, seed: int, target: str = "b200"
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    built = build(case, memory=Memory("cpu", "nan"))
    results = new_results(built)
    chosen = replace(plan_of(built), target=target)
    outcome = Outcome(results.out, results.lse)
    options = {"schedule": schedule, "seed": seed, "limits": Limits(steps=20_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in mutant.calls(chosen, built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(build(case), outcome).ok


@pytest.mark.compile
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    import openmla.kernels.blackwell.sparse.launch as kernel

    assert run_on(kernel, CASES[name], "random", 1) == (set(), True)
