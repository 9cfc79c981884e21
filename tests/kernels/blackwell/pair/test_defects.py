"""Every seeded defect of the kernel of a CTA pair is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.blackwell.pair.launch as launcher
from gluon_sim import Kind
from kernels.blackwell.pair.test_kernel import CASES, ONE_PAIR, V32
from kernels.blackwell.sparse.defects import SparseDefect, load_defect
from kernels.blackwell.sparse.test_defects import run_on
from kernels.mutants import NOTHING, RUNS, assert_found
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.triton_version import TRITON

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(TRITON < FIRST_ROWS_PAIR, reason="no pairs in this Triton"),
]
TURNS = {
    "two steps": V32,
    "rising": replace(CASES["rising, five steps"], topk=520),
    "in turn": CASES["three tokens in turn"],
    "e4m3": CASES["e4m3"],
    "one step each": replace(V32, dtype="e4m3", q_lens=(3,), topk=100),  # more slots than V fills
}
DEFECTS = [
    SparseDefect(
        "a slot is filled before it is free",
        Kind.RACE,
        "load",
        "mbarrier.wait(empty.index(slot), phase)",
        NOTHING,
        "two steps",
        "for atom in",
    ),
    SparseDefect(
        "every CTA announces the bytes of both",
        Kind.DEADLOCK,
        "load",
        "KEYS // 2 * GATHERED * BYTES",
        "KEYS * GATHERED * BYTES",
        "two steps",
    ),
    SparseDefect(
        "Q of the next token is loaded under products",
        Kind.RACE,
        "load",
        "                            mbarrier.wait(bars.q_free.index(0), turn & 1)\n",
        "",
        "one step each",
    ),
    SparseDefect(
        "Q is taken to be free a token early",
        Kind.RACE,
        "load",
        "q_free.index(0), turn & 1)",
        "q_free.index(0), (turn & 1) ^ 1)",
        "one step each",
    ),
    SparseDefect(
        "validity bits are read before they are there",
        Kind.RACE,
        "softmax",
        "wait_for_step(bars.valid_full, step, 2)",
        NOTHING,
        "two steps",
    ),
    SparseDefect(
        "V of the step after",
        None,
        "load",
        "first = (k - 1) * KEYS",
        "first = k * KEYS",
        "two steps",
    ),
    SparseDefect(
        "V is not waited for",
        Kind.RACE,
        "multiply",
        "mbarrier.wait(full.index(slot), phase)",
        NOTHING,
        "two steps",
        "for atom in",
    ),
    SparseDefect(
        "weights are not waited for",
        Kind.RACE,
        "multiply",
        "                mbarrier.wait(bars.p_full.index(0), (step - 1) & 1)\n",
        "",
        "two steps",
    ),
    SparseDefect(
        "the output of the token before is kept",
        None,
        "multiply",
        "kept = (k > 1) | (part > 0) | (i > 0)",
        "kept = (number > 0) | (k > 1) | (part > 0)",
        "in turn",
    ),
    SparseDefect(
        "the first CTA does not wait for the weights of the second",
        Kind.RACE,
        "kernel",
        "p_full = barriers(1, True)",
        "p_full = barriers(1, False)",
        "two steps",
    ),
    SparseDefect(
        "the second CTA does not hear of finished products",
        Kind.DEADLOCK,
        "kernel",
        "o_done = barriers(1, False)",
        "o_done = barriers(1, True)",
        "two steps",
    ),
    SparseDefect(
        "only one atom of the output is multiplied",
        None,
        "softmax",
        "    for atom in gl.static_range(2):\n        O[atom].store(",
        "    for atom in gl.static_range(1):\n        O[atom].store(",
        "rising",
    ),
    SparseDefect(
        "missing fence of the weights",
        Kind.FENCE,
        "softmax",
        "            fence_async_shared()\n            mbarrier.arrive(bars.p_full",
        "            mbarrier.arrive(bars.p_full",
        "two steps",
    ),
    SparseDefect(
        "the rest of 8-bit weights is lost",
        None,
        "softmax",
        "rest = (weights - rounded.to(gl.float32))",
        "rest = (weights - weights)",
        "e4m3",
    ),
    SparseDefect(
        "out is stored from a buffer that is overwritten",
        Kind.RACE,
        "softmax",
        "        tma.store_wait(0)\n",
        "",
        "two steps",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    mutant = load_defect(defect, tmp_path, "pair")
    assert_found(defect.kind, partial(run_on, mutant, TURNS[defect.case], target=ONE_PAIR))


@pytest.mark.parametrize("name", TURNS)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    for schedule, seed in RUNS[:2]:
        found = run_on(launcher, TURNS[name], schedule, seed, target=ONE_PAIR)
        assert found == (set(), True)
