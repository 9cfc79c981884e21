"""Rows past element 2^31 on the Hopper kernels: right, and a 32-bit offset is found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

from gluon_sim import Kind
from kernels.far_memory import FarMemory, with_far_table
from kernels.hopper.dense.mutant_run import mutant, plan_of, run_on
from openmla.kernels.hopper.dense import launch
from openmla.kernels.hopper.dense_fp8 import launch as fp8_launch
from openmla.kernels.hopper.latent import launch as sparse_launch
from openmla.lab.testing.build import build
from openmla.lab.testing.case import Case

SM_COUNT = 12  # enough to split long requests
DENSE = Case("dense", 4, 128, 64, 128, q_lens=(9, 7, 3), k_lens=(9, 70, 3))
ROWS = Case(
    "sparse",
    4,
    128,
    64,
    128,
    q_lens=(5,),
    k_lens=(150,),
    topk=70,
    scale=0.1,
    return_max_logits=True,
)
PAGED = replace(ROWS, kv="bf16", page_size=16)
WITHOUT_ROPE = replace(PAGED, d_nope=512, d_v=512, d_rope=0, rope="none")
CASES = {
    "dense": DENSE,
    "dense, pages": replace(DENSE, rope="cache", kv="bf16", page_size=16),
    "dense, split": replace(DENSE, d_nope=64, d_rope=32, d_v=64, q_lens=(5,), k_lens=(4500,)),
    "rows": ROWS,
    "rows, pages": PAGED,
    "rows, fp8": replace(PAGED, kv="fp8_656", d_nope=512, d_v=512),
    "rows, fp8 and scales": replace(PAGED, kv="fp8_block32"),
    "rows, V4.1's": replace(WITHOUT_ROPE, kv="fp8_528_v41_split"),
    "rows, V4.1's e2m1": replace(WITHOUT_ROPE, kv="fp4_288"),
    "sequences": replace(
        PAGED,
        form="latent",
        topk=0,
        q_lens=(3, 2, 4, 1),
        k_lens=(20, 40, 33, 9),
        return_max_logits=False,
    ),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_right_and_clean(name: str, axis: int) -> None:
    case = CASES[name]
    launcher = launch if case.form == "dense" else sparse_launch
    built = build(case, memory=FarMemory(axis))
    assert run_on(launcher, built, plan_of(built, SM_COUNT)) == (set(), True)


FP8 = replace(CASES["dense, pages"], dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3")


@pytest.mark.parametrize(
    ("launcher", "case"),
    [(launch, CASES["dense, pages"]), (fp8_launch, replace(FP8, page_size=64))],
    ids=["dense", "dense fp8"],
)
def test_a_far_line_of_the_block_table(launcher: ModuleType, case: Case) -> None:
    built = with_far_table(build(case))
    assert run_on(launcher, built, plan_of(built, SM_COUNT)) == (set(), True)


@dataclass(frozen=True)
class Narrow:
    """An offset of 32 bits: `old` becomes `new` in `file`, the first one behind `after`."""

    name: str
    file: str
    old: str
    new: str
    case: str
    axis: int = 0
    after: str = ""


PLACE = (
    "place.to(gl.int64) * (rows.row_stride.to(gl.int64) * VECTOR)",
    "place * (rows.row_stride * VECTOR)",
)
PAGE = "page.to(gl.int64) * (rows.page_stride.to(gl.int64) * VECTOR)"
WIDE = ("(stride + opaque_zero()).to(gl.int64)", "(stride + opaque_zero())")
FP8_PAGE = "page.to(gl.int64) * stride_page.to(gl.int64)"
FP8_PLACE = "place.to(gl.int64) * stride_row.to(gl.int64)"
DEFECTS = [
    Narrow("out, by token", "accumulator", *WIDE, "dense"),
    Narrow("out, by head", "accumulator", *WIDE, "dense", 1),
    Narrow(
        "merged out, by head",
        "merge",
        "head * (out_stride_h.to(gl.int64) * VECTOR)",
        "head * (out_stride_h * VECTOR)",
        "dense, split",
        1,
    ),
    Narrow(
        "merged out, by token",
        "merge",
        "token * (out_stride_t.to(gl.int64) * VECTOR)",
        "token.to(gl.int32) * (out_stride_t * VECTOR)",
        "dense, split",
    ),
    Narrow("rows' out", "accumulator", *WIDE, "rows"),
    Narrow("rows", "latent.rows", *PLACE, "rows"),
    Narrow("rows of a page", "latent.rows", *PLACE, "rows, pages", 1),
    Narrow("pages", "latent.rows", PAGE, "page * (rows.page_stride * VECTOR)", "rows, pages"),
    Narrow("lists", "latent.source", "token.to(gl.int64)", "token", "rows"),
    Narrow(
        "block table",
        "latent.source",
        "sequence.to(gl.int64) *",
        "sequence *",
        "sequences",
        after="def paged_work_item",
    ),
    Narrow("pages of FP8", "dequantize.rows", FP8_PAGE, "page * stride_page", "rows, fp8"),
    Narrow(
        "rows of an FP8 page",
        "dequantize.rows",
        FP8_PLACE,
        "place * stride_row",
        "rows, fp8",
        1,
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_an_offset_of_32_bits_is_found(defect: Narrow, tmp_path: Path) -> None:
    case = CASES[defect.case]
    changed = mutant(case.form, defect.file, defect.old, defect.new, tmp_path, defect.after)
    built = build(case, memory=FarMemory(defect.axis))
    kinds, right = run_on(changed, built, plan_of(built, SM_COUNT))
    assert Kind.BOUNDS in kinds or not right
