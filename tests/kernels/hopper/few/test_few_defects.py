"""Seeded defects of the two launches for few queries: each must be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gluon_sim import Kind
from kernels.hopper.few.test_few import NARROW, few_plan
from kernels.hopper.latent.defect import SparseDefect, assert_found

SCORES, VALUES, ROWS = "few.scores", "few.values", "few.rows"
CASES = {
    "bf16": replace(NARROW, heads=70, topk=400, sink="normal", return_max_logits=True, scale=0.3),
    "fp8": replace(NARROW, kv="fp8_block64", page_size=16, q_lens=(1,), topk=300),
    "even": replace(NARROW, values="normal", topk=200),
    "long": replace(NARROW, topk=900),
    "long fp8": replace(NARROW, kv="fp8_block64", page_size=16, q_lens=(1,), topk=900),
    "lengths": replace(NARROW, topk_lengths="ragged", q_lens=(3,), topk=400),
}


def wrong(name: str, file: str, old: str, new: str, case: str = "bf16") -> SparseDefect:
    """Only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


DEFECTS = [
    wrong("keys that are not there are scored", SCORES, "gl.where(gl.convert_layout(seen",
          "gl.where(gl.convert_layout(seen | True", "even"),
    wrong("both blocks of a step are the same", SCORES, "HEADS * 2 + block % 2)", "HEADS * 2)"),
    wrong("the largest score is of another block", SCORES, "(2 * steps) + block) * HEADS",
          "(2 * steps) + block // 2 * 2) * HEADS"),
    wrong("the right columns are scored twice", SCORES, "SL, (0, 2, 1))", "SL, (1, 2, 1))"),
    wrong("the sign of the scale is forgotten", SCORES, "signed(S, SIGN)", "S", "lengths"),
    wrong("O is not rescaled before block 1", VALUES, "factors.index(2 * slot + block).load(RL)",
          "factors.index(2 * slot).load(RL)"),
    wrong("sums of block 1 are rescaled once too often", VALUES,
          "gl.where(half == 0, after0, 1.0)", "after0"),
    wrong("block 1 has the reference of block 0", VALUES, "gl.where(half == 0, ref0, ref1)",
          "ref0 + 0.0 * ref1 * half"),
    wrong("all programs write the first columns", VALUES, "+ chunk * O.shape[1]", ""),
    wrong("the second tile has the first one's heads", VALUES, "% TILES * 64", "% TILES * 0"),
    wrong("a list does not end", ROWS, "mask=at < count, other=-1", "mask=at < 10**6, other=-1",
          "lengths"),
    wrong("scales of another key", ROWS, "block += chunk * WIDTH // CACHE[1]", "block += 0", "fp8"),
    SparseDefect("weights are overwritten while they are read", Kind.RACE, VALUES,
                 "        mbarrier.wait(free.index(slot), phase ^ 1)\n        p_smem",
                 "        p_smem", "long"),
    SparseDefect("rows are overwritten while they are read", Kind.RACE, VALUES,
                 "        mbarrier.wait(free.index(slot), phase ^ 1)\n        for i",
                 "        for i", "long fp8"),
    SparseDefect("sums are read before they are written", Kind.RACE, VALUES,
                 "    mbarrier.wait(done, 0)\n", "", "bf16"),
    SparseDefect("copies are not waited for", Kind.RACE, SCORES,
                 "        async_copy.wait_group(0)\n", "", "bf16"),
    SparseDefect("wgmma reads before the fence", Kind.FENCE, VALUES,
                 "        fence_async_shared()\n", "", "fp8"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    case = CASES[defect.case]
    if "sign" in defect.name:
        case = replace(case, scale=-0.05)
    assert_found(defect, case, tmp_path, adjust=lambda plan: few_plan(plan, 64))
