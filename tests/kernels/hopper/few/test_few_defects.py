"""Seeded defects of the three launches for few queries: each must be seen."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gluon_sim import Kind
from kernels.hopper.few.test_few import NARROW, few_plan
from kernels.hopper.latent.defect import SparseDefect, assert_clean_and_right, assert_found
from kernels.judging import Change, as_built
from openmla.lab.testing.build import BuiltCase
from openmla.operands import SparseOperands

SCORES, WEIGHTS, VALUES, ROWS = "few.scores", "few.weights", "few.values", "few.rows"
CASES = {
    "bf16": replace(NARROW, heads=70, topk=400, sink="normal", return_max_logits=True, scale=0.3),
    "fp8": replace(NARROW, kv="fp8_block64", page_size=16, q_lens=(1,), topk=300),
    "even": replace(NARROW, values="normal", topk=200),
    "long": replace(NARROW, topk=900),
    "halves": replace(NARROW, topk=400, return_max_logits=True),
    "lengths": replace(NARROW, topk_lengths="ragged", q_lens=(3,), topk=400),
    "negative scale": replace(NARROW, topk=400, scale=-0.05),
    # Nineteen steps, 38 blocks: the ring turns three times, and largest scores are loaded twice.
    "far": replace(NARROW, topk=2400, q_lens=(1,), index_kind="duplicates", return_max_logits=True),
}
WAIT = "        O = warpgroup_mma_wait(0, deps=(O,))\n"
FREE = "        mbarrier.arrive(empty.index(slot // 2), count=1)\n"


def wrong(name: str, file: str, old: str, new: str, case: str = "bf16") -> SparseDefect:
    """Only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


DEFECTS = [
    wrong(
        "keys that are not there are scored",
        SCORES,
        "seen = gl.convert_layout(keys >= 0",
        "seen = gl.convert_layout(keys >= -1",
        "even",
    ),
    wrong(
        "rope columns are scored twice",
        SCORES,
        "(q_rope, q_right), (k_rope, k_right)",
        "(q_rope, q_rope), (k_rope, k_rope)",
    ),
    wrong("the sign of the scale is forgotten", SCORES, "signed(S, SIGN)", "S", "negative scale"),
    wrong("the right half of V is the left one", SCORES, "HALF], k_right)", "HALF], k_left)"),
    wrong(
        "a list does not end",
        ROWS,
        "mask=at < count, other=-1",
        "mask=at < 10**6, other=-1",
        "lengths",
    ),
    wrong(
        "scales of another key",
        ROWS,
        "block += chunk * WIDTH // CACHE.scale_block",
        "block += 0",
        "fp8",
    ),
    wrong(
        "a reference does not move within a block",
        WEIGHTS,
        "moved(own * factor, row_max), high",
        "row_max, high",
    ),
    wrong(
        "blocks from far on are not walked",
        WEIGHTS,
        "range(0, block, TOGETHER)",
        "range(0, block - 2, TOGETHER)",
    ),
    wrong(
        "only the first 32 blocks are walked",
        WEIGHTS,
        "range(0, block, TOGETHER)",
        "range(0, gl.minimum(block, TOGETHER), TOGETHER)",
        "far",
    ),
    wrong(
        "the first 32 blocks are walked again",
        WEIGHTS,
        "gl.minimum(first + i, block - 1)",
        "gl.minimum(i, block - 1)",
        "far",
    ),
    wrong(
        "the largest score moves only with the first 32 blocks",
        WEIGHTS,
        "highest = gl.maximum(highest, maxima[i])",
        "highest = gl.where(first > 0, highest, gl.maximum(highest, maxima[i]))",
        "far",
    ),
    wrong(
        "a row moves with another's largest score",
        WEIGHTS,
        "maxima_ptr, row, before",
        "maxima_ptr, row + 1, before",
    ),
    wrong(
        "the largest score is of the first half of a block",
        WEIGHTS,
        "static_range(1, PARTS)",
        "static_range(1, 1)",
        "halves",
    ),
    wrong("all rows have the sums of one", WEIGHTS, "(row * 4)", "(row * 0)"),
    wrong("O is not rescaled before block 1", VALUES, "O * rescale1[:, None]", "O"),
    wrong(
        "sums of block 1 are rescaled once too often",
        VALUES,
        "gl.where(half == 0, rescale1[:, None, None], 1.0)",
        "rescale1[:, None, None]",
    ),
    wrong("a step is added up twice", VALUES, "mask=rows < stop, other=0.0", "", "even"),
    wrong("all programs write the first columns", VALUES, "+ chunk * O.shape[1]", ""),
    wrong("the second tile has the first one's heads", VALUES, "% TILES * 64", "% TILES * 0"),
    SparseDefect(
        "a step is overwritten while it is read",
        Kind.RACE,
        VALUES,
        "        mbarrier.wait(empty.index(slot), phase ^ 1)\n",
        "",
        "long",
    ),
    SparseDefect(
        "the ring turns only once",
        Kind.RACE,
        VALUES,
        "(j // RING) & 1",
        "gl.minimum(j // RING, 1)",
        "far",
    ),
    SparseDefect(
        "a step is free for the turn before",
        Kind.RACE,
        VALUES,
        "phase ^ 1)",
        "(phase ^ 1) | (j < 12).to(gl.int32))",
        "far",
    ),
    SparseDefect(
        "a step is freed under its last product", Kind.RACE, VALUES, WAIT + FREE, FREE + WAIT, "far"
    ),
    SparseDefect(
        "another step is freed",
        Kind.DEADLOCK,
        VALUES,
        "empty.index(slot // 2)",
        "empty.index((slot // 2 + 1) % factors.shape[0])",
        "far",
    ),
    wrong(
        "factors are of the ring's first turn",
        VALUES,
        "both = factors.index(slot)",
        "both = factors.index(gl.minimum(j, slot + 1) % factors.shape[0])",
        "far",
    ),
    wrong(
        "a product is of another step",
        VALUES,
        "slot = j % factors.shape[0] * 2",
        "slot = gl.minimum(j, factors.shape[0] - 1) * 2",
        "far",
    ),
    SparseDefect(
        "V is read before it has arrived", Kind.RACE, VALUES, "2 * BYTES)", "BYTES)", "bf16"
    ),
    SparseDefect(
        "sums are read before they are written",
        Kind.RACE,
        VALUES,
        "    mbarrier.wait(bars.done, 0)\n",
        "",
        "bf16",
    ),
    SparseDefect(
        "scores are read while they are written",
        Kind.RACE,
        WEIGHTS,
        "            wait_for_kernel_before()\n",
        "            pass\n",
        "bf16",
    ),
    SparseDefect(
        "weights are copied while they are written",
        Kind.RACE,
        VALUES,
        "        wait_for_kernel_before()\n    for j in range(0, tile.steps):",
        "        pass\n    for j in range(0, tile.steps):",
        "bf16",
    ),
    SparseDefect(
        "sums are added up while they are written",
        Kind.RACE,
        VALUES,
        "        wait_for_kernel_before()\n    stop",
        "        pass\n    stop",
        "bf16",
    ),
    SparseDefect(
        "copies are not waited for",
        Kind.RACE,
        SCORES,
        "        async_copy.wait_group(1 - SIDE)\n",
        "        pass\n",
        "bf16",
    ),
    SparseDefect(
        "rows are handed on before the fence",
        Kind.FENCE,
        SCORES,
        "    fence_async_shared()\n    thread_barrier()",
        "    thread_barrier()",
        "fp8",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    adjust = partial(few_plan, width=width_of(defect.case))
    change = change_of(defect.case)
    assert_found(defect, CASES[defect.case], tmp_path, adjust, change)


def best_late(built: BuiltCase) -> BuiltCase:
    """Lists in the order of rows, whose scores rise; but the best three blocks come after 32 others
    and before the last."""
    op = built.operands
    assert isinstance(op, SparseOperands)
    op.indices.copy_(op.indices.sort(1).values)
    op.indices[:, 32 * 64 :] = op.indices[:, 32 * 64 :].roll(3 * 64, 1)
    return built


def change_of(name: str) -> Change:
    """What is changed in a case after it was built."""
    return best_late if name == "far" else as_built


def width_of(name: str) -> int:
    """Columns of V that a program takes; with 32, blocks of scores come in two halves."""
    return 32 if name == "halves" else 64


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    adjust = partial(few_plan, width=width_of(name))
    assert_clean_and_right(CASES[name], adjust, change_of(name))
