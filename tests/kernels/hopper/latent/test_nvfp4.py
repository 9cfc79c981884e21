"""Seeded defects of reading vLLM's FP4 rows, whose scales are transposed and whose rope is e4m3."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.hopper.latent.defect import SparseDefect, assert_clean_and_right, assert_found
from kernels.hopper.latent.test_fp8 import ONCE
from openmla.planning import plan
from openmla.problem import Problem

CASES = {name: case for name, case in ONCE.items() if "nvfp4" in name}
LIST = "list of nvfp4_352, sink"


def rows(name: str, old: str, new: str, file: str = "dequantize.v41_rows") -> SparseDefect:
    """Nothing waits for anything here: only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, LIST)


DEFECTS = [
    rows("scales lie in the order of blocks", "if SCALE_LANES > 1:", "if SCALE_LANES > 4:"),
    rows(
        "scales are transposed the other way",
        "block % SCALE_LANES * IN_LINE + block // SCALE_LANES",
        "block % IN_LINE * SCALE_LANES + block // IN_LINE",
    ),
    rows("rope has a scale", "words.shape[1]], 1.0,", "words.shape[1]], 0.5,"),
    rows(
        "rope lies behind 512 bytes",
        "row_bytes(LATENT, SCALES), DIMS.rope",
        "LATENT, DIMS.rope",
        "dequantize.kernels",
    ),
    rows(
        "rope is written over the latent columns",
        "store_columns(out, gl.convert_layout(tail, L), row, LATENT)",
        "store_columns(out, gl.convert_layout(tail, L), row, 0)",
        "dequantize.kernels",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    assert_found(defect, CASES[defect.case], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert_clean_and_right(CASES[name])


def test_pools_that_are_fast_are_planned() -> None:
    same: dict[str, Any] = dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), "nvfp4_352")
    problem = Problem("sparse", 128, 512, 64, 512, topk=2048, page_size=64, total_q=64, **same)
    assert plan(replace(problem, total_k=65536), "h200").backend == "hopper"
    assert not plan(replace(problem, total_k=65536 + 64), "h200").runs_today
    assert plan(replace(problem, total_k=65536), "b200").backend == "portable"
