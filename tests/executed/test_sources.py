"""mla_attend's compiled kernel for CDNA4, executed here: lists and spans, one and two sources."""

from __future__ import annotations

import pytest
import torch

from gluon_sim.compiled import SCHEDULES
from openmla.dispatch import triton_version
from openmla.kernels.launch import calls
from openmla.lab.testing.executed.calls import compiled_calls
from openmla.lab.testing.simulate import plan_on
from openmla.lab.testing.sources import SourcesCase, judged, new_results, operands
from openmla.operands import AttendOperands, data_of
from openmla.sources import Listed

# A block has 64 places: one more, one less, none, and two blocks and some of a third.
ROWS = {"first": (65, 0, 130), "second": (63, 64, 0)}
CASES = {
    "span and list": SourcesCase(**ROWS, kinds=("span", "list"), pages=(64, 2), seed=1),
    "list and span, no sink": SourcesCase(
        **ROWS, kinds=("list", "span"), pages=(2, 16), sink=False, heads=70, seed=2
    ),
    "bf16 span and V4's list": SourcesCase(
        **ROWS, kinds=("span", "list"), formats=("bf16", "fp8_584"), pages=(16, 2), seed=3
    ),
    "V4's list and bf16 list": SourcesCase(**ROWS, formats=("fp8_584", "bf16"), seed=4),
    "span": SourcesCase(kinds=("span",), first=(65, 0, 150), pages=(64,), seed=5),
    "list, turned back": SourcesCase(kinds=("list",), first=(65, 0, 3), turned=64, seed=7),
}


def tensors_of(op: AttendOperands) -> list[torch.Tensor]:
    """All that the call reads."""
    found = [op.q, *([] if op.weights.sink is None else [op.weights.sink])]
    for source in op.sources:
        found.append(data_of(source.rows))
        if isinstance(source, Listed):
            found += [source.indices, *([] if source.lengths is None else [source.lengths])]
        else:
            found += [source.block_table, source.request, source.begin, source.end]
    if op.turn_back is not None:
        found += [op.turn_back.table, op.turn_back.positions]
    return found


def check(name: str, schedules: int) -> None:
    """Right, without a finding, and the same bits under every schedule."""
    op = operands(CASES[name])
    got = new_results(op)
    chosen = plan_on("mi355x", op, got)
    assert chosen.kernel_name == "attend"
    run = compiled_calls(
        calls(chosen, op, got), "mi355x", tensors_of(op), list(got.tensors().values())
    )
    first: torch.Tensor | None = None
    for schedule in SCHEDULES[:schedules]:
        assert [str(report) for report in run(schedule) if not report.ok] == []
        assert judged(op, got).status == "right", schedule
        first = got.out.clone() if first is None else first
        assert torch.equal(got.out, first), schedule


@pytest.mark.executed
@pytest.mark.skipif(triton_version() < (3, 9), reason="CDNA4 is executed with Triton 3.9")
@pytest.mark.parametrize("name", CASES)
def test_sources(name: str) -> None:
    check(name, len(SCHEDULES))
