"""Seeded defects of the FP8 paths of the latent Hopper kernel: each is found in a few runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import pytest

import openmla.kernels.hopper as package
import openmla.kernels.hopper.latent.launch as launcher
from gluon_sim import Kind, Limits, intercept
from kernels.hopper.latent.defect import Adjust, SparseDefect, assert_clean_and_right, assert_found
from kernels.hopper.simulated import plan_of
from kernels.judging import on
from kernels.mutants import load_mutant, once
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.planning import Plan, dequantize

V32 = Case(
    "sparse",
    4,
    512,
    64,
    512,
    q_lens=(1,),
    k_lens=(400,),
    topk=300,
    scale=0.07,
    seed=1,
    kv="fp8_656",
    page_size=16,
    index_kind="mixed",
    spare=2,
)
CASES = {
    "fp8_584": replace(V32, d_rope=0, rope="none", kv="fp8_584"),
    "fp8_656": V32,
    "fp8_block32": replace(V32, kv="fp8_block32"),
    "256+32": replace(V32, kv="fp8_token", d_nope=256, d_rope=32, d_v=256),
    "long list": replace(V32, topk=600),
    "short work items": replace(
        V32, kv="fp8_token", d_nope=128, d_rope=32, d_v=128, q_lens=(8,), topk=40
    ),
    # Lists that LIST_COLUMNS divides, as that of 2048 rows is.
    "whole blocks": replace(V32, q_lens=(3,), topk=512),
    # The map has a claim for each unit, and none is left.
    "every unit": replace(V32, topk=400, index_kind="distinct", spare=0),
}


@dataclass(frozen=True)
class Fp8Defect(SparseDefect):
    """`held`: rows of the workspace; 0: rows are dequantized in the kernel."""

    case: str = "fp8_656"
    held: int = 0


DEFECTS = [
    # With one stage of keys the wait for a tile would hide it.
    Fp8Defect(
        "a work item is announced over one that nobody has read",
        Kind.RACE,
        "latent.signals",
        "mbarrier.wait(bars.item_empty.index(number), ((turn >> 1) & 1) ^ 1)",
        "pass",
        "short work items",
    ),
    Fp8Defect(
        "tiles are overwritten while they are read",
        Kind.RACE,
        "latent.rows_fp8",
        "            mbarrier.wait(k_empty.index(2 * b + 1), phase)\n",
        "",
    ),
    Fp8Defect(
        "bytes are copied to where wgmma still reads",
        Kind.RACE,
        "latent.rows_fp8",
        "            mbarrier.wait(k_empty.index(2 * b + 2), phase)\n",
        "",
    ),
    Fp8Defect(
        "bytes of block 0 are read before they have arrived",
        Kind.RACE,
        "latent.rows_fp8",
        "async_copy.wait_group(1)  # all",
        "async_copy.wait_group(2)  # all",
    ),
    Fp8Defect(
        "bytes of block 1 are read before they have arrived",
        Kind.RACE,
        "latent.rows_fp8",
        "phase)\n            async_copy.wait_group(0)\n",
        "phase)\n",
    ),
    Fp8Defect(
        "rope is handed over before it has arrived",
        Kind.RACE,
        "latent.rows_fp8",
        "            async_copy.wait_group(0)\n            mbarrier.arrive(k_ready",
        "            mbarrier.arrive(k_ready",
    ),
    Fp8Defect(
        "wgmma reads before the fence",
        Kind.FENCE,
        "latent.signals",
        "    else:\n        fence_async_shared()\n",
        "",
    ),
    Fp8Defect(
        "one thread's arrival for all",
        Kind.DEADLOCK,
        "latent.rows_fp8",
        "b + 1), count=THREADS)\n            scales1",
        "b + 1), count=1)\n            scales1",
    ),
    Fp8Defect(
        "a chunk lands in the first columns of its tile",
        Kind.UNWRITTEN,
        "latent.rows_fp8",
        "tile.slice(i * CHUNK, CHUNK, dim=1)",
        "tile.slice(0, CHUNK, dim=1)",
    ),
    Fp8Defect(
        "left columns are stored on the right",
        None,
        "latent.rows_fp8",
        "tile = tiles.left if SIDE == 0 else tiles.right",
        "tile = tiles.right",
    ),
    Fp8Defect(
        "scales of the group before",
        None,
        "latent.rows_fp8",
        "scales[(SIDE * HALF + i * CHUNK) // GROUP - SKIPPED]",
        "scales[SIDE * HALF // GROUP - SKIPPED]",
    ),
    Fp8Defect(
        "scales of the other half",
        None,
        "latent.rows_fp8",
        "keys, SIDE * HALF + (i + 1) * CHUNK, 1",
        "keys, (i + 1) * CHUNK, 1",
        "fp8_block32",
    ),
    Fp8Defect(
        "validity of the other block",
        None,
        "latent.rows_fp8",
        "validity, keys1 >= 0",
        "validity, keys0 >= 0",
    ),
    Fp8Defect(
        "narrow rope is read from the latent columns",
        None,
        "latent.rows_fp8",
        "FIRST: gl.constexpr = DIMS.latent",
        "FIRST: gl.constexpr = DIMS.latent // 2",
        "256+32",
    ),
    Fp8Defect(
        "rows that are not there are read",
        None,
        "latent.rows_fp8",
        "word[None, :], mask=(keys >= 0)[:, None])",
        "word[None, :], mask=(keys >= -1)[:, None])",
    ),
    Fp8Defect(
        "two columns of a word change places",
        None,
        "dequantize.rows",
        "gl.join(gl.join(a, c), gl.join(b, d))",
        "gl.join(gl.join(a, b), gl.join(c, d))",
    ),
    Fp8Defect(
        "one scale for two blocks of 32",
        None,
        "dequantize.rows",
        "return max(1, width // block)",
        "return 1",
        "fp8_block32",
    ),
    Fp8Defect(
        "V4's left tile is overwritten while it is read",
        Kind.RACE,
        "latent.rows_v4",
        "    mbarrier.wait(bars.k_empty.index(2 * b), phase)\n",
        "",
        "fp8_584",
    ),
    Fp8Defect(
        "V4's right tile is overwritten while it is read",
        Kind.RACE,
        "latent.rows_v4",
        "    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)\n",
        "",
        "fp8_584",
    ),
    Fp8Defect(
        "V4's tail is handed over before it has arrived",
        Kind.RACE,
        "latent.rows_v4",
        "        async_copy.wait_group(0)\n",
        "        pass\n",
        "fp8_584",
    ),
    Fp8Defect(
        "V4's chunks of this block are taken for the next one's",
        None,
        "latent.rows_v4",
        "load_chunk(after.places, c + NEXT - CHUNKS",
        "load_chunk(block.places, c + NEXT - CHUNKS",
        "fp8_584",
    ),
    Fp8Defect(
        "V4's scales of the chunk before",
        None,
        "latent.rows_v4",
        "scale_of(block.scales, c)",
        "scale_of(block.scales, max(c - 1, 0))",
        "fp8_584",
    ),
    Fp8Defect(
        "a place counts its own row",
        None,
        "dequantize.kernels",
        "gl.associative_scan(one, 0, add) - one",
        "gl.associative_scan(one, 0, add)",
        held=1000,
    ),
    Fp8Defect(
        "owners of all blocks begin at the same place",
        None,
        "dequantize.kernels",
        "place = before + gl",
        "place = gl",
        "long list",
        held=1000,
    ),
    Fp8Defect(
        "lists of whole blocks have one more",
        None,
        "dequantize.kernels",
        "(lists.columns + LIST_COLUMNS - 1)",
        "(lists.columns + LIST_COLUMNS)",
        "whole blocks",
        held=1000,
    ),
    Fp8Defect(
        "places past the workspace",
        Kind.BOUNDS,
        "dequantize.kernels",
        "mask=mine & (place < capacity)",
        "mask=mine",
        held=50,
    ),
    Fp8Defect(
        "a workspace that is too small is used",
        Kind.OUTPUT,
        "dequantize.launch",
        "gate = total if",
        "gate = None if",
        held=50,
    ),
    Fp8Defect(
        "the map has a line more",
        Kind.BOUNDS,
        "dequantize.kernels",
        "unit % lines * IN_LINE",
        "unit % (lines + 1) * IN_LINE",
        "long list",
        held=1000,
    ),
    Fp8Defect(
        "a line of the map has a claim more",
        Kind.BOUNDS,
        "dequantize.kernels",
        "unit // lines % IN_LINE",
        "unit // lines % IN_LINE + 1",
        "every unit",
        held=1000,
    ),
    Fp8Defect(
        "claims are read while they are made",
        Kind.RACE,
        "dequantize.kernels",
        "    wait_for_kernel_before()\n    mine",
        "    mine",
        held=1000,
    ),
    Fp8Defect(
        "rows are dequantized before they have places",
        Kind.RACE,
        "dequantize.kernels",
        "        wait_for_kernel_before()\n        total",
        "        total",
        held=1000,
    ),
    Fp8Defect(
        "a workspace is read while it is filled",
        Kind.RACE,
        "latent.kernel",
        "        wait_for_kernel_before()\n    if STORED",
        "        pass\n    if STORED",
        held=1000,
    ),
    Fp8Defect(
        "the number of rows is read while they are counted",
        Kind.RACE,
        "latent.kernel",
        "            wait_for_kernel_before()\n        if (gl.load",
        "            pass\n        if (gl.load",
        held=50,
    ),
    Fp8Defect(
        "neither kernel runs",
        None,
        "latent.kernel",
        "<= capacity) != FITS:",
        "> capacity) != FITS:",
        held=50,
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(
    defect: Fp8Defect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[defect.case]
    assert_found(defect, case, tmp_path, holding(defect.held, case, monkeypatch))


def holding(held: int, case: Case, monkeypatch: pytest.MonkeyPatch) -> Adjust:
    """Plans with a workspace of `held` rows; 0: rows are dequantized in the kernel."""
    if held:
        for cap in ("DEQUANTIZED_CAP", "LISTED_CAP"):
            monkeypatch.setattr(dequantize, cap, held * 2 * case.d_qk)

    def adjust(chosen: Plan) -> Plan:
        read, pool = chosen.config.cache_read, chosen.problem.total_k
        read = read.by("named" if held else "in_kernel", pool, pool)
        return replace(chosen, config=replace(chosen.config, cache_read=read))

    return adjust


@pytest.mark.parametrize(("name", "held"), sorted({(d.case, d.held) for d in DEFECTS}))
def test_the_kernels_themselves_are_clean_and_right(
    name: str, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    assert_clean_and_right(case, holding(held, case, monkeypatch))


def kinds_of_two_calls(launch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> set[Kind]:
    """What is found when the same call runs twice in a row on the same workspace."""
    built = on(V32, "nan")
    results = new_results(built)
    plan = holding(1000, V32, monkeypatch)(plan_of(built))
    prepared = list(launch.calls(plan, built.operands, results))
    with intercept(limits=Limits(steps=20_000)) as reports:
        for call in prepared * 2:
            call.run()
    assert judge(on(V32), Outcome(results.out, results.lse, results.max_logits)).ok
    return {kind for report in reports for kind in report.kinds()}


def test_a_call_waits_for_the_call_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kinds_of_two_calls(launcher, monkeypatch) == set()
    early = once("claiming, SOURCES", '{**claiming, "launch_pdl": True}, SOURCES')
    mutant = load_mutant(package, "dequantize.launch", early, "latent.launch", tmp_path)
    assert kinds_of_two_calls(mutant, monkeypatch) == {Kind.RACE}
