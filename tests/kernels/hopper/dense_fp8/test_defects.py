"""Seeded defects of the dense FP8 kernel: each is found in a few runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import openmla.kernels.hopper as package
from gluon_sim import Kind, intercept
from kernels.hopper.dense_fp8.test_kernel import CASES as MIXED_CASES
from kernels.hopper.dense_fp8.test_kernel import FP8 as FP8_CASES
from kernels.hopper.dense_fp8.test_kernel import H200, chip, judged
from kernels.hopper.simulated import plan_of
from kernels.judging import on
from kernels.mutants import NOTHING, Defect, assert_found, load_mutant, once
from openmla.kernels.hopper.dense_fp8 import launch as launcher
from openmla.operands import DenseOperands
from openmla.testing.build import BuiltCase, Outcome
from openmla.testing.compare import judge
from openmla.testing.simulate import new_results

LIMITS = replace(H200, steps=20_000)
MANY = replace(FP8_CASES["scales"], heads=1, q_lens=(1,) * 20, k_lens=(3, 17) * 10)
RISING = replace(FP8_CASES["rising"], scale=-0.2, q_lens=(70,), k_lens=(390,))
CASES = {
    **{f"mixed {name}": case for name, case in MIXED_CASES.items()},
    **{f"fp8 {name}": case for name, case in FP8_CASES.items()},
    "fp8 many": MANY,
    "fp8 falling far": RISING,
    "mixed falling far": replace(RISING, side_dtype="fp16", scale=-0.1),
}


@dataclass(frozen=True)
class Fp8Defect(Defect):
    """With a case that it shows in."""

    case: str = "mixed scales"


PRODUCER = [
    Fp8Defect(
        "K is overwritten while it is read", Kind.RACE, "dense_fp8.producer",
        "mbarrier.wait(k_empty.index(stage), phase)", NOTHING,
    ),
    Fp8Defect(
        "V is overwritten while it is read", Kind.RACE, "dense_fp8.producer",
        "mbarrier.wait(v_empty.index(stage), phase)", NOTHING, "fp8 rising",
    ),
    Fp8Defect(
        "scales are not waited for", Kind.RACE, "dense_fp8.kernel",
        "k_ready = barriers(ST, 1 + LANES if K_SCALED else 1)", "k_ready = barriers(ST, 1)",
    ),
    Fp8Defect(
        "a wide rope is announced as a narrow one", Kind.BYTES, "dense_fp8.producer",
        "DIMS[2] * ROPE_BYTES", "DIMS[2]", "mixed rope bf16",
    ),
    Fp8Defect(
        "scales are those of the request's first keys", None, "dense_fp8.producer",
        "load_scales(k_scale, row, ", "load_scales(k_scale, row * 0, ",
    ),
    Fp8Defect(
        "V of the next request is loaded", None, "dense_fp8.producer",
        "load_ragged(v_desc, start, keys,", "load_ragged(v_desc, start, keys + BN,", "mixed causal",
    ),
    Fp8Defect(
        "columns of V begin where those of the first request do", None, "dense_fp8.producer",
        "column_of(start - skipped, request)", "column_of(start - skipped, request * 0)",
        "fp8 causal",
    ),
    Fp8Defect(
        "every range reads the columns of the first", None, "dense_fp8.producer",
        "request) + skipped", "request)", "fp8 split, scales",
    ),
]  # fmt: skip
CONSUMER = [
    Fp8Defect(
        "rows keep the scales of the first work item", None, "dense_fp8.kernel",
        "next_work_item\n        by = row_factors(q_scale_ptr, work, factor, WHO, SL)\n",
        "next_work_item\n",
    ),
    Fp8Defect(
        "the factor is applied twice", None, "dense_fp8.softmax",
        "gl.abs(q_scale) * factor", "gl.abs(q_scale) * factor * factor",
    ),
    Fp8Defect(
        "Q of the next work item is not waited for", Kind.RACE, "dense_fp8.kernel",
        "mbarrier.wait(q_ready.index(WHO), turn & 1, pred=blocks > 0)", NOTHING, "fp8 causal",
    ),
    Fp8Defect(
        "Q is not released", Kind.DEADLOCK, "dense_fp8.kernel",
        "        mbarrier.arrive(q_empty.index(WHO), count=1)\n", "        pass\n",
        "fp8 edges",
    ),
    Fp8Defect(
        "wide rope columns of Q are not fenced", Kind.FENCE, "dense_fp8.products",
        "        fence_async_shared()\n", "", "mixed rope bf16",
    ),
    Fp8Defect(
        "wide rope columns of Q are lost", None, "dense_fp8.products",
        "        q_smem[3].index(WHO).store(rope.to(q_smem[3].dtype))\n",
        "        q_smem[3].index(WHO).store((rope.to(gl.float32) * 0).to(q_smem[3].dtype))\n",
        "mixed rope bf16",
    ),
    Fp8Defect(
        "a wide rope is not added", None, "dense_fp8.products", "use_acc=WIDE_ROPE",
        "use_acc=False", "mixed rope bf16",
    ),
    Fp8Defect(
        "the output is read while it is made", Kind.ACCUMULATOR, "dense_fp8.kernel",
        "wait_pv(QK_GROUPS,", "wait_pv(QK_GROUPS + 1,", "mixed causal",
    ),
    Fp8Defect(
        "a part of the output is read while it is made", Kind.ACCUMULATOR, "dense_fp8.products",
        "PENDING + (len(O) - 1 - i)", "PENDING + (len(O) - i)", "fp8 causal",
    ),
    Fp8Defect(
        "the first part is added while it is made", Kind.ACCUMULATOR, "dense_fp8.kernel",
        "wait_part(QK_GROUPS, ", "wait_part(QK_GROUPS + 1, ", "fp8 causal",
    ),
    Fp8Defect(
        "O is not rescaled", None, "dense_fp8.kernel",
        "        O = rescale_parts(O, rescale)\n", "", "fp8 falling far",
    ),
    Fp8Defect(
        "a block's sums take the place of O", None, "dense_fp8.products",
        "done = O + done", "done = done + 0.0", "fp8 causal",
    ),
    Fp8Defect(
        "the second part has the values of the first", None, "dense_fp8.products",
        "FIRST: gl.constexpr = I * WIDTH", "FIRST: gl.constexpr = 0", "fp8 causal",
    ),
    Fp8Defect(
        "turned signs are not fenced", Kind.FENCE, "dense_fp8.products",
        "        fence_async_shared()\n", "", "mixed scales", after="def turn_signs",
    ),
]  # fmt: skip
WEIGHTS = [
    Fp8Defect(
        "weights in the order of the scores", None, "dense_fp8.words",
        "gl.reshape(P, [64, BN // 16, 2, 4, 2]), (0, 1, 3, 4, 2))",
        "gl.reshape(P, [64, BN // 16, 4, 2, 2]), (0, 1, 2, 4, 3))", "fp8 causal",
    ),
    Fp8Defect(
        "two weights of a word trade places", None, "dense_fp8.words",
        "[a, b, c, d], dtype", "[a, c, b, d], dtype", "fp8 causal",
    ),
    Fp8Defect(
        "weights are as large as the maximum has grown", None, "dense_fp8.correction",
        "MOST_SUM[4 // of_word], ", "1e30, ", "fp8 falling far",
    ),
    Fp8Defect(
        "weights beyond what e4m3 holds", None, "dense_fp8.softmax",
        "gl.constexpr(FP8_OFFSET)", "gl.constexpr(FP8_OFFSET + 7)", "fp8 causal",
    ),
    Fp8Defect(
        "weights of 16 bits are as large as the maximum has grown", None, "dense_fp8.correction",
        "MOST_SUM[4 // of_word], ", "1e38, ", "mixed falling far",
    ),
    Fp8Defect(
        "sums are those of the first weights", None, "dense_fp8.correction",
        'text += [f"@p mov.f32 {rest[2 + row]}, s"]', "pass", "mixed falling far",
    ),
    Fp8Defect(
        "the row sum is not rescaled", None, "dense_fp8.kernel",
        "row_sum * rescale + ", "row_sum + ", "fp8 falling far",
    ),
    Fp8Defect(
        "keys are not scaled", None, "dense_fp8.softmax", "if SCALED:", "if False:",
    ),
    Fp8Defect(
        "rows of the next request have its scales", Kind.BOUNDS, "dense_fp8.softmax",
        "mask=row < rows, other=0.0", "mask=row < rows + 999, other=0.0",
    ),
]  # fmt: skip
COPY = [
    Fp8Defect(
        "keys of V in their own order", None, "dense_fp8.transpose",
        "((place >> 1) & 1) * 8 + ((place >> 2) & 3) * 2 + (place & 1)", "place % GROUP",
        "fp8 causal",
    ),
    Fp8Defect(
        "the rest of a group holds the next request's values", None, "dense_fp8.transpose",
        "own = (place >= 0) & (row < stop)", "own = (place >= 0) & (row < tokens)", "fp8 causal",
    ),
    Fp8Defect(
        "requests share groups of columns", None, "dense_fp8.transpose",
        " + request * GROUP", " + request * 0", "fp8 many",
    ),
    Fp8Defect(
        "the search stops a request early", None, "dense_fp8.transpose",
        "(tried < batch)", "(tried < batch - 1)", "fp8 many",
    ),
    Fp8Defect(
        "zeros begin a group early", None, "dense_fp8.transpose",
        "groups = (keys + (GROUP - 1)) // GROUP", "groups = keys // GROUP", "fp8 causal",
    ),
    Fp8Defect(
        "the host searches half of the requests", None, "dense_fp8.launch",
        "(1 << (batch - 1).bit_length()) // 2", "(1 << (batch - 1).bit_length()) // 8", "fp8 many",
    ),
]  # fmt: skip
DEFECTS = PRODUCER + CONSUMER + WEIGHTS + COPY


def run(
    launch: ModuleType, name: str, num_qo: int, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN."""
    case = CASES[name]
    built = on(case, "nan")
    results = new_results(built)
    plan = plan_of(built, chip(case), num_qo)
    outcome = Outcome(results.out, results.lse)
    with intercept(
        limits=LIMITS, outputs=outcome.tensors(), schedule=schedule, seed=seed
    ) as reports:
        for call in launch.calls(plan, built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judged(case, outcome).ok


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 20


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: Fp8Defect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "dense_fp8.launch", tmp_path)
    assert_found(defect.kind, partial(run, mutant, defect.case, defect.num_qo))


@pytest.mark.parametrize("name", sorted({defect.case for defect in DEFECTS}))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert run(launcher, name, 2, "random", 1) == (set(), True)


def flat() -> BuiltCase:
    """Weights that are all equal, and values of one sign: sums that only grow."""
    case = replace(FP8_CASES["causal"], heads=1, scale=0.0, q_lens=(40,), k_lens=(8192,))
    built = on(case)
    assert isinstance(built.operands, DenseOperands)
    bits = built.operands.v.view(torch.uint8)
    bits &= 0x7F
    return built


def flat_is_right(launch: ModuleType) -> bool:
    built = flat()
    results = new_results(built)
    with intercept(limits=H200):
        for call in launch.calls(plan_of(built, 1, 1), built.operands, results):
            call.run()
    outcome = Outcome(results.out, results.lse)
    return judge(flat(), outcome, fp8_sums=True, fp8_weights=True).ok


def test_sums_of_fp8_products_over_all_keys_are_found(tmp_path: Path) -> None:
    """What adds to a sum of thousands of keys is cut off, as it is on the chip."""

    def adds(source: str) -> str:
        apart, added = "columns, none, use_acc=False, is_async=True", "done = O + done"
        assert source.count(apart) == source.count(added) == 1
        return source.replace(apart, "columns, O, is_async=True").replace(added, "done = done + 0")

    assert flat_is_right(launcher)
    mutant = load_mutant(package, "dense_fp8.products", adds, "dense_fp8.launch", tmp_path)
    assert not flat_is_right(mutant)


def signed_scales() -> BuiltCase:
    """Scales of rows of either sign."""
    built = on(CASES["mixed scales"])
    assert isinstance(built.operands, DenseOperands)
    q_scale = built.operands.weights.q_scale
    assert q_scale is not None
    q_scale[::3] *= -1
    return built


def signs_are_right(launch: ModuleType) -> bool:
    built = signed_scales()
    results = new_results(built)
    with intercept(limits=H200):
        for call in launch.calls(plan_of(built, 3, 2), built.operands, results):
            call.run()
    return judge(signed_scales(), Outcome(results.out, results.lse), fp8_sums=True).ok


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("dense_fp8.products", "gl.where(scale < 0.0, -128, 0)", "gl.where(scale < 0.0, 0, 0)"),
        ("dense_fp8.softmax", "gl.abs(q_scale) * factor", "q_scale * factor"),
    ],
)
def test_signs_of_scales_are_kept(file: str, right: str, wrong: str, tmp_path: Path) -> None:
    assert signs_are_right(launcher)
    mutant = load_mutant(package, file, once(right, wrong), "dense_fp8.launch", tmp_path)
    assert not signs_are_right(mutant)
