"""Seeded defects of split requests of the latent Hopper kernel: ranges, their places, the merge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gluon_sim import Kind
from kernels.hopper.latent.defect import SparseDefect, assert_clean_and_right, assert_found
from kernels.hopper.latent.test_pages import SMALL

# Eighteen ranges, which the merge adds in two groups; one and nine.
SPLIT = replace(
    SMALL, heads=4, q_lens=(2, 1, 1), k_lens=(9000, 7, 4600), sink="normal", values="rising"
)
CASES = {
    "split": SPLIT,
    # 66 ranges: five groups of 16, which the merge loads three at a time after the first.
    "many ranges": replace(SMALL, heads=8, q_lens=(1,), k_lens=(33792,), scale=0.2, spare=0),
    # Three ranges of 64 rows fill the workspace to its end.
    "full workspace": replace(SMALL, heads=64, q_lens=(1,), k_lens=(4097,), spare=0),
    # A program too many: it has nothing to begin with.
    "one tile": replace(SMALL, heads=4, q_lens=(1,), k_lens=(300,), spare=0),
    # Two tiles of rows, the second of 6 heads; three ranges and one. Rows are more than on average.
    "70 heads": replace(
        SMALL, heads=70, q_lens=(1, 0, 1), k_lens=(9000, 5, 300), sink="normal", spare=0
    ),
    # Ranges of 128 keys: three of the first request, two of the second, which its first row sees.
    "named ranges": replace(
        SMALL, heads=4, q_lens=(2, 1), k_lens=(260, 140), range_keys=128, spare=0
    ),
}


@pytest.fixture(autouse=True)
def new_memory_is_full_of_nan() -> Iterator[None]:
    """Otherwise a part that nobody wrote may be one that a run before left there, and right."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


def split(
    name: str, old: str, new: str, file: str = "latent.source", case: str = "split"
) -> SparseDefect:
    """Nothing waits for anything here: only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


MERGE, EPILOGUE = "ranges.merge", "latent.epilogue"
DEFECTS = [
    split("ranges lie over each other", ".part_rows + part * rows + row", ".part_rows + row"),
    split("requests lie over each other", "sequence * source.part_rows + part", "part"),
    split(
        "a range begins a step late",
        "gl.where(parts > 1, part << bits, 0)",
        "gl.where(parts > 1, (part << bits) + part * STEP, 0)",
    ),
    split(
        "a range does not end",
        "stop = gl.where(is_full, skipped + (1 << bits), keys)",
        "stop = keys",
        case="70 heads",  # of eighteen ranges, all that do not end would take too many steps
    ),
    split(
        "what a row sees is counted from the first key of all",
        "seen=seen - skipped",
        "seen=seen",
    ),
    split(
        "a full range is left out",
        "full=gl.maximum(tiles * (parts - 1) - begun, 0)",
        "full=gl.maximum(tiles * (parts - 2) - begun, 0)",
    ),
    split(
        "what programs begin with is numbered, and nobody computes the last ones",
        "        number += begun\n",
        "        number += 0\n",
    ),
    split(
        "what programs begin with are no full ranges",
        "    full = begun\n",
        "    full = begun * 0\n",
    ),
    SparseDefect(
        "programs begin with work items that are numbered",
        Kind.RACE,
        "latent.source",
        "        exists &= number < begun\n",
        "        exists &= number <= begun\n",
        "one tile",
    ),
    split(
        "a look at the code takes a work item",
        "find_work(found, source, is_next, CHUNK)",
        "find_work(found, source, True, CHUNK)",
        "latent.rows",
    ),
    split("a work item is numbered by its rank alone", "- here + gl.sum(higher, 0)", "- here"),
    split(
        "a request begins after its first work item", "begun = before <= x", "begun = before < x"
    ),
    split("the last range is taken for a full one", "(work.full_rank == rank) & (", "("),
    split(
        "the highest rank is not looked at",
        "opaque_zero() + RANKS // 2",
        "opaque_zero() + RANKS // 4",
    ),
    split(
        "a range is taken for a whole request",
        "    parted = slot >= 0\n",
        "    parted = slot > 0\n",
        file=EPILOGUE,
    ),
    split(
        "the left columns are written as the right ones",
        "write_sums(O, results.parts, place, 0)",
        "write_sums(O, results.parts, place, O.shape[1])",
        file=EPILOGUE,
    ),
    split(
        "rows of the next request are overwritten",
        "slot + tile.rows - tile.first_row",
        "slot + 64",
        file=EPILOGUE,
    ),
    split(
        "the merge leaves out the last range",
        "(part < merged.ranges)",
        "(part < merged.ranges - 1)",
        file=MERGE,
    ),
    split(
        "the merge forgets what came before",
        "sums = slots.sums * mine[:, :, None] +",
        "sums = slots.sums +",
        file=MERGE,
    ),
    split(
        "the merge adds slots as they are",
        "gl.sum(acc * weights[:, :, None], 1)",
        "gl.sum(acc, 1)",
        file=MERGE,
    ),
    split(
        "the merge reads rows of other ranges",
        "part[None, :] * merged.step",
        "part[None, :]",
        file=MERGE,
    ),
    split(
        "the merge takes another head's sink",
        "head = row % heads",
        "head = row // heads",
        file=MERGE,
    ),
    SparseDefect(
        "ranges that are merged together are no power of two",
        Kind.ERROR,
        "ranges.launch",
        "together = min(1 << (space.ranges - 1).bit_length(), MERGED_TOGETHER)",
        "together = min(space.ranges, MERGED_TOGETHER) | 1",
        "split",
    ),
    SparseDefect(
        "the merge begins while ranges are written",
        Kind.RACE,
        MERGE,
        "    if AFTER:\n        wait_for_kernel_before()\n",
        "",
        "split",
    ),
    split(
        "the merge reads another request",
        "first_row=request * part_rows",
        "first_row=request * 0",
        file=MERGE,
    ),
    split(
        "sums of weights of before are not rescaled",
        "slots.row_sum * mine +",
        "slots.row_sum +",
        MERGE,
        "many ranges",
    ),
    split(
        "sums of weights of before are forgotten",
        "slots.row_sum * mine +",
        "slots.row_sum * 0.0 +",
        MERGE,
        "many ranges",
    ),
    split(
        "sums of weights of a range more are not rescaled",
        "loaded.row_sum * theirs",
        "loaded.row_sum",
        MERGE,
        "many ranges",
    ),
    split(
        "sums of a range more are not rescaled",
        "loaded.sums * theirs[:, :, None]",
        "loaded.sums",
        MERGE,
        "many ranges",
    ),
    split(
        "the merge ends after 64 ranges",
        "range(SLOTS, merged.ranges, 3 * SLOTS)",
        "range(SLOTS, gl.minimum(merged.ranges, 4 * SLOTS), 3 * SLOTS)",
        MERGE,
        "many ranges",
    ),
    split(
        "the merge adds a third group twice",
        "load_parts(first + 2 * SLOTS,",
        "load_parts(first + SLOTS,",
        MERGE,
        "many ranges",
    ),
    split(
        "tiles of a range lie over each other",
        "source.part_rows + part * rows + row",
        "source.part_rows + part * rows",
        case="70 heads",
    ),
    split(
        "ranges are as far apart as a tile",
        "source.part_rows + part * rows + row",
        "source.part_rows + part * ROWS + row",
        case="70 heads",
    ),
    split(
        "a range has one tile",
        "gl.where(is_full, number // tiles, ",
        "gl.where(is_full, number, ",
        case="70 heads",
    ),
    split(
        "the second tile has the rows of the first",
        "(tiles - 1 - number % tiles) * ROWS",
        "(number * 0) * ROWS",
        case="70 heads",
    ),
    split(
        "programs that merge rows do not take turns", "blocks * ROWS):", "rows):", MERGE, "70 heads"
    ),
    split(
        "the merge is for fewer ranges than there are",
        "(space.ranges - 1).bit_length()",
        "(space.ranges - 1).bit_length() // 2",
        "ranges.launch",
        "70 heads",
    ),
    split(
        "ranges of a named length lie over each other",
        "part * source.part_rows + start * heads + row",
        "start * heads + row",
        case="named ranges",
    ),
    split(
        "requests of a named length lie over each other",
        "part * source.part_rows + start * heads + row",
        "part * source.part_rows + row",
        case="named ranges",
    ),
    split(
        "the merge takes rows of other requests, of a named length",
        "first_row = start * heads",
        "first_row = request * heads",
        MERGE,
        "named ranges",
    ),
    split(
        "programs of the merge are counted by wide columns",
        "tiles * (d_v // columns), ",
        "tiles * (d_v // MERGED_COLUMNS), ",
        "ranges.launch",
        "70 heads",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    assert_found(defect, CASES[defect.case], tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    assert_clean_and_right(CASES[name])
