"""Forms that came after an H200's results were recorded: their compiled code, by the rule alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from executed.cases import dense
from gluon_sim.compiled import SCHEDULES, Launches
from openmla import LatentCache, Listed, reference
from openmla.kernels.launch import calls
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.executed.check import check_executed
from openmla.lab.testing.executed.prepare import prepared_call
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.simulate import plan_on
from openmla.operands import AttendOperands
from openmla.planning import Plan
from two_sources import Setup, new_results, operands, read_by

WINDOWS = {
    "128+64->128": dense(100, 300, window=70, seed=21),
    "192+64->256, ragged, sinks": dense(
        *(0, 0),
        **{"heads": 1, "d_nope": 192, "d_v": 256, "sink": "mixed", "window": 33, "seed": 22},
        q_lens=(40, 0, 70),
        k_lens=(150, 60, 129),
    ),
}
SOURCES = {
    "V4.1, span and list": Setup(
        kinds=("span", "list"),
        formats=("fp8_528_v41", "fp4_288"),
        pages=(32, 64),
        first=(65, 3),
        second=(20, 66),
    ),
    "V4.1, split": Setup(
        formats=("fp8_528_v41_split", "fp4_288_split"), first=(65,), second=(64,), seed=1
    ),
}
FEW = {
    name: replace(setup, first=(100,), second=(260,), lengths=False)
    for name, setup in SOURCES.items()
}


TURNED = {
    "one launch": Setup(
        kinds=("span", "list"), first=(65, 0, 3), second=(3, 0, 70), pages=(64, 2), turned=64
    ),
    "few": Setup(first=(100, 0), second=(210, 0), turned=64, seed=1),
}


@pytest.mark.executed
@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    found = check_executed(WINDOWS[name], "h200", schedules=SCHEDULES)
    assert found.status == "right", found.message


def tensors_of(op: AttendOperands) -> Iterator[torch.Tensor]:
    """What a call must not write."""
    yield op.q
    for source in op.sources:
        pool = source.rows
        assert isinstance(pool, LatentCache)
        yield from (x for x in (pool.data, pool.scales) if x is not None)
        if isinstance(source, Listed):
            yield from (x for x in (source.indices, source.lengths) if x is not None)
        else:
            yield from (source.block_table, source.request, source.begin, source.end)
    if op.weights.sink is not None:
        yield op.weights.sink
    if op.turn_back is not None:
        yield from (op.turn_back.table, op.turn_back.positions)


LAUNCHES = {"whole": 3, "in_kernel": 1, "few queries": 3}


@pytest.mark.executed
@pytest.mark.parametrize("way", LAUNCHES)
@pytest.mark.parametrize("name", SOURCES)
def test_rows_of_v41(name: str, way: str) -> None:
    """Pools dequantized whole, rows read where they lie, or in three launches for few queries."""
    few = way == "few queries"
    op = operands((FEW if few else SOURCES)[name])
    chosen = plan_on("h200", op, new_results(op), 0 if few else 2)
    assert (chosen.variant.few is not None) == few
    check(op, chosen if few else read_by(chosen, way), LAUNCHES[way])


@pytest.mark.executed
@pytest.mark.parametrize("name", TURNED)
def test_results_that_are_turned_back(name: str) -> None:
    """In one launch of many rows, and in three of few queries."""
    op, few = operands(TURNED[name]), name == "few"
    chosen = plan_on("h200", op, new_results(op), 0 if few else 2)
    assert (chosen.variant.few is not None) == few
    check(op, chosen, launches=3 if few else 1)


def check(op: AttendOperands, chosen: Plan, launches: int) -> None:
    """The kernels of a plan, under every schedule: right, and always the same bits."""
    results = new_results(op)
    assert chosen.kernel_name == "attend"
    inputs = {x.untyped_storage().data_ptr() for x in tensors_of(op)}
    prepared = [prepared_call(call, "h200", inputs) for call in calls(chosen, op, results)]
    assert len(prepared) == launches
    outcomes = []
    for schedule in SCHEDULES:
        results.out.fill_(torch.nan)
        made = Launches()
        reports = [launch.run(schedule, made) for launch in prepared]
        assert [str(report) for report in reports if not report.ok] == []
        assert results.lse is not None
        outcomes.append(Outcome(results.out.clone(), results.lse.clone()))
    assert not any(differences(outcome, outcomes[0]) for outcome in outcomes)
    verdict = compare(outcomes[0], reference.of(op), columns=512)
    assert verdict.ok, verdict.report()
