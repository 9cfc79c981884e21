"""Neighbors: a query's bits are the same wherever in a batch it stands, whoever stands beside it.

The queries of a call of `mla_attend`, with all that is theirs, are put in the opposite order where
they lie, so that shapes, strides and the plan stay; the results must come in that order too.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.memory.poison import differences
from openmla.operands import AttendOperands
from openmla.sources import Listed


def turned_round(built: BuiltCase) -> BuiltCase:
    """The case with its queries in the opposite order, in the same memory."""
    assert isinstance(built.operands, AttendOperands)
    for rows in _of_queries(built.operands):
        raw = rows.view(torch.uint8) if rows.element_size() == 1 else rows  # FP8 has no flip
        raw.copy_(raw.flip(0))
    return built


def neighbor_problems(turned: Outcome, outcome: Outcome) -> list[str]:
    """Where the results of queries in the opposite order are others."""
    flipped = Outcome(**{name: rows.flip(0) for name, rows in turned.tensors().items()})
    found = differences(flipped, outcome)
    return [f"queries in the opposite order: {problem}" for problem in found]


def _of_queries(op: AttendOperands) -> Iterator[Tensor]:
    """Every tensor that has a row for each query."""
    yield op.q
    for source in op.sources:
        if isinstance(source, Listed):
            yield source.indices
            if source.lengths is not None:
                yield source.lengths
        else:
            yield from (source.request, source.begin, source.end)
    if op.turn_back is not None:
        yield op.turn_back.positions
