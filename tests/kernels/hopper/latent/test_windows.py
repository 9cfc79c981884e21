"""Windows over pages on Hopper's latent kernel, in the simulator: right, clean, and no row before a
request's windows is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.hopper.latent.defect import SparseDefect, assert_clean_and_right, assert_found
from kernels.hopper.latent.test_pages import SMALL, V3
from kernels.hopper.simulated import run
from kernels.judging import (
    assert_every_schedule_is_clean,
    assert_requests_do_not_see_their_neighbors,
    assert_right_clean_and_deaf_to_poison,
    on,
)
from openmla.lab.testing.memory.poison import differences
from openmla.operands import LatentOperands
from openmla.planning import plan
from openmla.planning.latent_split import SHORT
from openmla.problem import Problem

WINDOWED = replace(V3, q_lens=(5, 0, 9), k_lens=(170, 9, 330), window=30)
TILES = replace(SMALL, heads=5, q_lens=(40, 9, 70), k_lens=(300, 3, 500), window=129)
CASES = {
    "window": WINDOWED,
    "window of 1": replace(WINDOWED, window=1, page_size=64),
    "window of a block, pages of 7, sink": replace(WINDOWED, window=64, page_size=7, sink="mixed"),
    "window of a step, pages of 64": replace(WINDOWED, window=128, page_size=64),
    "windows longer than requests": replace(WINDOWED, window=SHORT),
    "several tiles": TILES,
    "several tiles, windows end in two blocks": replace(TILES, window=120),
    "several tiles, 1 head": replace(TILES, heads=1, q_lens=(200,), k_lens=(700,), window=100),
    "several tiles, window of 1": replace(TILES, window=1),
    "several steps": replace(SMALL, q_lens=(5,), k_lens=(900,), window=700, values="rising"),
    "96 heads": replace(V3, heads=96, q_lens=(3, 1), k_lens=(130, 1), window=100),
    "more queries than keys": replace(V3, q_lens=(9, 4), k_lens=(3, 0), window=2),
    "no rope, no lse": replace(WINDOWED, d_rope=0, rope="none", return_lse=False, window=65),
    "256+64, negative scale": replace(
        V3, d_nope=256, d_v=256, scale=-0.1, q_lens=(8,), k_lens=(300,), window=77
    ),
    "long table": replace(SMALL, heads=1, q_lens=(2,), k_lens=(4200,), window=130),
    "many short": replace(
        SMALL, heads=4, q_lens=(1,) * 9, k_lens=(5, 1, 0, 64, 65, 3, 2, 9, 128), window=64
    ),
    "fp8_656": replace(WINDOWED, kv="fp8_656"),
    "fp8_block32": replace(WINDOWED, kv="fp8_block32", page_size=48, window=60),
    "fp4_288_split": replace(WINDOWED, d_rope=0, rope="none", kv="fp4_288_split", window=60),
    "fp8_token, several tiles": replace(TILES, kv="fp8_token", heads=20),
    "fp8_584": replace(WINDOWED, kv="fp8_584", d_rope=0, rope="none", page_size=2),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_clean(name: str) -> None:
    assert_every_schedule_is_clean(CASES[name], run)


def test_a_window_of_all_keys_is_none() -> None:
    built = on(WINDOWED)
    op = built.operands
    assert isinstance(op, LatentOperands)
    outs = [run(replace(built, operands=replace(op, window=n)))[0] for n in (0, 330, SHORT)]
    assert not differences(outs[1], outs[0]) and not differences(outs[2], outs[0])


@pytest.mark.parametrize("kv", ["bf16", "fp8_656"])
def test_pages_before_every_window_may_be_anybodys(kv: str) -> None:
    """Their entries are not read: each may name any page, or none; of the page in which the first
    window begins, rows before it may hold NaN."""
    built = on(replace(V3, q_lens=(2,), k_lens=(144,), window=20, kv=kv))
    op = built.operands
    assert isinstance(op, LatentOperands)
    want, _ = run(built)
    first = 144 - 2 + 1 - 20
    page = int(op.block_table[0, first // 16])
    if kv == "bf16":
        op.cache.data[page, : first % 16] = torch.nan
    op.block_table[0, : first // 16] = 2**30
    outcome, reports = run(built)
    assert all(report.ok for report in reports) and not differences(outcome, want)


def test_a_request_does_not_see_its_neighbors() -> None:
    assert_requests_do_not_see_their_neighbors(TILES, run)


LATENT = Problem("latent", 16, 512, 64, 512, page_size=64, total_q=64, total_k=65536, batch=32)


def test_windows_are_planned_unsplit_and_read_where_they_lie() -> None:
    for kv in ("bf16", "fp8_656"):
        same: dict[str, Any] = dict.fromkeys(("v_dtype", "rope_dtype"), kv)
        problem = replace(LATENT, kv_dtype=kv, **same, table_keys=32768, window=SHORT)
        chosen = plan(problem, "h200")
        assert (chosen.backend, chosen.kernel_name) == ("hopper", "latent")
        variant = chosen.variant
        assert variant.ranges.rows == 0 and variant.workspace is None
        assert [rows.boxes for rows in variant.rows] == [False]
    longer = replace(LATENT, table_keys=32768, window=SHORT + 1)
    assert plan(longer, "h200").backend == "portable"
    assert plan(replace(LATENT, window=128, invariant=True), "h200").backend != "hopper"


def windowed(name: str, old: str, new: str, case: str = "several tiles") -> SparseDefect:
    """Nothing waits for anything here: only the numbers are wrong."""
    return SparseDefect(name, None, "latent.source", old, new, case)


HIDDEN = "key[None, :] < since[:, None]"
BEGIN = "gl.maximum(first - source.window, 0)"
DEFECTS = [
    windowed("a key before the window is seen", HIDDEN, f"{HIDDEN} - 1"),
    windowed("the first key of the window is hidden", HIDDEN, f"{HIDDEN} + 1"),
    windowed(
        "blocks in which windows begin are left alone",
        "(first < tile.since + (tile.first_row + (ROWS - 1)) // heads)",
        "(first < tile.since)",
    ),
    windowed("a tile begins with its last row's window", BEGIN, BEGIN.replace("first", "stop")),
    windowed("a tile begins a row before its window", BEGIN, BEGIN.replace("window", "window - 1")),
    windowed(
        "the last row's keys are whole",
        "whole=first - skipped",
        "whole=stop - skipped",
        "several tiles, windows end in two blocks",
    ),
    windowed("what is skipped counts", "seen -= skipped", "seen -= 0"),
    windowed("the last step is left out", "(stop - skipped + (STEP - 1))", "(stop - skipped)"),
    windowed(
        "a tile ends with its first row's keys",
        "stop=stop,\n    )\n    return item, gl",
        "stop=first,\n    )\n    return item, gl",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    assert_found(defect, CASES[defect.case], tmp_path)


@pytest.mark.parametrize("name", sorted({defect.case for defect in DEFECTS}))
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    assert_clean_and_right(CASES[name])
