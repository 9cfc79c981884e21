"""Seeded defects of the latent FP8 kernel: each is found in a few runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

import openmla.kernels.hopper as package
from gluon_sim import Kind, intercept
from kernels.hopper.latent_fp8.test_kernel import CACHES, H200, PLAIN
from kernels.hopper.latent_fp8.test_kernel import CASES as PLAIN_CASES
from kernels.hopper.simulated import plan_of
from kernels.judging import on
from kernels.mutants import NOTHING, Defect, assert_found, controls, load_mutant
from openmla.kernels.hopper.latent_fp8 import launch as launcher
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results

CASES = {
    **PLAIN_CASES,
    **CACHES,
    "long": replace(PLAIN, q_lens=(2,), topk=400, index_kind="mixed"),
    "rising": replace(PLAIN, q_lens=(1,), topk=520, k_lens=(600,), values="rising", scale=0.3),
}
LIMITS = replace(H200, steps=40_000)


@dataclass(frozen=True)
class Fp8Defect(Defect):
    """With a case that it shows in."""

    case: str = "long"


DEFECTS = [
    Fp8Defect(
        "rows are overwritten while they are read",
        Kind.RACE,
        "latent_fp8.rows",
        "wait_read(slot, used, max(NUMBER - 1, 0))",
        NOTHING,
    ),
    Fp8Defect(
        "rows are freed before the last is read",
        Kind.RACE,
        "latent_fp8.values",
        "if tile == 6:",
        "if tile == 5:",
    ),
    Fp8Defect(
        "weights are overwritten while they are read",
        Kind.RACE,
        "latent_fp8.kernel",
        "mbarrier.wait(bars.p_empty.index(slot), phase ^ 1)",
        NOTHING,
    ),
    Fp8Defect(
        "one warp-group frees weights that the other reads",
        Kind.RACE,
        "latent_fp8.kernel",
        "p_empty=barriers(ST, 2)",
        "p_empty=barriers(ST, 1)",
    ),
    Fp8Defect(
        "validity is not waited for",
        Kind.RACE,
        "latent_fp8.rows",
        "(32 * WARPS.value + 1)",
        "32 * WARPS.value",
    ),
    Fp8Defect(
        "rope comes from the latent columns",
        None,
        "latent_fp8.rows",
        "start, ok, LATENT, BL",
        "start, ok, 0 * LATENT, BL",
    ),
    Fp8Defect(
        "Q is not waited for",
        Kind.RACE,
        "latent_fp8.kernel",
        "mbarrier.wait(bars.q_ready, turn & 1)",
        NOTHING,
    ),
    Fp8Defect(
        "weights are not waited for",
        Kind.RACE,
        "latent_fp8.kernel",
        "wait_weights(slot, SIDE)",
        NOTHING,
    ),
    Fp8Defect(
        "weights are not fenced",
        Kind.FENCE,
        "latent_fp8.kernel",
        "    fence_async_shared()\n",
        "",
    ),
    Fp8Defect(
        "divisors are not waited for",
        Kind.RACE,
        "latent_fp8.kernel",
        "mbarrier.wait(bars.sums_ready.index(turn & 3), (turn >> 2) & 1)",
        NOTHING,
        "19 short work items",
    ),
    Fp8Defect(
        "divisors have one place",
        Kind.RACE,
        "latent_fp8.kernel",
        "stats.inverses.index(turn & 3), HOW)",
        "stats.inverses.index(turn & 0), HOW)",
        "19 short work items",
    ),
    Fp8Defect(
        "O is not rescaled",
        None,
        "latent_fp8.kernel",
        "            O = rescale_heads(O, smem.stats, slot)\n",
        "",
        "rising",
    ),
    Fp8Defect(
        "a factor of one warp's rows is not seen",
        None,
        "latent_fp8.kernel",
        "gl.where(every == 1.0, 0, 1)",
        "gl.where(every == every, 0, 1)",
        "rising",
    ),
    Fp8Defect(
        "rope columns are not multiplied",
        None,
        "latent_fp8.scores",
        "if HOW.has_rope:",
        "if False:",
    ),
    Fp8Defect(
        "rows are not scaled",
        None,
        "latent_fp8.scores",
        "if HOW.has_row_scales:",
        "if False:",
        "fp8_token",
    ),
    Fp8Defect(
        "queries are not scaled",
        None,
        "latent_fp8.scores",
        "        S = S * row_scale[:, None]\n",
        "        pass\n",
        "fp8_token",
    ),
    Fp8Defect(
        "values are not scaled",
        None,
        "latent_fp8.scores",
        "        P = P * scales_of(scales, slot, SL)[None, :]\n",
        "        pass\n",
        "fp8_token",
    ),
    Fp8Defect(
        "weights beyond what fp16 holds",
        None,
        "latent_fp8.scores",
        "OFFSET = gl.constexpr(WEIGHT_OFFSET)",
        "OFFSET = gl.constexpr(17.0)",
    ),
    Fp8Defect(
        "the reference does not move",
        None,
        "latent_fp8.scores",
        "reached > row_max + THRESHOLD",
        "reached > row_max + 1e9",
        "rising",
    ),
    Fp8Defect(
        "columns of a pair trade places",
        None,
        "latent_fp8.values",
        "0x3120",
        "0x2031",
    ),
    Fp8Defect(
        "keys of a pair trade places",
        None,
        "latent_fp8.values",
        "[even, odd]",
        "[odd, even]",
    ),
    Fp8Defect(
        "both halves of the columns have the values of the left",
        None,
        "latent_fp8.values",
        "(SIDE * 4 + TILE % 4)",
        "(TILE % 4)",
    ),
    Fp8Defect(
        "rows of a tile in another order",
        None,
        "latent_fp8.epilogue",
        "(3, 5, 4, 0, 2, 1)",
        "(3, 4, 5, 0, 2, 1)",
    ),
    Fp8Defect(
        "all heads have the divisors of the first",
        None,
        "latent_fp8.epilogue",
        "inverse.slice(ROW, HEADS)",
        "inverse.slice(0, HEADS)",
        "70 heads, wild lengths",
    ),
]


def run(launch: ModuleType, name: str, schedule: str, seed: int) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN.

    Plain rows are judged with exact sums, by the rule for bf16; those with scales as on an H200.
    """
    case, h200 = CASES[name], name in CACHES
    built = on(case, "nan")
    results = new_results(built)
    outcome = Outcome(results.out, results.lse, results.max_logits)
    limits = LIMITS if h200 else replace(LIMITS, fp8_bits=0)
    options = {"schedule": schedule, "seed": seed, "limits": limits}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in launch.calls(plan_of(built), built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(on(case), outcome, fp8_sums=h200).ok


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 24


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: Fp8Defect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "latent_fp8.launch", tmp_path)
    assert_found(defect.kind, partial(run, mutant, defect.case))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), PLAIN_CASES))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert run(launcher, name, "random", 1) == (set(), True)
