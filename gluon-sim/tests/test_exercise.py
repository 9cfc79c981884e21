"""What runs exercised, and what they left out, by name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import gluon_sim as sim
from gluon_sim import Exercise, gaps, recording, simulate
from gluon_sim.report.gaps import turns_by_stages
from gluon_sim.report.sites import Source
from toys import exercised

FILE = exercised.__file__
SHORT, LONG = 2, 7
NOT_RUN = ("never", "", "never runs")
DONE = ("await_slot", "mbarrier.wait(barrier, phase) of done", "never blocks")


def run(steps: int, negative: bool = False, seed: int = 0) -> None:
    """Some steps of a ring of two stages, right and clean."""
    out = torch.zeros(128, dtype=torch.int32)
    simulate(exercised.added_up, 1, (out, steps, 2, negative), seed=seed).raise_if_bad()
    total = sum(torch.arange(128) + i for i in range(steps)) * (-1 if negative else 1)
    assert torch.equal(out, total.int())


def left_out(exercise: Exercise) -> set[tuple[str, str, str]]:
    """Function, text and what no run has shown."""
    return {(gap.function, gap.text, gap.what) for gap in gaps(exercise.total(), [FILE])}


def test_a_ring_that_turns_once_and_waits_that_never_block_are_named() -> None:
    with recording() as exercise:
        for seed in range(4):
            run(SHORT, seed=seed)
    wait = "mbarrier.wait(bars.free.index(stage), i // STAGES & 1 ^ 1)"
    assert left_out(exercise) == {
        NOT_RUN,
        DONE,
        ("write", wait, "never blocks"),
        ("write", "NEGATIVE", "is never true"),
        ("read", "i > 4", "is never true"),
        ("added_up", "ring", "does not turn twice"),
        ("added_up", "bars.ready", "does not turn twice"),
        ("added_up", "bars.free", "does not turn twice"),
    }


def test_more_runs_leave_less_out() -> None:
    with recording() as exercise:
        for seed in range(4):
            run(LONG, negative=seed == 0, seed=seed)
    assert left_out(exercise) == {NOT_RUN, DONE, ("read", "i > 100", "is never true")}
    turns = turns_by_stages(exercise.total())
    assert sorted(name for _, name in turns) == ["bars.free", "bars.ready", "ring"]
    assert all(by_stages == {2: LONG // 2} for by_stages in turns.values())


def test_records_of_processes_are_one() -> None:
    parts = []
    for negative in (False, True):
        with recording() as exercise:
            run(LONG, negative)
        parts.append(Exercise.loads(exercise.dumps()))
    assert ("write", "NEGATIVE", "is never true") in left_out(parts[0])
    assert ("write", "NEGATIVE", "is never false") in left_out(parts[1])
    parts[0].add(parts[1])
    assert not {gap for gap in left_out(parts[0]) if gap[1] == "NEGATIVE"}
    assert [record.launches for record in parts[0].records.values()] == [2]


def test_what_other_files_hold_counts_where_it_ran() -> None:
    with recording() as exercise:
        run(SHORT)
    found = {(gap.function, gap.what) for gap in gaps(exercise.total(), [])}
    assert ("read", "is never true") in found  # a condition in a register
    assert ("write", "is never true") not in found  # a constant
    assert ("never", "never runs") not in found


def test_gaps_say_where_they_are() -> None:
    with recording() as exercise:
        run(SHORT)
    texts = Path(FILE).read_text().splitlines()
    for gap in gaps(exercise.total(), [FILE]):
        base = gap.text.split(" of ")[0].split(".")[0].split("(")[0]
        assert base in texts[gap.line - 1] or not gap.text
        assert str(gap).startswith(f"exercised.py:{gap.line}: ")


def test_nothing_is_recorded_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("recorded")

    monkeypatch.setattr(sim.report.exercise, "Observer", fail)
    run(LONG)
    with recording(), pytest.raises(AssertionError, match="recorded"):
        run(LONG)
    run(LONG)


NAMES = """
@gluon.jit
def kernel():
    a = f(0)
    b = (f(1), f(2).index(0))
    c, d = f(3), g(f(4))
    e = Record(left=f(5), right=(f(6), f(7)))
    h: gl.constexpr = f(8)
    return (a, b, c), Record(e=e)
"""


def test_what_allocations_are_called() -> None:
    source = Source("names.py", NAMES)
    found = {
        ast.unparse(call.args[0]): source.allocated(place).name
        for place, call in source.calls.items()
        if ast.unparse(call.func) == "f"
    }
    # `f(2)` begins where its view begins.
    assert found == {
        "0": "a",
        "1": "b[0]",
        "3": "c",
        "4": "",
        "5": "e.left",
        "6": "e.right[0]",
        "7": "e.right[1]",
        "8": "h",
    }
    place = next(place for place, call in source.calls.items() if "index" in ast.unparse(call))
    assert source.allocated(place).name == "b[1]"


def test_whoever_calls_names_what_is_returned() -> None:
    inner = Source(
        "inner.py", "@gluon.jit\ndef two():\n    x = f()\n    y = f()\n    return x, y\n"
    )
    outer = "@gluon.jit\ndef kernel():\n    a, b = two()\n    pair = two()\n"
    called = Source("outer.py", outer)
    [_, y] = [inner.allocated(place) for place in inner.calls]
    assert y.returned is not None
    names = [called.allocated(place, y.returned).name for place in called.calls]
    assert names == ["b", "pair.y"]
