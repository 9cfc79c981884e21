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
from kernels.hopper.dense_fp8.test_kernel import H200, chip
from kernels.hopper.simulated import plan_of
from kernels.judging import Change, as_built, on
from kernels.mutants import NOTHING, Defect, assert_found, controls, load_mutant, once
from openmla.kernels.hopper.dense_fp8 import launch as launcher
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import DenseOperands

LIMITS = replace(H200, steps=20_000)
CASES = {
    **{f"mixed {name}": case for name, case in MIXED_CASES.items()},
    **{f"fp8 {name}": case for name, case in FP8_CASES.items()},
    "mixed falling far": replace(
        MIXED_CASES["rising"], side_dtype="fp16", scale=-0.1, q_lens=(70,), k_lens=(390,)
    ),
}
TESTED = (*(f"mixed {name}" for name in MIXED_CASES), *(f"fp8 {name}" for name in FP8_CASES))
CASES |= {f"mixed falling {rows} rows": CASES["mixed falling far"] for rows in ("upper", "lower")}


def change_of(name: str) -> Change:
    """What is changed in a case after it was built."""
    return partial(only_half_grows, upper="upper" in name) if " rows" in name else as_built


def only_half_grows(built: BuiltCase, upper: bool) -> BuiltCase:
    """A thread has rows r and r + 8 of every 16: scores of one of them are 0."""
    op = built.operands
    assert isinstance(op, DenseOperands)
    tokens = torch.arange(op.q.shape[0])
    op.q.view(torch.uint8)[(tokens % 16 < 8) != upper] = 0
    return built


@dataclass(frozen=True)
class Fp8Defect(Defect):
    """With a case that it shows in."""

    case: str = "mixed scales"


PRODUCER = [
    Fp8Defect(
        "K is overwritten while it is read",
        Kind.RACE,
        "dense.producer",
        "mbarrier.wait(bars.k_empty.index(stage), phase)",
        NOTHING,
    ),
    Fp8Defect(
        "V is overwritten while it is read",
        Kind.RACE,
        "dense.producer",
        "mbarrier.wait(bars.v_empty.index(stage), phase)",
        NOTHING,
        "mixed rising",
    ),
    Fp8Defect(
        "scales are not waited for",
        Kind.RACE,
        "dense_fp8.kernel",
        "allocate_barriers(NC, ST, 1 + LANES if K_SCALED else 1)",
        "allocate_barriers(NC, ST, 1)",
    ),
    Fp8Defect(
        "a wide rope is announced as a narrow one",
        Kind.BYTES,
        "dense.producer",
        "DIMS.rope * ROPE_BYTES",
        "DIMS.rope * BYTES",
        "mixed rope bf16",
    ),
    Fp8Defect(
        "scales are those of the request's first keys",
        None,
        "dense.producer",
        "load_scales(sources.k_scale, block.row, ",
        "load_scales(sources.k_scale, block.row * 0, ",
    ),
    Fp8Defect(
        "V of the next request is loaded",
        None,
        "dense.producer",
        "load_ragged(sources.v, start, keys,",
        "load_ragged(sources.v, start, keys + BN,",
        "mixed causal",
    ),
]
CONSUMER = [
    Fp8Defect(
        "rows keep the scales of the first work item",
        None,
        "dense_fp8.kernel",
        "next_tile\n        by = row_factors(q_scale_ptr, tile, factor, WHO, SL)\n",
        "next_tile\n",
    ),
    Fp8Defect(
        "the factor is applied twice",
        None,
        "dense_fp8.softmax",
        "gl.abs(q_scale) * factor",
        "gl.abs(q_scale) * factor * factor",
    ),
    Fp8Defect(
        "Q of the next work item is not waited for",
        Kind.RACE,
        "dense_fp8.kernel",
        "mbarrier.wait(bars.q_ready.index(WHO), turn & 1, pred=blocks > 0)",
        NOTHING,
        "fp8 causal",
    ),
    Fp8Defect(
        "Q is not released",
        Kind.DEADLOCK,
        "dense_fp8.kernel",
        "        mbarrier.arrive(bars.q_empty.index(WHO), count=1)\n",
        "        pass\n",
        "mixed edges",
    ),
    Fp8Defect(
        "K of a work item's last block is not released",
        Kind.DEADLOCK,
        "dense_fp8.kernel",
        "        mbarrier.arrive(bars.k_empty.index(before.stage), count=1)\n"
        "        mbarrier.arrive(bars.q_empty",
        "        mbarrier.arrive(bars.q_empty",
        "mixed edges",
    ),
    Fp8Defect(
        "V of the last block but one is not released",
        Kind.DEADLOCK,
        "dense_fp8.kernel",
        "        if blocks > 1:\n            mbarrier.arrive(bars.v_empty.index(older), count=1)\n",
        "",
        "mixed rising",
    ),
    Fp8Defect(
        "wide rope columns of Q are not fenced",
        Kind.FENCE,
        "dense_fp8.products",
        "fence_async_shared()",
        NOTHING,
        "mixed rope bf16",
        after="def widen_rope",
    ),
    Fp8Defect(
        "wide rope columns of Q are lost",
        None,
        "dense_fp8.products",
        "        smem.q_wide_rope.index(WHO).store(rope.to(smem.q_wide_rope.dtype))\n",
        "        zeros = (rope.to(gl.float32) * 0).to(smem.q_wide_rope.dtype)\n"
        "        smem.q_wide_rope.index(WHO).store(zeros)\n",
        "mixed rope bf16",
    ),
    Fp8Defect(
        "a wide rope is not added",
        None,
        "dense_fp8.products",
        "use_acc=WIDE_ROPE",
        "use_acc=False",
        "mixed rope bf16",
    ),
    Fp8Defect(
        "the output is read while it is made",
        Kind.ACCUMULATOR,
        "dense_fp8.kernel",
        "wait(QK_GROUPS,",
        "wait(QK_GROUPS + 1,",
        "mixed causal",
    ),
    Fp8Defect(
        "O is not rescaled",
        None,
        "dense_fp8.kernel",
        "v_empty.index(older), count=1)\n        O = rescale_quads(O, rescale)\n",
        "v_empty.index(older), count=1)\n",
        "mixed peaky",
    ),
    Fp8Defect(
        "O is not rescaled before its last product",
        None,
        "dense_fp8.kernel",
        "        before, older = done\n        O = rescale_quads(O, rescale)\n",
        "        before, older = done\n",
        "mixed falling far",
    ),
    Fp8Defect(
        "turned signs are not fenced",
        Kind.FENCE,
        "dense_fp8.products",
        "        fence_async_shared()\n",
        "",
        "mixed scales",
        after="def turn_signs",
    ),
]
WEIGHTS = [
    Fp8Defect(
        "scores of a word trade places",
        None,
        "dense_fp8.correction",
        "[given, left, right, ",
        "[given, right, left, ",
        "mixed falling far",
    ),
    Fp8Defect(
        "weights are as large as the maximum has grown",
        None,
        "dense_fp8.correction",
        "MOST_SUM).hex()",
        "1e38).hex()",
        "mixed falling far",
    ),
    Fp8Defect(
        "sums are those of the first weights",
        None,
        "dense_fp8.correction",
        'text += [f"@p mov.f32 {rest[2 + row]}, s"]',
        "pass",
        "mixed falling far",
    ),
    Fp8Defect(
        "only the upper row of a thread is looked at",
        None,
        "dense_fp8.correction",
        "setp.gt.or.f32 p, {sums[1]}",
        "setp.gt.or.f32 p, {sums[0]}",
        "mixed falling lower rows",
    ),
    Fp8Defect(
        "only the lower row of a thread is looked at",
        None,
        "dense_fp8.correction",
        "setp.gt.f32 p, {sums[0]}",
        "setp.gt.f32 p, {sums[1]}",
        "mixed falling upper rows",
    ),
    Fp8Defect(
        "the row sum is not rescaled",
        None,
        "dense_fp8.kernel",
        "row_sum * rescale + ",
        "row_sum + ",
        "mixed falling far",
    ),
    Fp8Defect(
        "keys are not scaled",
        None,
        "dense_fp8.softmax",
        "if scales is not None:",
        "if False:",
    ),
    Fp8Defect(
        "rows of the next request have its scales",
        Kind.BOUNDS,
        "dense_fp8.softmax",
        "mask=row < tile.rows, other=0.0",
        "mask=row < tile.rows + 999, other=0.0",
    ),
]
COPY = [
    Fp8Defect(
        "every head has the values of the first",
        None,
        "upcast.kernel",
        "(row % heads).to(gl.int64) * v_stride_h",
        "(row % heads).to(gl.int64) * 0",
        "fp8 causal",
    ),
    Fp8Defect(
        "more is upcast than there is",
        Kind.BOUNDS,
        "upcast.kernel",
        "own = (row < rows)[:, None]",
        "own = (row < rows + heads)[:, None]",
        "fp8 causal",
    ),
    Fp8Defect(
        "a part of V is not upcast",
        None,
        "upcast.launch",
        "ceildiv(rows, ROWS.value)",
        "rows // ROWS.value",
        "fp8 causal",
    ),
]
DEFECTS = PRODUCER + CONSUMER + WEIGHTS + COPY


def run(
    launch: ModuleType, name: str, num_qo: int, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right. Around the operands is NaN."""
    case = CASES[name]
    change = change_of(name)
    built = change(on(case, "nan"))
    results = new_results(built)
    plan = plan_of(built, chip(case), num_qo)
    outcome = Outcome(results.out, results.lse)
    with intercept(
        limits=LIMITS, outputs=outcome.tensors(), schedule=schedule, seed=seed
    ) as reports:
        for call in launch.calls(plan, built.operands, results):
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    return kinds, judge(change(on(case)), outcome, fp8_sums=True).ok


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 20


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: Fp8Defect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "dense_fp8.launch", tmp_path)
    assert_found(defect.kind, partial(run, mutant, defect.case, defect.num_qo))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), TESTED))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert run(launcher, name, 2, "random", 1) == (set(), True)


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
