"""Wrong inline assembly in the Hopper kernels: found by its numbers, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gluon_sim import Kind, Unsupported
from kernels.hopper.dense.mutant_run import mutant, run_on
from kernels.judging import on
from openmla.kernels.hopper.dense import launch
from openmla.kernels.hopper.latent import launch as sparse_launch
from openmla.lab.testing.case import Case

# Keys are walked from the last to the first in the dense kernel: with this sign each block raises
# the maximum, so that sums are rescaled. Rows of a list are walked forward.
FALLING = Case("dense", 1, 128, 64, 128, q_lens=(70,), k_lens=(300,), values="rising", scale=-0.07)
RISING = Case(
    "sparse", 4, 512, 64, 512, q_lens=(1,), k_lens=(300,), topk=300, scale=0.05, values="rising"
)
CASES = {
    "dense": FALLING,
    "dense fp16": replace(FALLING, dtype="fp16"),
    "many work items": replace(FALLING, heads=3, q_lens=(70, 70), k_lens=(70, 90)),
    # Here and there a row's maximum moves, and that of no other row of its warp.
    "rare": replace(FALLING, values="normal", k_lens=(1000,), scale=1.0),
    "rows": RISING,
    "fp8 rows": replace(RISING, kv="fp8_656", page_size=16, values="normal", topk=140),
}


@dataclass(frozen=True)
class TextDefect:
    """Replace `old` by `new` in `file`. `kind` None: only the numbers are wrong."""

    name: str
    file: str
    old: str
    new: str
    case: str = "dense"
    kind: Kind | None = None


MOVE = 'f"mov.f32 ${i}, ${values + i}; "'
MUL = 'f"mul.f32 ${i}, ${values + i}, ${2 * values + (i & 2)}; "'
UPPER = 'f"setp.neu.f32 p, ${2 * values}, 0f3F800000; "'
LOWER = 'f"setp.neu.or.f32 p, ${2 * values + 2}, 0f3F800000, p; "'
ONE = "0f3F800000"
VOTE = "vote.sync.any.pred p, p, -1; "
RESCALE = [
    TextDefect(name, "accumulator", old, new, "rare")
    for name, old, new in (
        ("a sum for a product", 'f"mul.f32', 'f"add.f32'),
        ("rows are rescaled by each other's factor", "(i & 2)", "(2 - (i & 2))"),
        ("both rows are rescaled by the upper factor", "(i & 2)", "(i & 1)"),
        ("a neighbor is rescaled", MUL, MUL.replace("{values + i}", "{values + (i ^ 1)}")),
        (
            "sums are multiplied by themselves",
            MUL,
            MUL.replace("{2 * values + (i & 2)}", "{values + i}"),
        ),
        ("sums that stay change places", MOVE, MOVE.replace("+ i}", "+ (i ^ 2)}")),
        ("the upper row's factor is not looked at", UPPER, UPPER.replace("${2 * values}", ONE)),
        ("the lower row's factor is not looked at", LOWER, '""'),
    )
]
RESCALE += [TextDefect("lanes branch alone", "accumulator", VOTE, "", "rare", Kind.ERROR)]
HALVES = [
    TextDefect(
        "weights of two columns change places",
        "softmax",
        '"cvt.rn.bf16x2.f32 $0, $2, $1;"',
        '"cvt.rn.bf16x2.f32 $0, $1, $2;"',
    ),
    TextDefect(
        "one weight for two columns, fp16",
        "softmax",
        '"cvt.rn.f16x2.f32 $0, $2, $1;"',
        '"cvt.rn.f16x2.f32 $0, $2, $2;"',
        "dense fp16",
    ),
    TextDefect(
        "weights are unpacked the other way round",
        "softmax",
        '"mov.b32 {$0, $1}, $2;"',
        '"mov.b32 {$1, $0}, $2;"',
    ),
    TextDefect(
        "fp16 weights are taken for bf16",
        "softmax",
        "cvt.rn.f16x2.f32",
        "cvt.rn.bf16x2.f32",
        "dense fp16",
    ),
    TextDefect("sums are lost", "softmax", "mov.b32 $0, $1; }", "mov.b32 $0, a; }"),
    TextDefect("every lane draws a number", "scheduler", "@p atom", "atom", "many work items"),
    TextDefect(
        "a lane that drew nothing tells the number",
        "scheduler",
        "t, 0, 31, -1",
        "t, 1, 31, -1",
        "many work items",
    ),
]
WIDEN = [
    TextDefect(
        "columns 0 and 1 change places", "dequantize.rows", "p, f1, f0;", "p, f0, f1;", "fp8 rows"
    ),
    TextDefect(
        "columns 2, 3 for 0, 1", "dequantize.rows", "{h0, h1}, p;", "{h0, h1}, q;", "fp8 rows"
    ),
    TextDefect(
        "the low bytes twice", "dequantize.rows", "e4m3x2 q, b;", "e4m3x2 q, a;", "fp8 rows"
    ),
    TextDefect("one column unscaled", "dequantize.rows", "mul.f32 f2, f2, $5; ", "", "fp8 rows"),
    TextDefect("one column squared", "dequantize.rows", "f3, f3, $5;", "f3, f3, f3;", "fp8 rows"),
]
SIGNALS = [
    TextDefect(
        f"the compiler's barrier {number}",
        "latent.signals",
        "bar.sync 8, 256",
        f"bar.sync {number}, 256",
        "rows",
        Kind.BARRIER,
    )
    for number in range(4)
] + [
    TextDefect(
        "half the threads are counted",
        "latent.signals",
        "bar.arrive 8, 256",
        "bar.arrive 8, 128",
        "rows",
        Kind.ARRIVE,
    ),
]


@pytest.mark.parametrize("defect", RESCALE + HALVES + WIDEN + SIGNALS, ids=lambda d: d.name)
def test_defect_is_found(defect: TextDefect, tmp_path: Path) -> None:
    case = CASES[defect.case]
    changed = mutant(case.form, defect.file, defect.old, defect.new, tmp_path)
    kinds, right = run_on(changed, on(case, "nan"), seed=1)
    assert defect.kind in kinds if defect.kind is not None else not right, kinds


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    case = CASES[name]
    launcher = launch if case.form == "dense" else sparse_launch
    assert run_on(launcher, on(case, "nan"), seed=1) == (set(), True)


REFUSED = [
    TextDefect("rounding to zero", "softmax", "cvt.rn.bf16x2.f32", "cvt.rz.bf16x2.f32"),
    TextDefect("saturation", "softmax", "cvt.rn.f16x2.f32", "cvt.rn.sat.f16x2.f32", "dense fp16"),
    TextDefect("another vote", "accumulator", "vote.sync.any", "vote.sync.all"),
    TextDefect("a store that happens", "softmax", "setp.lt.f32 p, $1", "setp.neu.f32 p, $1"),
    TextDefect("another format", "dequantize.rows", "e4m3x2 p, a;", "e5m2x2 p, a;", "fp8 rows"),
    TextDefect(
        "another way to draw", "scheduler", "atom.global.add", "atom.global.max", "many work items"
    ),
]


@pytest.mark.parametrize("defect", REFUSED, ids=lambda d: d.name)
def test_what_is_not_modeled_is_refused(defect: TextDefect, tmp_path: Path) -> None:
    case = CASES[defect.case]
    changed = mutant(case.form, defect.file, defect.old, defect.new, tmp_path)
    with pytest.raises(Unsupported):
        run_on(changed, on(case, "nan"), seed=1)
