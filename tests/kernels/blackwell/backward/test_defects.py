"""Seeded defects of Blackwell's backward kernels: each is found in a few runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.blackwell as package
from gluon_sim import Kind
from kernels.blackwell.backward.simulated import BLACKWELL
from kernels.gradients import CASES as KERNEL_CASES
from kernels.gradients import RINGS, BackwardDefect
from kernels.mutants import NOTHING, assert_found, controls, load_mutant
from openmla.kernels.blackwell.backward import launch as launcher

CASES = {**KERNEL_CASES, "rings": RINGS}


LOADS = [
    BackwardDefect(
        "K of the query pass is overwritten while it is read",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.k_empty.index(stage), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "Q of the key pass is overwritten while it is read",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.q_empty.index(stage), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "Q of the query pass is multiplied before it is there",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.q_ready.index(0), 0)",
        NOTHING,
        "edges",
    ),
    BackwardDefect(
        "V of the key pass is multiplied before it is there",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.v_ready.index(0), 0)",
        NOTHING,
        "edges",
    ),
    BackwardDefect(
        "bytes of d_out are expected with Q",
        Kind.BYTES,
        "backward.query_pass",
        "mbarrier.expect(bar, OWN * (DIMS.nope + DIMS.rope) * 2)",
        "mbarrier.expect(bar, OWN * (DIMS.nope + DIMS.rope + DIMS.v) * 2)",
    ),
    BackwardDefect(
        "rope columns of Q are the first ones",
        None,
        "backward.query_pass",
        "load_rows(sources.q.rope, item.token, item.head, DIMS.nope, bar, smem.q.rope.index(0))",
        "load_rows(sources.q.rope, item.token, item.head, 0, bar, smem.q.rope.index(0))",
    ),
    BackwardDefect(
        "the rope row of another head",
        None,
        "backward.key_pass",
        "head = head * 0",
        "head = head * 1",
    ),
    BackwardDefect(
        "queries of the key pass begin with the first",
        None,
        "backward.key_pass",
        "row = (item.first + c) * BQ",
        "row = c * BQ",
        "edges",
    ),
]
PRODUCTS = [
    BackwardDefect(
        "scores are overwritten before both groups have them",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.s_empty.index(0), (j & 1) ^ 1)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "dP^T is overwritten before both groups have it",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.dp_empty.index(0), (j & 1) ^ 1)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "dS is multiplied before it is stored",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.ds_full.index(0), (j - 1) & 1)",
        NOTHING,
        "edges",
    ),
    BackwardDefect(
        "one group's P^T is enough",
        Kind.RACE,
        "backward.key_pass",
        "p_full=barriers(1, 2)",
        "p_full=barriers(1, 1)",
        "edges",
    ),
    BackwardDefect(
        "dS is overwritten while it is multiplied",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.ds_empty.index(0), turn ^ 1)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "P^T is overwritten while it is multiplied",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.p_empty.index(0), turn ^ 1)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "Q is given back with d_out",
        Kind.RACE,
        "backward.key_pass",
        "tcgen05_commit(bars.d_empty.index(before))",
        "tcgen05_commit(bars.d_empty.index(before)) ; tcgen05_commit(bars.q_empty.index(before))",
        "rings",
    ),
    BackwardDefect(
        "gradients forget the blocks before",
        None,
        "backward.products",
        "tcgen05_mma(dS, walked.nope.index(stage), nope, use_acc=begun)",
        "tcgen05_mma(dS, walked.nope.index(stage), nope, use_acc=False)",
        "rings",
    ),
    BackwardDefect(
        "rope columns of gradients begin with what was there",
        Kind.UNWRITTEN,
        "backward.products",
        "tcgen05_mma(dS, walked.rope.index(stage), rope, use_acc=begun)",
        "tcgen05_mma(dS, walked.rope.index(stage), rope)",
    ),
    BackwardDefect(
        "d_v by scores' gradients",
        None,
        "backward.key_pass",
        "P = weights_at(tmem, TMEM.weights, BQ, DTYPE, TMEM)",
        "P = weights_at(tmem, TMEM.gradients, BQ, DTYPE, TMEM)",
    ),
    BackwardDefect(
        "d_k has the products of the last block twice",
        None,
        "backward.key_pass",
        "issue_own_gradients(smem.q, tmem, before, j > 1, DIMS, TMEM)",
        "issue_own_gradients(smem.q, tmem, 0, j > 1, DIMS, TMEM)",
        "rings",
    ),
]
SCORES = [
    BackwardDefect(
        "the second group has the first one's columns",
        None,
        "backward.columns",
        "return tmem.slice(column + WHO * HALF, HALF).load(REGS)",
        "return tmem.slice(column, HALF).load(REGS)",
    ),
    BackwardDefect(
        "dS of both groups in the same columns",
        None,
        "backward.columns",
        "first: gl.constexpr = column + WHO * HALF * DTYPE.primitive_bitwidth // 32",
        "first: gl.constexpr = column",
    ),
    BackwardDefect(
        "delta is added",
        None,
        "backward.key_pass",
        "dS = P * (dP - delta[None, :])",
        "dS = P * (dP + delta[None, :])",
    ),
    BackwardDefect(
        "the sign of the scale is lost",
        None,
        "backward.key_pass",
        "S = signed(half_of(tmem, TMEM.scores, BQ, WHO), HOW.sign)",
        "S = half_of(tmem, TMEM.scores, BQ, WHO)",
        "negative scale",
    ),
    BackwardDefect(
        "the second group's mask is that of the first, of keys",
        None,
        "backward.query_pass",
        "skip = (item.blocks - 1 - j) * BN + WHO * (BN // 2)",
        "skip = (item.blocks - 1 - j) * BN",
    ),
    BackwardDefect(
        "the second group's mask is that of the first, of queries",
        None,
        "backward.key_pass",
        "item.limit - (item.first + j) * BQ - WHO * HALF",
        "item.limit - (item.first + j) * BQ",
    ),
    BackwardDefect(
        "a key is not seen by its first query",
        None,
        "backward.key_pass",
        "column[None, :] >= (row + first)[:, None]",
        "column[None, :] > (row + first)[:, None]",
    ),
    BackwardDefect(
        "statistics are read before the other group has them",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.t_full.index(0), 0)",
        NOTHING,
        "edges",
    ),
]
RESULTS = [
    BackwardDefect(
        "the row after a sequence is written",
        Kind.RACE,
        "backward.store",
        "exists = (row < item.rows)[:, None]",
        "exists = (row <= item.rows)[:, None]",
    ),
    BackwardDefect(
        "keys that nobody sees are not cleared",
        None,
        "backward.key_pass",
        "seen = gl.full([OWN], 0, gl.int32, RL) < item.length",
        "seen = gl.full([OWN], 0, gl.int32, RL) <= item.length",
        "more queries than keys",
    ),
    BackwardDefect(
        "keys past the last sequence have the sign of the scale",
        None,
        "backward.store",
        "gl.where(seen, values + 0.0, 0.0)",
        "values",
        "negative scale",
    ),
    BackwardDefect(
        "the second group writes the first one's columns",
        Kind.RACE,
        "backward.store",
        "gl.store(here + (FIRST + OWN + i * STEP)",
        "gl.store(here + (FIRST + i * STEP)",
    ),
    BackwardDefect(
        "columns of d_q's rope are those of its first part",
        Kind.RACE,
        "backward.query_pass",
        "columns: gl.constexpr = DIMS.nope",
        "columns: gl.constexpr = 0",
    ),
    BackwardDefect(
        "accumulators are read before the last product",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.ds_empty.index(0), (blocks - 1) & 1)",
        NOTHING,
    ),
    BackwardDefect(
        "d_k is not scaled",
        None,
        "backward.key_pass",
        "write_half(tmem, TMEM.nope, DIMS.nope, stage, scale, seen",
        "write_half(tmem, TMEM.nope, DIMS.nope, stage, 1.0, seen",
    ),
]
DEFECTS = LOADS + PRODUCTS + SCORES + RESULTS


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 30


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: BackwardDefect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "backward.launch", tmp_path)
    assert_found(defect.kind, partial(BLACKWELL.check, mutant, CASES[defect.case]))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), KERNEL_CASES))
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    assert BLACKWELL.check(launcher, CASES[name], "random", 1) == (set(), True)
