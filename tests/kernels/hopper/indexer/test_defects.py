"""Seeded defects of the indexer's kernels on Hopper and of the producer that Blackwell shares.

Configurations are those of plans, but for the number of SMs: the ring of keys turns within a work
item, and a thread holds as many vectors of a list as on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

import openmla.kernels.blackwell as blackwell
import openmla.kernels.cdna4 as cdna4
import openmla.kernels.hopper as hopper
from gluon_sim import Kind, Limits, intercept
from indexer.score_cases import UNWRITTEN, among_many, paged, pair
from kernels.hopper.indexer.test_select import operands, results_of
from kernels.hopper.latent.defect import SparseDefect
from kernels.mutants import NOTHING, RUNS, assert_found, load_mutant, once
from openmla.indexer import reference
from openmla.indexer.operands import ScoresOperands, SelectOperands, Windows
from openmla.kernels.blackwell.indexer import launch as blackwell_launcher
from openmla.kernels.gluon.select import launch as select_launcher
from openmla.kernels.hopper.indexer import launch as hopper_launcher
from openmla.lab.testing.indexer import score_problems
from openmla.planning import plan

PACKAGES = {"hopper": hopper, "blackwell": blackwell, "cdna4": cdna4}
LAUNCHERS = {"hopper": hopper_launcher, "blackwell": blackwell_launcher}
TARGETS = {"hopper": "h200", "blackwell": "b200", "cdna4": "mi355x"}
LIMITS = Limits(steps=60_000)
# Ten blocks of 128 keys in one work item, through a ring of four.
SCORES = {
    "long": pair([0] * 9, [1280] * 9, 1280, 64),
    "ends at 127": pair([0] * 8, [1279] * 8, 1280, 64),
    "begins at 129": pair([129] * 8, [1280] * 8, 1280, 64),
    # One query a request: 21 blocks through a ring of eight, then four requests more.
    "decode": paged([1] * 5, [2600, 129, 300, 64, 200], 64, 32),
    "decode, two queries": paged([2, 1, 0, 4, 1], [300, 200, 70, 290, 129], 64, 64),
    # The same call again, which may begin before the first has ended.
    "decode, twice": paged([1] * 2, [65, 130], 64, 64),
}
LISTS: dict[str, SelectOperands] = {
    "short rows": operands("random", 4000, 900),
    "equal scores": operands("equal", 4000, 1500),
    "long rows": operands("ascending", 10000, 300),
}


@dataclass(frozen=True)
class IndexDefect(SparseDefect):
    """A defect of the indexer's kernels of one family."""

    family: str = "hopper"


SCORE, WORK = "indexer.scores", "indexer_work"
TILE, SELECT = "select.tile", "select.kernel"
DECODE = "indexer.decode_scores"
WAIT_FREE = "        mbarrier.wait(bars.k_empty.index(stage), ((it // ST) & 1) ^ 1)\n"
RELEASE = (
    "                if j == SUB - 1:\n"
    "                    mbarrier.arrive(bars.k_empty.index(stage), count=1)\n"
)
RELEASE_KEYS = RELEASE.replace("if j == SUB - 1:", "if j == SUB - 1 and fp4 is None:")
WAIT_SCORES = "                S = warpgroup_mma_wait(0, deps=(S_next,))\n"
FINISH = (
    "                place = key + j * ROWS\n"
    "                finish(S, halves, scale, row_ptr, out.row_stride, "
    "place, whole, seen, CFG.queries)\n"
)
WIDE_KEYS = """            if fp4 is not None:
                finish_wide_keys(
                    fp4,
                    stage,
                    smem.q.index(slot),
                    weights,
                    query,
                    work.total_q,
                    out,
                    key,
                    seen,
                    CFG,
                    CFG.queries,
                    HEADS,
                )
"""
RELEASE_BLOCK = WIDE_KEYS + "            mbarrier.arrive(bars.k_empty.index(stage), count=1)\n"
WIDE = "gl.int64 if R * BITS > 32 else gl.int32"
DEFECTS = [
    IndexDefect("keys are overwritten while they are read", Kind.RACE, WORK, WAIT_FREE, "", "long"),
    IndexDefect(
        "keys are overwritten while Blackwell reads them",
        Kind.RACE,
        WORK,
        WAIT_FREE,
        "",
        "long",
        "blackwell",
    ),
    IndexDefect(
        "the ring of keys turns only once",
        Kind.RACE,
        WORK,
        "((it // ST) & 1) ^ 1",
        "gl.where(it < 2 * ST, ((it // ST) & 1) ^ 1, (it // ST) & 1)",
        "long",
    ),
    IndexDefect(
        "keys are released under their product",
        Kind.RACE,
        SCORE,
        WAIT_SCORES + RELEASE_KEYS,
        RELEASE + WAIT_SCORES,
        "long",
    ),
    IndexDefect(
        "keys are released after the first half",
        Kind.RACE,
        SCORE,
        "if j == SUB - 1 and fp4 is None:",
        "if j == 0:",
        "long",
    ),
    IndexDefect(
        "keys of a turn before are read",
        None,
        SCORE,
        "mbarrier.wait(bars.k_ready.index(stage), (it // ST) & 1)",
        "mbarrier.wait(bars.k_ready.index(stage), gl.minimum(it // ST, 1))",
        "long",
    ),
    IndexDefect(
        "a block but for one key is whole",
        None,
        SCORE,
        "(key + BN <= high)",
        "(key + BN <= high + 1)",
        "ends at 127",
    ),
    IndexDefect(
        "a block but for its first key is whole",
        None,
        SCORE,
        "(key >= low)",
        "(key >= low - 1)",
        "begins at 129",
    ),
    IndexDefect(
        "decode: keys are overwritten while they are read",
        Kind.RACE,
        DECODE,
        "        mbarrier.wait(bars.k_empty.index(stage), (((it + c) // ST) & 1) ^ 1)\n",
        "",
        "decode",
    ),
    IndexDefect(
        "decode: the ring of keys turns only once",
        Kind.RACE,
        DECODE,
        "(((it + c) // ST) & 1) ^ 1",
        "gl.where(it + c < 2 * ST, (((it + c) // ST) & 1) ^ 1, ((it + c) // ST) & 1)",
        "decode",
    ),
    IndexDefect(
        "decode: keys are released under their product",
        Kind.RACE,
        DECODE,
        WAIT_SCORES + FINISH + RELEASE_BLOCK,
        RELEASE + WAIT_SCORES + FINISH,
        "decode",
    ),
    IndexDefect(
        "decode: keys are released after the first half",
        Kind.RACE,
        DECODE,
        FINISH + RELEASE_BLOCK,
        FINISH + RELEASE.replace("SUB - 1", "0"),
        "decode",
    ),
    IndexDefect(
        "decode: windows and scores of the launch in front are overwritten",
        Kind.RACE,
        DECODE,
        "wait_for_kernel_before()",
        NOTHING,
        "decode, twice",
    ),
    IndexDefect(
        "decode: keys are read before they are there",
        None,
        DECODE,
        "            mbarrier.wait(bars.k_ready.index(stage), ((it + c) // ST) & 1)\n",
        "",
        "decode",
    ),
    IndexDefect(
        "decode: queries are read before they are there",
        Kind.RACE,
        DECODE,
        "        mbarrier.wait(bars.q_ready.index(slot), (turn // QS) & 1)\n",
        "",
        "decode",
    ),
    IndexDefect(
        "decode: a work item is announced over one that is read",
        Kind.RACE,
        DECODE,
        "    mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)\n"
        "    put(smem.items, slot, QUERY",
        "    put(smem.items, slot, QUERY",
        "decode",
    ),
    IndexDefect(
        "decode: one entry too many of the block table's 32",
        None,
        DECODE,
        "if number >= page + LANES:",
        "if number > page + LANES:",
        "decode",
    ),
    IndexDefect(
        "decode: the second query of a tile may be another request's",
        None,
        DECODE,
        "gl.where(query + 1 < stop, scored_end(own + 1, work), 0)",
        "scored_end(own + 1, work)",
        "decode, two queries",
    ),
    IndexDefect(
        "decode: the last blocks are nobody's",
        None,
        DECODE,
        "while share * gl.num_programs(0) < total:",
        "while share * gl.num_programs(0) < 0:",
        "decode, two queries",
    ),
    IndexDefect(
        "decode: tiles of a request skip a query",
        None,
        DECODE,
        "query += CFG.queries",
        "query += CFG.queries + 1",
        "decode, two queries",
    ),
    IndexDefect(
        "decode: the first query of a request has the window of the one before",
        None,
        DECODE,
        "gl.where(after <= number, tried, place)",
        "gl.where(after < number, tried, place)",
        "decode",
    ),
    IndexDefect(
        "counts of eight vectors are packed into 32 bits",
        None,
        TILE,
        WIDE,
        "gl.int32",
        "short rows",
    ),
    IndexDefect(
        "counts of ties are packed into 32 bits", None, TILE, WIDE, "gl.int32", "equal scores"
    ),
    IndexDefect(
        "a warp's count of 128 has a sign",
        None,
        TILE,
        "sums = ((of_warp[:, None] >> shift) & ONES)",
        "sums = ((of_warp[:, None] >> shift) & (ONES >> 1))",
        "equal scores",
    ),
    IndexDefect(
        "a warp's count of 256 takes 8 bits",
        None,
        TILE,
        "8 if LANES == 32 else 16",
        "8",
        "equal scores",
        "cdna4",
    ),
    IndexDefect(
        "counts of ties in 64 lanes are packed into 32 bits",
        None,
        TILE,
        WIDE,
        "gl.int32",
        "equal scores",
        "cdna4",
    ),
    IndexDefect(
        "a chunk is read while it is copied to LDS",
        Kind.RACE,
        SELECT,
        "lds_copy.wait_group(IN_FLIGHT)",
        "lds_copy.wait_group(IN_FLIGHT + 1)",
        "long rows",
        "cdna4",
    ),
    IndexDefect(
        "a chunk is copied to the slot of the next",
        Kind.UNWRITTEN,
        SELECT,
        "slot = ring.index(c % CFG.stages)",
        "slot = ring.index((c + 1) % CFG.stages)",
        "long rows",
        "cdna4",
    ),
    IndexDefect(
        "copies to LDS go on past the scores",
        Kind.BOUNDS,
        SELECT,
        "gl.minimum(number + c * tile_vectors(CFG, R), (end - 1) // VECTOR)",
        "number + c * tile_vectors(CFG, R)",
        "long rows",
        "cdna4",
    ),
    IndexDefect(
        "copies to LDS end 100 vectors early",
        None,
        SELECT,
        "(end - 1) // VECTOR)",
        "(end - 1) // VECTOR - 100)",
        "long rows",
        "cdna4",
    ),
]


def scores_of(
    launch: ModuleType, family: str, op: ScoresOperands, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    out = torch.full((op.q.shape[0], 1300 if op.block_table is None else 2700), UNWRITTEN)
    chosen = plan(op.problem(out), TARGETS[family], family)
    found = Windows(*(torch.full((out.shape[0],), -7, dtype=torch.int32) for _ in range(3)))
    op = replace(op, seen=found)
    programs = 2 if op.q is SCORES["decode, two queries"].q else 1
    chosen = replace(chosen, config=replace(chosen.config, sm_count=programs))
    times = 2 if op.q is SCORES["decode, twice"].q else 1
    with intercept(limits=LIMITS, schedule=schedule, seed=seed) as reports:
        for call in [*launch.calls(chosen, op, out)] * times:
            call.run()
    kinds = {kind for report in reports for kind in report.kinds()}
    right = not score_problems(op, out, UNWRITTEN)
    if chosen.kernel.finds_windows(chosen.config):
        right = right and torch.equal(found.ends, op.windows.ends)
    return kinds, right


def selection_of(
    launch: ModuleType, family: str, op: SelectOperands, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    got, want = results_of(op), results_of(op)
    chosen = plan(op.problem(got), TARGETS[family], family)
    assert chosen.config.list_vectors * chosen.config.lanes == 8 * 32
    with intercept(limits=LIMITS, schedule=schedule, seed=seed) as reports:
        for call in launch.calls(chosen, op, got):
            call.run()
    reference.write_selection(op, want, reference.select(op))
    kinds = {kind for report in reports for kind in report.kinds()}
    names = ("out", "counts", "mask")
    return kinds, all(torch.equal(getattr(got, name), getattr(want, name)) for name in names)


def run(
    launch: ModuleType, family: str, case: str, schedule: str, seed: int
) -> tuple[set[Kind], bool]:
    """What the simulator found, and whether the numbers are right."""
    if case in SCORES:
        return scores_of(launch, family, SCORES[case], schedule, seed)
    return selection_of(launch, family, LISTS[case], schedule, seed)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: IndexDefect, tmp_path: Path) -> None:
    edit = once(defect.old, defect.new)
    package = PACKAGES[defect.family]
    launcher = "indexer.launch" if defect.case in SCORES else "select.launch"
    mutant = load_mutant(package, defect.file, edit, launcher, tmp_path)
    assert_found(defect.kind, partial(run, mutant, defect.family, defect.case))


@pytest.mark.seeded
@pytest.mark.parametrize("family", LAUNCHERS)
def test_a_defect_of_the_page_stride_is_found(family: str, tmp_path: Path) -> None:
    """No second page is read, but a GPU refuses the descriptor."""
    edit = once(
        "[rows * values.stride(1), values.stride(1), 1]",
        "[rows * values.stride(0), values.stride(1), 1]",
    )
    mutant = load_mutant(PACKAGES[family], "indexer_operands", edit, "indexer.launch", tmp_path)
    with pytest.raises(ValueError, match="below 2\\^40"):
        scores_of(mutant, family, among_many(100_000, 140), *RUNS[0])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *[("hopper", name) for name in (*SCORES, *LISTS)],
        ("blackwell", "long"),
        *[("cdna4", name) for name in LISTS],
    ],
)
def test_the_kernel_itself_is_clean_and_right(family: str, name: str) -> None:
    for schedule, seed in RUNS[:3]:
        launcher = LAUNCHERS[family] if name in SCORES else select_launcher
        assert run(launcher, family, name, schedule, seed) == (set(), True)
