"""Scores of requests with one or two queries on Hopper, in the simulator.

Configurations are those of plans, but for the number of SMs. Bits are compared with those of the
kernel of many queries, and everything around the windows with what stood there before.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gluon_sim import Limits, intercept
from indexer.score_cases import SCHEDULES, UNWRITTEN, paged, width_of
from openmla.indexer.operands import Requests, ScoresOperands, Windows
from openmla.indexer.windows import paged_windows
from openmla.kernels.hopper.indexer.launch import calls
from openmla.kernels.hopper.indexer.plan import HopperScoresConfig
from openmla.lab.testing.indexer import score_problems
from openmla.planning import Plan, plan

LIMITS = Limits(steps=400_000)
MANY_QUERIES = {"shared_queries": 0, "consumers": 4, "stages": 4}
# Blocks have 128 keys, tiles 64, a ring of eight stages 1024; entries of the table are read in 32s.
BLOCK_EDGES = [1, 63, 64, 65, 127, 128, 129, 255, 257]
CASES = {
    "edges of blocks": paged([1] * 9, BLOCK_EDGES, 64, 64),
    "edges of blocks, two queries": paged([2] * 9, [n + 1 for n in BLOCK_EDGES], 64, 64),
    "edges of pages of 32": paged([1] * 6, [31, 32, 33, 95, 96, 97], 64, 32),
    "edges of pages of 96": paged([1] * 4, [95, 96, 97, 193], 64, 96),
    "edges of pages of 1024": paged([1] * 3, [1023, 1024, 1025], 64, 1024),
    "edges of the 32 entries that are read at once": paged([1] * 3, [1023, 1025, 1057], 64, 32),
    "the ring turns twice in a work item": paged([1], [2305], 64, 64),
    "the ring turns twice over short requests": paged([1] * 20, [130] * 20, 64, 64),
    "two queries, the ring turns twice": paged([2], [2700], 64, 64),
    "some requests have none, one or two queries": paged(
        [1, 2, 0, 2, 1, 1, 0, 2], [300, 290, 70, 2, 129, 64, 5, 200], 64, 64
    ),
    "a request of three queries among them": paged([1, 3, 1, 1], [100, 200, 300, 65], 64, 64),
    "some requests have no keys": paged([1] * 5, [0, 200, 0, 0, 130], 64, 64),
    "nobody has keys": paged([1, 1], [0, 0], 64, 64),
    "more requests than are counted at once": paged(
        [1] * 131, [3 + i % 70 for i in range(131)], 64, 64
    ),
    "32 heads": paged([1] * 3, [100, 200, 129], 32, 64),
    "32 heads, two queries": paged([2, 1, 2], [100, 200, 129], 32, 64),
    "128 heads": paged([1] * 3, [100, 200, 129], 128, 64),
}


WINDOW_CASES = {
    "one query each": CASES["edges of blocks"],
    "none to two": CASES["some requests have none, one or two queries"],
    "three queries": CASES["a request of three queries among them"],
    "queries of nobody": replace(
        CASES["a request of three queries among them"],
        windows=paged_windows(torch.tensor([0, 1, 3]).int(), torch.tensor([100, 200]).int(), 6),
    ),
}


def planned(op: ScoresOperands, out: torch.Tensor, **changes: int) -> Plan:
    """Its plan; two programs divide the work."""
    chosen = plan(op.problem(out), "h200", "hopper")
    return replace(chosen, config=replace(chosen.config, **{"sm_count": 2} | changes))


def run(
    op: ScoresOperands, width: int, schedule: str = "random", seed: int = 1, **changes: int
) -> torch.Tensor:
    out = torch.full((op.q.shape[0], width), UNWRITTEN)
    with intercept(limits=LIMITS, schedule=schedule, seed=seed) as reports:
        for call in calls(planned(op, out, **changes), op, out):
            call.run()
    assert all(report.ok for report in reports), "\n".join(map(str, reports))
    return out


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_with_the_bits_of_many_queries(name: str) -> None:
    op = CASES[name]
    width = width_of(op)
    assert planned(op, torch.empty(op.q.shape[0], width)).config.shared_queries
    out = run(op, width)
    assert score_problems(op, out, UNWRITTEN) == []
    assert torch.equal(out, run(op, width, **MANY_QUERIES))


@pytest.mark.parametrize("name", ["edges of blocks", "two queries, the ring turns twice"])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_clean_under_every_schedule(name: str, schedule: str, seed: int) -> None:
    op = CASES[name]
    out = run(op, width_of(op), schedule, seed, sm_count=1)
    assert score_problems(op, out, UNWRITTEN) == []


@pytest.mark.parametrize("programs", [1, 3, 7, 132])
def test_bits_do_not_depend_on_how_work_is_divided(programs: int) -> None:
    """With more programs than blocks, some have nothing to do."""
    op = CASES["some requests have none, one or two queries"]
    whole = run(op, width_of(op))
    assert torch.equal(whole, run(op, width_of(op), sm_count=programs))
    assert torch.equal(whole, run(op, width_of(op), sm_count=programs, consumers=2, stages=4))


def test_a_narrow_output_cuts_rows() -> None:
    op = CASES["edges of blocks"]
    whole = run(op, width_of(op))
    for width in (100, 128, 129):
        assert torch.equal(run(op, width), whole[:, :width])


@pytest.mark.parametrize("name", WINDOW_CASES)
def test_windows_are_those_of_their_definition(name: str) -> None:
    """Where a selection follows, the kernel writes the windows of all queries, also of those that
    need no scores or are nobody's; scores of the others are what they are without it."""
    op = WINDOW_CASES[name]
    total, width = op.q.shape[0], width_of(op)
    for first, stop, least in ((0, total, 0), (0, total, 129), (1, total - 1, 0), (2, total, 64)):
        windows = op.windows.longer_than(least).part(first, stop)
        found = Windows(*(torch.full((stop - first,), -7, dtype=torch.int32) for _ in range(3)))
        few = replace(
            op, q=op.q[first:stop], weights=op.weights[first:stop], windows=windows, seen=found
        )
        out = run(few, width)
        assert score_problems(few, out, UNWRITTEN) == []
        assert torch.equal(out, run(few, width, **MANY_QUERIES))
        want = op.windows.part(first, stop)
        for array in ("starts", "ends", "sequences"):
            assert torch.equal(getattr(found, array), getattr(want, array)), array


@pytest.mark.parametrize("kind", ["descending", "far", "negative", "overlapping"])
def test_offsets_that_are_none_stay_inside_tensors(kind: str) -> None:
    """The simulator finds accesses outside of tensors; what scores are then is unspecified."""
    op = paged([1, 2, 1, 1], [100, 200, 300, 65], 64, 64)
    offsets = {
        "descending": [5, 4, 2, 1, 0],
        "far": [0, 2**31 - 1, 3, 2**31 - 1, 7],
        "negative": [-(2**31), -5, 2, -1, 5],
        "overlapping": [0, 5, 0, 5, 0],
    }[kind]
    cu = torch.tensor(offsets, dtype=torch.int32)
    lengths = torch.tensor([2**31 - 1, -(2**31), 300, 65], dtype=torch.int32)
    found = Windows(*(torch.full((5,), -7, dtype=torch.int32) for _ in range(3)))
    windows = replace(op.windows, requests=Requests(cu, lengths))
    run(replace(op, windows=windows, seen=found), width_of(op))
    assert found.sequences is not None
    assert bool(((found.sequences >= 0) & (found.sequences < 4)).all())


def test_entries_past_the_last_key_are_not_read() -> None:
    """Lines of the table end with an entry whose page would be read as NaN."""
    op = CASES["edges of pages of 32"]
    table = op.block_table
    assert table is not None
    whole = run(op, width_of(op))
    wild = table.clone()
    for line, keys in enumerate([31, 32, 33, 95, 96, 97]):
        wild[line, -(-keys // 32) :] = 0x7FFFFFFF
    assert torch.equal(whole, run(replace(op, block_table=wild), width_of(op)))


@pytest.mark.parametrize(
    ("total_q", "batch", "heads", "queries"),
    [
        (128, 128, 64, 1),
        (129, 128, 64, 2),
        (256, 128, 64, 2),
        (257, 128, 64, 0),
        (100, 128, 64, 1),
        (256, 128, 128, 1),
        (256, 128, 32, 2),
        (1, 1, 64, 1),
        (4096, 1, 64, 0),
        (128, 0, 64, 0),
    ],
)
def test_the_plan_follows_the_mean_of_queries(
    total_q: int, batch: int, heads: int, queries: int
) -> None:
    op = paged([1], [64], heads, 64)
    problem = replace(op.problem(torch.empty(1, 64)), total_q=total_q, batch=batch)
    config = plan(problem, "h200", "hopper").config
    assert config.shared_queries == queries
    contiguous = plan(replace(problem, page_size=0), "h200", "hopper").config
    assert contiguous.shared_queries == 0


def test_a_stage_is_always_the_same_consumers() -> None:
    config = HopperScoresConfig(64, 64, 132, stages=8, shared_queries=1)
    assert config.supported()
    assert "must be of one" in replace(config, consumers=3).why_unsupported()
    assert "columns" in replace(config, heads=128, shared_queries=2).why_unsupported()
