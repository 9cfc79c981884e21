"""Seeded defects of Hopper's sparse backward: each is found in a few runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.hopper as package
from gluon_sim import Kind
from kernels.hopper.sparse_backward.simulated import check
from kernels.hopper.sparse_backward.test_kernel import CASES as KERNEL_CASES
from kernels.hopper.sparse_backward.test_kernel import NARROW
from kernels.mutants import NOTHING, Defect, assert_found, controls, load_mutant
from openmla.kernels.hopper.sparse_backward import launch as launcher
from openmla.lab.testing.gradients import GradientCase

CASES = {
    **KERNEL_CASES,
    # Two halves of panels, several steps, several launches.
    "wide": GradientCase(replace(NARROW, d_nope=256, d_v=256, heads=3, scale=0.08)),
}


@dataclass(frozen=True)
class SparseDefect(Defect):
    """With a case that it shows in."""

    case: str = "lists"


LOADS = [
    SparseDefect(
        "rows are overwritten while they are read",
        Kind.RACE,
        "sparse_backward.gather",
        "mbarrier.wait(bars.k_empty.index(0), phase)",
        NOTHING,
    ),
    SparseDefect(
        "right columns are overwritten while they are read",
        Kind.RACE,
        "sparse_backward.gather",
        "mbarrier.wait(bars.k_empty.index(1), phase)",
        NOTHING,
    ),
    SparseDefect(
        "bytes of d_out are not expected",
        Kind.BYTES,
        "sparse_backward.gather",
        "64 * (2 * DIMS.latent + DIMS.rope) * 2",
        "64 * (DIMS.latent + DIMS.rope) * 2",
    ),
    SparseDefect(
        "right columns are the left ones",
        None,
        "sparse_backward.gather",
        "copy(smem.k.right.index(0), start, ok, HALF, BL)",
        "copy(smem.k.right.index(0), start, ok, 0, BL)",
    ),
    SparseDefect(
        "an entry past the rows counts",
        Kind.BOUNDS,
        "sparse_backward.gather",
        "ok = (index >= 0) & (index < lists.row_count)",
        "ok = index >= 0",
    ),
    SparseDefect(
        "the list of the first query for all",
        None,
        "sparse_backward.gather",
        "line = lists.indices + item.token.to(gl.int64) * lists.stride",
        "line = lists.indices + item.token.to(gl.int64) * 0",
    ),
    SparseDefect(
        "validity is not waited for",
        Kind.RACE,
        "sparse_backward.kernel",
        "mbarrier.wait(bars.valid_ready.index(0), phase)",
        NOTHING,
    ),
    SparseDefect(
        "the next block is the same",
        None,
        "sparse_backward.gather",
        "index = entries(lists, item, first + ENTRIES, RL)",
        "index = entries(lists, item, first, RL)",
    ),
]
PRODUCTS = [
    SparseDefect(
        "P and dS are overwritten while they are read",
        Kind.RACE,
        "sparse_backward.kernel",
        "meet()",
        NOTHING,
        after="dS = P * (dP - rows.delta[:, None]) * scale",
    ),
    SparseDefect(
        "the other half of dS is read before it is written",
        Kind.RACE,
        "sparse_backward.kernel",
        "meet()",
        NOTHING,
        after="put(smem.d_s, dS, SIDE)",
    ),
    SparseDefect(
        "wgmma reads P and dS without a fence",
        Kind.FENCE,
        "sparse_backward.kernel",
        "fence_async_shared()",
        NOTHING,
        after="put(smem.d_s, dS, SIDE)",
    ),
    SparseDefect(
        "scores are read before the products have ended",
        Kind.ACCUMULATOR,
        "sparse_backward.kernel",
        "S, dP = warpgroup_mma_wait(0, deps=(S_next, dP_next))",
        "S, dP = warpgroup_mma_wait(1, deps=(S_next, dP_next))",
    ),
    SparseDefect(
        "rows are given back before d_q has ended",
        Kind.RACE,
        "sparse_backward.kernel",
        "half, rope = warpgroup_mma_wait(0, deps=(half_next, rope_next))",
        "half, rope = half_next, rope_next",
    ),
    SparseDefect(
        "parts have no values",
        None,
        "sparse_backward.kernel",
        "acc = warpgroup_mma(p, smem.d_out.index(panel), acc, is_async=True)",
        NOTHING,
    ),
    SparseDefect(
        "values take the place of keys",
        None,
        "sparse_backward.kernel",
        "acc = warpgroup_mma(p, smem.d_out.index(panel), acc, is_async=True)",
        "acc = warpgroup_mma(p, smem.d_out.index(panel), acc, use_acc=False, is_async=True)",
    ),
    SparseDefect(
        "d_out of the other half",
        None,
        "sparse_backward.kernel",
        "acc = warpgroup_mma(p, smem.d_out.index(panel), acc, is_async=True)",
        "acc = warpgroup_mma(p, smem.d_out.index(c), acc, is_async=True)",
        "wide",
    ),
    SparseDefect(
        "the scale is not in dS",
        None,
        "sparse_backward.kernel",
        "dS = P * (dP - rows.delta[:, None]) * scale",
        "dS = P * (dP - rows.delta[:, None])",
    ),
    SparseDefect(
        "delta is added",
        None,
        "sparse_backward.kernel",
        "dS = P * (dP - rows.delta[:, None]) * scale",
        "dS = P * (dP + rows.delta[:, None]) * scale",
    ),
    SparseDefect(
        "the sign of the scale is lost",
        None,
        "sparse_backward.kernel",
        "gl.exp2(signed(S, HOW.sign) * factor",
        "gl.exp2(S * factor",
        "negative scale",
    ),
    SparseDefect(
        "both warp-groups have the same half of rope columns",
        None,
        "sparse_backward.kernel",
        "return tile.index(opaque_zero()).slice(SIDE * HALF, HALF, dim=1)",
        "return tile.index(opaque_zero()).slice(0, HALF, dim=1)",
    ),
]
RESULTS = [
    SparseDefect(
        "entries of other blocks of heads are overwritten",
        None,
        "sparse_backward.kernel",
        "line = (part.first + place) * part.blocks + item.head_block",
        "line = (part.first + place) * part.blocks",
        "two blocks of heads",
    ),
    SparseDefect(
        "columns of a part stay in the order of registers",
        None,
        "sparse_backward.row_sum",
        "column_of(place)",
        "place",
        after="if LAST:",
    ),
    SparseDefect(
        "the second block of heads is not added",
        None,
        "sparse_backward.row_sum",
        "(entry * BLOCKS + n % BLOCKS) * WIDTH",
        "(entry * BLOCKS) * WIDTH",
        "two blocks of heads",
    ),
    SparseDefect(
        "the last entry of a row is left out",
        None,
        "sparse_backward.row_sum",
        "last = gl.load(starts_ptr + row + 1)",
        "last = gl.load(starts_ptr + row + 1) - 1",
    ),
    SparseDefect(
        "sums begin anew in every launch",
        None,
        "sparse_backward.row_sum",
        "rope_total = begun(total_ptr, row * WIDTH + rope_place, FIRST)",
        "rope_total = begun(total_ptr, row * WIDTH + rope_place, True)",
    ),
    SparseDefect(
        "parts of the launch before",
        None,
        "sparse_backward.launch",
        "entries = by_row(op, first, last)",
        "entries = by_row(op, 0, last - first)",
    ),
    SparseDefect(
        "the first query of every launch is the first",
        Kind.OUTPUT,
        "sparse_backward.launch",
        '"first_token": first}',
        '"first_token": 0}',
    ),
    SparseDefect(
        "heads that there are not are written",
        Kind.BOUNDS,
        "sparse_backward.kernel",
        "mask=(head < item.heads)[:, None])",
        "mask=(head < item.heads + 1)[:, None])",
    ),
    SparseDefect(
        "the sink is left out of the total",
        None,
        "sparse_backward.statistics",
        "total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))",
        "total = lse + 0.0 * sink",
        "sink",
    ),
    SparseDefect(
        "the gradient of lse is left out",
        None,
        "sparse_backward.statistics",
        "delta = delta - gl.load(d_lse_row, mask=seeing, other=0.0)",
        NOTHING,
        "gradient of lse",
    ),
    SparseDefect(
        "d_sink has the wrong sign",
        None,
        "sparse_backward.statistics",
        "-gl.where(seeing, share * delta, 0.0)",
        "gl.where(seeing, share * delta, 0.0)",
        "sink",
    ),
]
DEFECTS = LOADS + PRODUCTS + RESULTS


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 30


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "sparse_backward.launch", tmp_path)
    assert_found(defect.kind, partial(check, mutant, CASES[defect.case]))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), KERNEL_CASES))
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    assert check(launcher, CASES[name], "random", 1) == (set(), True)
