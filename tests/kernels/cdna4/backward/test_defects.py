"""Seeded defects of CDNA4's backward kernels: each is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.cdna4 as package
from gluon_sim import Kind
from kernels.cdna4.backward.simulated import CDNA4
from kernels.cdna4.backward.test_kernel import NARROW, SHORT
from kernels.gradients import BackwardDefect
from kernels.mutants import NOTHING, assert_found, load_mutant
from openmla.kernels.cdna4.backward import launch as launcher
from openmla.lab.testing.gradients import GradientCase

CASES = {
    "causal": GradientCase(SHORT),
    "rope": GradientCase(replace(SHORT, heads=2, d_rope=64, rope="shared")),
    "gradient of lse": GradientCase(SHORT, d_lse=True),
    "sink": GradientCase(replace(SHORT, sink="normal")),
    "negative scale": GradientCase(replace(SHORT, q_lens=(33, 0), k_lens=(40, 5), scale=-0.1)),
    # Rings turn, and two sequences have tiles.
    "rings": GradientCase(replace(NARROW, q_lens=(150, 20), k_lens=(180, 70), spare=0)),
}


COPIES = [
    BackwardDefect(
        "keys are read before they have arrived",
        None,
        "backward.query_pass",
        "async_copy.wait_group(0)\n        copy_step",
        "async_copy.wait_group(1)\n        copy_step",
        "rings",
    ),
    BackwardDefect(
        "queries are read before they have arrived",
        None,
        "backward.key_pass",
        "async_copy.wait_group(0)\n        ahead",
        "async_copy.wait_group(1)\n        ahead",
        "rings",
    ),
    BackwardDefect(
        "the next step is copied over the one that is read",
        None,
        "backward.query_pass",
        "copy_step(rings, (j + 1) % BLOCK.slots,",
        "copy_step(rings, j % BLOCK.slots,",
        "rings",
    ),
    BackwardDefect(
        "statistics of the step before",
        None,
        "backward.key_pass",
        "totals = statistics_of(turns.totals_ptr, ahead,",
        "totals = statistics_of(turns.totals_ptr, ahead - STEP,",
        "rings",
    ),
    BackwardDefect(
        "rows past the sequence are copied",
        Kind.BOUNDS,
        "backward.key_pass",
        "limit=item.queries)",
        "limit=item.queries + 64)",
        "causal",
    ),
    BackwardDefect(
        "deltas are the totals",
        None,
        "backward.key_pass",
        "deltas_ptr=totals_ptr + heads.to(gl.int64) * statistics_rows",
        "deltas_ptr=totals_ptr",
    ),
    BackwardDefect(
        "rope columns of Q are the first ones",
        None,
        "backward.key_pass",
        "rope = HeadRows(q_row + BLOCK.d_nope, q_stride_t)",
        "rope = HeadRows(q_row, q_stride_t)",
        "rope",
    ),
]
PRODUCTS = [
    BackwardDefect(
        "rows along the product are those of the first sub-blocks",
        None,
        "backward.walk",
        "subs.index(PART * COUNT + c).load(MMA.v)",
        "subs.index(c).load(MMA.v)",
    ),
    BackwardDefect(
        "rope is not among the scores",
        None,
        "backward.walk",
        "frags = frags + across(slots.rope, PART, LAYOUTS.tiles.rope, LAYOUTS.matrices)",
        NOTHING,
        "rope",
    ),
    BackwardDefect(
        "d_v by scores' gradients",
        None,
        "backward.key_pass",
        "left_operand(P, DTYPE, MMA)",
        "left_operand(P * dP, DTYPE, MMA)",
    ),
    BackwardDefect(
        "delta is added in the key pass",
        None,
        "backward.key_pass",
        "P * (dP - delta[None, :])",
        "P * (dP + delta[None, :])",
    ),
    BackwardDefect(
        "delta is added in the query pass",
        None,
        "backward.query_pass",
        "P * (dP - rows.delta[:, None])",
        "P * (dP + rows.delta[:, None])",
    ),
    BackwardDefect(
        "the sign of the scale is lost in the key pass",
        None,
        "backward.key_pass",
        "S = signed(scores_of(own.columns, q, BM, MMA), HOW.sign)",
        "S = scores_of(own.columns, q, BM, MMA)",
        "negative scale",
    ),
]
MASKS = [
    BackwardDefect(
        "a key is seen by the query before it",
        None,
        "backward.key_pass",
        "seeing=row - (k_len - q_len)",
        "seeing=row - (k_len - q_len) - 1",
    ),
    BackwardDefect(
        "a query sees one key less",
        None,
        "backward.query_pass",
        "S = hide(S, item.seen - skip,",
        "S = hide(S, item.seen - 1 - skip,",
    ),
    BackwardDefect(
        "no step of queries has a mask",
        None,
        "backward.key_pass",
        "masked = gl.minimum(masked, stop)",
        "masked = first",
    ),
    BackwardDefect(
        "a mask of 32 queries too early",
        None,
        "backward.key_pass",
        "S = hide_before(S, item.seeing - (j * STEP + i * EDGE))",
        "S = hide_before(S, item.seeing - j * STEP)",
        "rings",
    ),
    BackwardDefect(
        "the walk begins one step late",
        None,
        "backward.key_pass",
        "first = gl.minimum(gl.maximum(item.seeing, 0) // STEP, stop)",
        "first = gl.minimum((gl.maximum(item.seeing, 0) + STEP - 1) // STEP, stop)",
        "rings",
    ),
]
STATISTICS = [
    BackwardDefect(
        "the total is a natural logarithm",
        None,
        "backward.statistics",
        "total = gl.where(seeing, total * LOG2_E, PLUS_INF)",
        "total = gl.where(seeing, total, PLUS_INF)",
    ),
    BackwardDefect(
        "the sink is left out of the total",
        None,
        "backward.statistics",
        "total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))",
        "total = lse + 0.0 * sink",
        "sink",
    ),
    BackwardDefect(
        "the gradient of lse is left out",
        None,
        "backward.statistics",
        "delta = delta - gl.load(d_lse_rows, mask=seeing, other=0.0)",
        NOTHING,
        "gradient of lse",
    ),
    BackwardDefect(
        "d_sink has the wrong sign",
        None,
        "backward.statistics",
        "-gl.sum(gl.where(seeing, share * delta, 0.0), 0)",
        "gl.sum(gl.where(seeing, share * delta, 0.0), 0)",
        "sink",
    ),
    BackwardDefect(
        "statistics of all sequences begin with those of the first",
        None,
        "backward.key_pass",
        "place=first_tile(sequence, sequences.cu_q_ptr, total_q, 1, BM) * BM",
        "place=first_tile(sequence * 0, sequences.cu_q_ptr, total_q, 1, BM) * BM",
        "rings",
    ),
]
RESULTS = [
    BackwardDefect(
        "the row after a sequence is written",
        Kind.RACE,
        "backward.walk",
        "gl.store(pointers + c * EDGE, rounded, mask=(row < rows)[:, None])",
        "gl.store(pointers + c * EDGE, rounded, mask=(row <= rows)[:, None])",
        "rings",
    ),
    BackwardDefect(
        "keys that nobody sees get -0",
        None,
        "backward.walk",
        "scaled = sums[FIRST + c] * scale + 0.0",
        "scaled = sums[FIRST + c] * scale",
        "negative scale",
    ),
    BackwardDefect(
        "d_k without its rope",
        None,
        "backward.key_pass",
        "ROPE: gl.constexpr = BLOCK.d_nope // EDGE",
        "ROPE: gl.constexpr = 0",
        "rope",
    ),
    BackwardDefect(
        "the rope's last head is not added",
        None,
        "gradients.sums",
        "more = ok & (first + i < parts)",
        "more = ok & (first + i < parts - 1)",
        "rope",
    ),
]
DEFECTS = COPIES + PRODUCTS + MASKS + STATISTICS + RESULTS


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 25


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: BackwardDefect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "backward.launch", tmp_path)
    assert_found(defect.kind, partial(CDNA4.check, mutant, CASES[defect.case]))


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    assert CDNA4.check(launcher, CASES[name], "random", 1) == (set(), True)
