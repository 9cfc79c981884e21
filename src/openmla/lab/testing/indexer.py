"""When scores and selections of the indexer are right.

Scores are sums of products in the tensor core's accumulator, which keeps about 13 bits of the
largest partial sum on Hopper (2026-11-15, H200: 1.3e-4 of the norm). `BOUND` of the sum of all
magnitudes is what an error may be. A selection from given scores has no tolerance at all; one from
scores of its own is right when nothing was left out that surely beats what is in: `selection_fits`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.indexer import reference
from openmla.indexer.operands import ScoresOperands

BOUND = 2.0**-11


def score_problems(op: ScoresOperands, out: Tensor, unwritten: float) -> list[str]:
    """What is wrong with scores that were computed into an `out` full of `unwritten`."""
    truth = reference.scores(op, out)
    got = out.double().cpu()
    outside = truth.scores.isnan() & (truth.magnitude == 0)
    problems = []
    touched = outside & (got != unwritten)
    if bool(touched.any()):
        problems.append(f"written outside its window: {touched.nonzero()[0].tolist()}")
    # A NaN is right where the truth is NaN, and only there.
    wrong = ~((got - truth.scores).abs() <= BOUND * truth.magnitude) & ~outside
    wrong &= ~(got.isnan() & truth.scores.isnan())
    if bool(wrong.any()):
        t, s = wrong.nonzero()[0].tolist()
        share = f"{int(wrong.sum())} of {int((~outside).sum())}"
        found = f"got {float(got[t, s])}, expected {float(truth.scores[t, s])}"
        problems.append(f"wrong scores, {share}: [{t}, {s}] {found}")
    return problems


def selection_fits(positions: Tensor, exact: Tensor, bound: Tensor, topk: int) -> bool:
    """Whether one row's selection follows from scores within `bound` of `exact` [n].

    >>> exact, bound = torch.tensor([3.0, 2.0, 1.0, 0.0]), torch.full((4,), 0.5)
    >>> [selection_fits(torch.tensor(p), exact, bound, 2) for p in ([0, 1], [0, 2], [0, 3])]
    [True, True, False]
    """
    n, live = exact.shape[0], positions[positions >= 0].long()
    count = min(topk, n)
    ascending = bool((live[1:] > live[:-1]).all())
    if live.shape[0] != count or bool((positions[count:] != -1).any()) or not ascending:
        return False
    if count == n or not count:
        return True
    if int(live[-1]) >= n:
        return False
    inside = torch.zeros(n, dtype=torch.bool)
    inside[live] = True
    low, high = exact - bound, exact + bound
    return bool(low[~inside].max() <= high[inside].min())
