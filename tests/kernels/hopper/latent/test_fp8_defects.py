"""Seeded defects of the FP8 paths of the latent Hopper kernel: each is found in a few runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gluon_sim import Kind
from kernels.hopper.latent.defect import SparseDefect, assert_found
from openmla.planning import Plan, dequantize
from openmla.testing.case import Case

V32 = Case(
    "sparse", 4, 512, 64, 512, q_lens=(1,), k_lens=(400,), topk=300, scale=0.07, seed=1,
    kv="fp8_656", page_size=16, index_kind="mixed", spare=2,
)  # fmt: skip
CASES = {
    "fp8_656": V32,
    "fp8_block32": replace(V32, kv="fp8_block32"),
    "256+32": replace(V32, kv="fp8_token", d_nope=256, d_rope=32, d_v=256),
    "long list": replace(V32, topk=600),
}


@dataclass(frozen=True)
class Fp8Defect(SparseDefect):
    """`held`: rows of the workspace; 0: rows are dequantized in the kernel."""

    case: str = "fp8_656"
    held: int = 0


DEFECTS = [
    Fp8Defect(
        "tiles are overwritten while they are read", Kind.RACE, "latent.rows_fp8",
        "            mbarrier.wait(free.index(2 * b + 1), phase)\n", "",
    ),
    Fp8Defect(
        "bytes are copied to where wgmma still reads", Kind.RACE, "latent.rows_fp8",
        "            mbarrier.wait(free.index(2 * b + 2), phase)\n", "",
    ),
    Fp8Defect(
        "bytes of block 0 are read before they have arrived", Kind.RACE, "latent.rows_fp8",
        "async_copy.wait_group(1)  # all", "async_copy.wait_group(2)  # all",
    ),
    Fp8Defect(
        "bytes of block 1 are read before they have arrived", Kind.RACE, "latent.rows_fp8",
        "phase)\n            async_copy.wait_group(0)\n", "phase)\n",
    ),
    Fp8Defect(
        "rope is handed over before it has arrived", Kind.RACE, "latent.rows_fp8",
        "            async_copy.wait_group(0)\n            mbarrier.arrive(ready",
        "            mbarrier.arrive(ready",
    ),
    Fp8Defect(
        "wgmma reads before the fence", Kind.FENCE, "latent.kernel",
        "    else:\n        fence_async_shared()\n", "",
    ),
    Fp8Defect(
        "one thread's arrival for all", Kind.DEADLOCK, "latent.rows_fp8",
        "b + 1), count=THREADS)\n            scales1", "b + 1), count=1)\n            scales1",
    ),
    Fp8Defect(
        "a chunk lands in the first columns of its tile", Kind.UNWRITTEN, "latent.rows_fp8",
        "tile.slice(i * CHUNK, CHUNK, dim=1)", "tile.slice(0, CHUNK, dim=1)",
    ),
    Fp8Defect(
        "left columns are stored on the right", None, "latent.rows_fp8",
        "tile = tiles[SIDE]", "tile = tiles[1]",
    ),
    Fp8Defect(
        "scales of the group before", None, "latent.rows_fp8",
        "scales[(SIDE * HALF + i * CHUNK) // GROUP - SKIPPED]",
        "scales[SIDE * HALF // GROUP - SKIPPED]",
    ),
    Fp8Defect(
        "scales of the other half", None, "latent.rows_fp8",
        "keys, SIDE * HALF + (i + 1) * CHUNK, 1", "keys, (i + 1) * CHUNK, 1", "fp8_block32",
    ),
    Fp8Defect(
        "validity of the other block", None, "latent.rows_fp8", "flags.index(b), keys1 >= 0",
        "flags.index(b), keys0 >= 0",
    ),
    Fp8Defect(
        "narrow rope is read from the latent columns", None, "latent.rows_fp8",
        "FIRST: gl.constexpr = 2 * DIMS[0]", "FIRST: gl.constexpr = DIMS[0]", "256+32",
    ),
    Fp8Defect(
        "rows that are not there are read", None, "latent.rows_fp8",
        "word[None, :], mask=(keys >= 0)[:, None])", "word[None, :], mask=(keys >= -1)[:, None])",
    ),
    Fp8Defect(
        "two columns of a word change places", None, "dequantize.rows",
        "gl.join(gl.join(a, c), gl.join(b, d))", "gl.join(gl.join(a, b), gl.join(c, d))",
    ),
    Fp8Defect(
        "one scale for two blocks of 32", None, "dequantize.rows",
        "return max(1, width // block)", "return 1", "fp8_block32",
    ),
    Fp8Defect(
        "a place counts its own row", None, "dequantize.kernels",
        "gl.associative_scan(one, 0, add) - one", "gl.associative_scan(one, 0, add)",
        held=1000,
    ),
    Fp8Defect(
        "owners of all blocks begin at the same place", None, "dequantize.kernels",
        "place = before + gl", "place = gl", "long list", held=1000,
    ),
    Fp8Defect(
        "places past the workspace", Kind.BOUNDS, "dequantize.kernels",
        "mask=mine & (place < capacity)", "mask=mine", held=50,
    ),
    Fp8Defect(
        "a workspace that is too small is used", None, "dequantize.launch",
        "gate = total if", "gate = None if", held=50,
    ),
    Fp8Defect(
        "neither kernel runs", None, "latent.kernel", "<= capacity) != FITS:",
        "> capacity) != FITS:", held=50,
    ),
]  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(
    defect: Fp8Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[defect.case]
    if defect.held:
        for cap in ("WORKSPACE_CAP", "LISTED_CAP"):
            monkeypatch.setattr(dequantize, cap, defect.held * 2 * case.d_qk)

    def adjust(chosen: Plan) -> Plan:
        read, pool = chosen.config.cache_read, chosen.problem.total_k
        read = read.by("named" if defect.held else "in_kernel", pool, pool)
        return replace(chosen, config=replace(chosen.config, cache_read=read))

    assert_found(defect, case, tmp_path, adjust)
