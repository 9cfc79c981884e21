"""What can be planned: a call of attention, its backward pass, a step of the indexer or its loss.

The form says which it is.
"""

from __future__ import annotations

from typing import Any

from openmla.backward.problem import BACKWARD_FORMS, BackwardProblem
from openmla.indexer.loss_problem import LOSS_FORM, LossProblem
from openmla.indexer.problem import INDEX_FORMS, IndexProblem
from openmla.problem import Problem
from openmla.records import decode

AnyProblem = Problem | IndexProblem
"""A BackwardProblem is a Problem, and so is a LossProblem, each of a form of its own."""


def decode_problem(values: Any) -> AnyProblem:
    """The problem that `to_json` wrote.

    >>> decode_problem({"form": "select", "topk": 64, "total_q": 8, "width": 512}).topk
    64
    """
    form = values.get("form") if isinstance(values, dict) else None
    kinds: dict[Any, type[AnyProblem]] = dict.fromkeys(INDEX_FORMS, IndexProblem)
    kinds |= dict.fromkeys(BACKWARD_FORMS, BackwardProblem)
    kinds[LOSS_FORM] = LossProblem
    kind = kinds.get(form, Problem) if isinstance(form, str) else Problem
    problem: AnyProblem = decode("problem", kind, values)
    return problem
