"""What can be planned: a call of attention, or a step of the indexer. Its form says which it is."""

from __future__ import annotations

from typing import Any

from openmla.indexer.problem import INDEX_FORMS, IndexProblem
from openmla.problem import Problem
from openmla.records import decode

AnyProblem = Problem | IndexProblem


def decode_problem(values: Any) -> AnyProblem:
    """The problem that `to_json` wrote.

    >>> decode_problem({"form": "select", "topk": 64, "total_q": 8, "width": 512}).topk
    64
    """
    form = values.get("form") if isinstance(values, dict) else None
    of_indexer = isinstance(form, str) and form in INDEX_FORMS
    problem: AnyProblem = decode("problem", IndexProblem if of_indexer else Problem, values)
    return problem
