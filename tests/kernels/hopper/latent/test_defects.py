"""Seeded defects of what the warp-groups of the latent Hopper kernel tell each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gluon_sim import Kind
from kernels.hopper.latent.defect import SparseDefect, assert_clean_and_right, assert_found
from kernels.hopper.latent.test_pages import EDGES
from kernels.judging import Change, as_built, ends_with_invalid
from openmla.lab.testing.case import Case

# One stage of keys, so every tile is loaded again in the next step; and three, so the left
# warp-group can be a step ahead. P takes the place of rope in both.
V32 = Case("sparse", 4, 512, 64, 512, q_lens=(1,), k_lens=(300,), topk=260, scale=0.05)
CASES = {
    "one stage": V32,
    "three stages": replace(V32, d_nope=128, d_v=128),
    "two work items": replace(V32, q_lens=(3,), topk=70),
    "topk 129": replace(V32, d_nope=128, d_v=128, topk=129),
    "ends": replace(V32, d_nope=128, d_v=128, q_lens=(2,), topk=200),
    "edges": EDGES,
    "full table": replace(EDGES, q_lens=(3, 5), k_lens=(70, 144)),
    # Blocks of 63 keys, and of one in the last page of a full table.
    "boxes": replace(EDGES, q_lens=(3, 5), k_lens=(191, 193), page_size=64),
    "one box": replace(EDGES, q_lens=(3,), k_lens=(64,), page_size=64),
}


def sparse(
    name: str,
    kind: Kind | None,
    old: str,
    new: str,
    case: str = "one stage",
    file: str = "latent.kernel",
) -> SparseDefect:
    return SparseDefect(name, kind, file, old, new, case)


STORE_P0 = "    smem.p.index(z + b).store(P)\n"
STORE_P1 = "    smem.p.index(z + b + 1).store(P)\n"
FENCE = "    fence_async_shared()\n"
OWN_WARPS = (
    "        thread_barrier()  # every warp has finished the scores, which read the rope tile\n"
)
SUMS = (
    "    sums.index(SIDE).store(own)\n    if LOGITS and SIDE == 0:\n"
    "        sums.index(2).store(highest)\n"
)
WAIT = "    O = warpgroup_mma_wait(0, deps=(O_next,))\n"
WAIT_A = "    O, A = warpgroup_mma_wait(0, deps=(O_next, A))\n"
RELEASE_LEFT = "    mbarrier.arrive(bars.k_empty.index(2 * b), count=1)\n"
RELEASE_RIGHT = "    mbarrier.arrive(k_empty.index(2 * b + 1), count=1)\n"
SCORES = "    S = warpgroup_mma_wait(0, deps=(S_next,))\n"
RELEASE_Q = "    if LAST:\n        mbarrier.arrive(bars.q_empty, count=1)\n"

DEFECTS = [
    sparse(
        "validity is read before it is written",
        Kind.RACE,
        "mbarrier.wait(valid_ready.index(b), phase)",
        "pass",
    ),
    sparse("the reference is not waited for", Kind.RACE, "    wait_reference()\n", ""),
    sparse(
        "the reference is told and then written",
        Kind.RACE,
        "    row_maxes.index(0).store(row_max0)\n    signal_reference()\n",
        "    signal_reference()\n    row_maxes.index(0).store(row_max0)\n",
    ),
    sparse("the reference is not told", Kind.DEADLOCK, "    signal_reference()\n", ""),
    sparse("P0 is not waited for", Kind.RACE, "    wait_p0(it)\n", ""),
    sparse(
        "P0 is told and then fenced",
        Kind.FENCE,
        FENCE + "    signal_p0(it)\n",
        "    signal_p0(it)\n" + FENCE,
    ),
    sparse(
        "P0 is fenced and then written",
        Kind.FENCE,
        STORE_P0 + FENCE,
        FENCE + STORE_P0,
    ),
    sparse(
        "P0 is told and then written",
        Kind.RACE,
        STORE_P0 + FENCE + "    signal_p0(it)\n",
        "    signal_p0(it)\n" + STORE_P0 + FENCE,
    ),
    sparse(
        "P0 is told at the barrier of the step before",
        Kind.DEADLOCK,
        "    signal_p0(it)\n",
        "    signal_p0(it + 1)\n",
    ),
    # With one stage the scores of the next step wait for keys that the right warp-group releases
    # after it has heard P0: there, one barrier would do.
    sparse(
        "one barrier for P0 of all steps",
        Kind.ARRIVE,
        "[number], dtype",
        "[number * 0 + 10], dtype",
        "three stages",
        "latent.signals",
    ),
    sparse("P1 is not waited for", Kind.RACE, "    wait_p1()\n", ""),
    sparse(
        "P1 is told and then fenced",
        Kind.FENCE,
        FENCE + "    signal_p1()\n",
        "    signal_p1()\n" + FENCE,
    ),
    sparse(
        "P1 is told and then written",
        Kind.RACE,
        STORE_P1 + FENCE + "    signal_p1()\n",
        "    signal_p1()\n" + STORE_P1 + FENCE,
    ),
    sparse(
        "P0 is stored over rope that other warps read",
        Kind.RACE,
        OWN_WARPS + STORE_P0,
        "        pass\n" + STORE_P0,
    ),
    sparse(
        "P1 is stored over rope that other warps read",
        Kind.RACE,
        OWN_WARPS + STORE_P1,
        "        pass\n" + STORE_P1,
    ),
    sparse(
        "a wait that passes at once takes the place of the warps' barrier",
        Kind.RACE,
        OWN_WARPS + STORE_P1,
        "        mbarrier.wait(k_ready.index(2 * b + 2), phase)\n" + STORE_P1,
    ),
    sparse("the sums are not waited for", Kind.RACE, "    wait_sums(SIDE)\n", ""),
    sparse(
        "the sums are told and then written",
        Kind.RACE,
        SUMS + "    signal_sums(SIDE)\n",
        "    signal_sums(SIDE)\n" + SUMS,
    ),
    sparse(
        "left waits for its own sums",
        Kind.DEADLOCK,
        "bar.sync 13, 256",
        "bar.sync 12, 256",
        file="latent.signals",
    ),
    sparse(
        "block 0's left half is released under its product",
        Kind.RACE,
        WAIT_A + RELEASE_LEFT,
        RELEASE_LEFT + WAIT_A,
    ),
    sparse(
        "block 0's right half is released under its product",
        Kind.RACE,
        WAIT + RELEASE_RIGHT,
        RELEASE_RIGHT + WAIT,
    ),
    sparse(
        "Q is released under the last scores",
        Kind.RACE,
        SCORES + RELEASE_Q,
        RELEASE_Q + SCORES,
        "two work items",
    ),
    sparse(
        "nobody says that copies are trusted",
        Kind.FENCE,
        "    if COPIED:\n        trust_arrived_copies()\n",
        "    if COPIED:\n        pass\n",
        file="latent.signals",
    ),
    sparse(
        "a tile is trusted and not waited for",
        Kind.RACE,
        "    mbarrier.wait(barrier, phase)\n",
        "",
        file="latent.signals",
    ),
    sparse(
        "one index into a step is not a step",
        None,
        "(count + (STEP - 1)) // STEP, 1), 0)\n        reset_counter",
        "(count + (STEP - 2)) // STEP, 1), 0)\n        reset_counter",
        "topk 129",
        "latent.source",
    ),
    sparse(
        "the last index of a block is taken to count",
        None,
        "gl.where(ok, 0, 1)",
        "gl.where(ok | (gl.arange(0, KEYS, ok.type.layout) == KEYS - 1), 0, 1)",
        "ends",
        "latent.rows",
    ),
    sparse(
        "one key into a step is not a step",
        None,
        "(count - skipped + (STEP - 1)) // STEP",
        "(count - skipped + (STEP - 2)) // STEP",
        "edges",
        "latent.source",
    ),
    sparse(
        "a block but for one key needs no mask",
        None,
        "first + S.shape[1] > tile.whole",
        "first + S.shape[1] > tile.whole + 1",
        "edges",
        "latent.source",
    ),
    sparse(
        "one row into a tile is not a tile",
        Kind.OUTPUT,
        "(rows + (ROWS - 1)) // ROWS\n",
        "(rows + (ROWS - 2)) // ROWS\n",
        "edges",
        "latent.source",
    ),
    sparse(
        "the table entry after the last is read",
        Kind.BOUNDS,
        "mask=at < stop, other=0)",
        "mask=at < stop + 1, other=0)",
        "full table",
        "latent.source",
    ),
    sparse(
        "a block but for one key is a box",
        None,
        "is_whole=entry.keys >= KEYS)",
        "is_whole=entry.keys >= KEYS - 1)",
        "boxes",
        "latent.rows",
    ),
    sparse(
        "the page after the last is looked up",
        Kind.BOUNDS,
        "mask=stop > at, other=0)",
        "mask=stop > at - KEYS, other=0)",
        "one box",
        "latent.source",
    ),
    sparse(
        "threads do not arrive for a box",
        Kind.DEADLOCK,
        "count=THREADS - 1)",
        "count=1)",
        "boxes",
        "latent.rows",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    assert_found(defect, CASES[defect.case], tmp_path, change=change_of(defect.case))


def change_of(name: str) -> Change:
    """What is changed in a case after it was built."""
    return ends_with_invalid if name == "ends" else as_built


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert_clean_and_right(CASES[name], change=change_of(name))
