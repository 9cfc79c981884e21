"""Cases of gradients of the sparse form, and the acceptance rule for them.

The rule is that of dense gradients (compare_gradients.py). A row is key and value of every head, so
the bound of its gradient is the sum of the bounds of d_k and d_v, over the heads: roundings of
different entries and heads are independent, but those of an entry that a list has twice are not.
What an entry gives to its row, over 64 heads at a time, may be rounded before the row adds these
parts; where a row has one, that is its own rounding.

>>> built = build_row_gradients(random_row_gradient_case(2))
>>> outcome = built.run()
>>> outcome.gradients["rows"].shape == built.operands.cache.shape
True
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

import openmla
from openmla.backward import sparse_reference
from openmla.backward.reference import Row, Saved
from openmla.backward.sparse_operands import SparseBackwardOperands
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import COLUMNS_PER_STEP, EPS32, RULES, SCORE_STEPS
from openmla.lab.testing.compare_gradients import (
    D_STEPS,
    Account,
    Bounds,
    GradientFigures,
    GradientVerdict,
    _Judgement,
)
from openmla.lab.testing.draw import fit, random_case
from openmla.lab.testing.gradients import (
    COST_LIMIT,
    D_OUTS,
    GradientCase,
    GradientOutcome,
    drawn_gradients,
)
from openmla.lab.testing.memory import Memory
from openmla.operands import SparseOperands, Weights
from openmla.problem import Backend


@dataclass(frozen=True, eq=False)
class BuiltRowGradients:
    """A case of the sparse form with its tensors."""

    case: GradientCase
    built: BuiltCase
    d_out: Tensor
    d_lse: Tensor | None

    @property
    def operands(self) -> SparseOperands:
        """The operands of the forward pass."""
        assert isinstance(self.built.operands, SparseOperands)
        return self.built.operands

    def backward(self, saved: Saved) -> SparseBackwardOperands:
        """The operands of the backward pass."""
        return SparseBackwardOperands(self.operands, saved.out, saved.lse, self.d_out, self.d_lse)

    def run(self, backend: Backend = "auto") -> GradientOutcome:
        """The public call on tensors that require gradients, and autograd's backward pass."""
        arguments: dict[str, Any] = dict(self.built.arguments)
        leaves: dict[str, Tensor] = {}
        for argument, name in (("q", "q"), ("kv", "rows"), ("sink", "sink")):
            if arguments.get(argument) is not None:
                leaf = arguments[argument].detach().requires_grad_()
                leaves[name] = arguments[argument] = leaf
        out, lse = openmla.mla_prefill_sparse(**arguments, return_lse=True, backend=backend)
        roots, incoming = [out], [self.d_out]
        if self.d_lse is not None:
            roots, incoming = [out, lse], [self.d_out, self.d_lse]
        found = torch.autograd.grad(roots, list(leaves.values()), incoming)
        named = dict(zip(leaves, found, strict=True))
        return GradientOutcome(out.detach(), lse.detach(), named)


def build_row_gradients(case: GradientCase, memory: Memory | None = None) -> BuiltRowGradients:
    """The tensors of a case; rows that no list names keep the memory's background."""
    built = build(case.case, memory=memory)
    return BuiltRowGradients(case, built, *drawn_gradients(case, built))


def random_row_gradient_case(seed: int) -> GradientCase:
    """The case number `seed`: plain rows, no scales per token, an out of its own."""
    rng = random.Random(f"gradients of rows {seed}")
    case = next(_sparse_cases(rng.randrange(2**31)))
    d_out = rng.choices(D_OUTS, weights=(6, 2, 1, 1))[0]
    plain: dict[str, Any] = {
        "kv": "plain",
        "q_scale": False,
        "k_scale": False,
        "out": "fresh",
        "fp32_out": False,
        "seed": seed,
    }
    values = "normal" if case.values == "large" else case.values
    case = replace(case, return_lse=True, return_max_logits=False, values=values, **plain)
    return GradientCase(fit(case, COST_LIMIT), d_out, rng.random() < 0.4)


def _sparse_cases(first: int) -> Iterator[Case]:
    for seed in count(first):
        case = random_case(seed)
        if case.form == "sparse" and not case.sources and case.dtype != "e4m3":
            yield case


def judge_row_gradients(
    built: BuiltRowGradients, got: Mapping[str, Tensor], saved: Saved | None = None
) -> GradientVerdict:
    """Judge gradients by name. With `saved`, the forward pass is taken as it is."""
    if built.d_out.device.type != "cpu":
        built = build_row_gradients(built.case)  # the same numbers, where the reference is
    here = None if saved is None else Saved(saved.out.cpu(), saved.lse.cpu())
    account = RowAccount(built, here)
    bounds = account.bounds()
    expected = {"q", "rows"} | ({"sink"} if built.operands.weights.sink is not None else set())
    problems = [f"d_{name} is missing" for name in sorted(expected - set(got))]
    figures: dict[str, GradientFigures] = {}
    for name in (n for n in ("q", "rows") if n in got):
        judgement = _Judgement(f"d_{name}", got[name], bounds[name], saved is not None)
        figures[name] = judgement.figures()
        problems += judgement.problems
    if "sink" in got:
        problems += account.sink_problems(got["sink"])
    return GradientVerdict(figures, tuple(problems))


def judge_rows_twice(
    built: BuiltRowGradients, got: Mapping[str, Tensor], saved: Saved
) -> tuple[GradientVerdict, GradientVerdict]:
    """End to end, and with the forward pass taken as it is."""
    return judge_row_gradients(built, got), judge_row_gradients(built, got, saved)


PART_HEADS = 64
"""Heads of an entry whose sum may be rounded."""


class _Seen(NamedTuple):
    """What the sums of an account need of the operands."""

    q: Tensor
    v: Tensor
    weights: Weights


class RowAccount(Account):
    """Sums over all queries: what errors of gradients of queries and rows scale with."""

    def __init__(self, built: BuiltRowGradients, saved: Saved | None) -> None:
        op, d_out, d_lse = built.operands, built.d_out, built.d_lse
        assert isinstance(op.cache, Tensor)
        self.op = _Seen(op.q, op.cache[:, None, : op.d_v], op.weights)  # type: ignore[assignment]
        self.rule, self.saved = RULES[op.q.dtype], saved
        self.exact = sparse_reference.backward(op, d_out, d_lse, saved)  # type: ignore[assignment]
        self.scale = abs(op.weights.scale)
        heads, columns = op.q.shape[1:]
        self.loss = max(SCORE_STEPS, columns / COLUMNS_PER_STEP) * EPS32
        self.d_error = 1.0 if saved is None else min(D_STEPS * EPS32 / self.rule.u, 1.0)
        make: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        wide = {"q": op.q.shape, "k": (op.rows, heads, columns), "v": (op.rows, heads, op.d_v)}
        names = ("magnitude", "deviation", "coherent", "slack")
        self.sums = {n: {w: torch.zeros(s, **make) for w, s in wide.items()} for n in names}
        self.terms = {"q": torch.zeros(op.q.shape[0], **make), "k": torch.zeros(op.rows, **make)}
        self.variance = dict.fromkeys(("q", "rows"), 0.0)
        self.sink_variance, self.sink_size, self.sink_slack = (
            torch.zeros(heads, **make) for _ in range(3)
        )
        self.weights: list[Tensor] = []
        self.parts = torch.zeros(op.rows, columns, **make)
        self.number = torch.zeros(op.rows, **make)
        for row in sparse_reference.rows(op, d_out, d_lse, saved):
            self._add(row)

    def bounds(self) -> dict[str, Bounds]:
        """By the names of what they are gradients of."""
        d_v = self.op.v.shape[2]
        sums = {}
        for name, found in self.sums.items():
            sums[name] = found["k"].sum(1, True)
            sums[name][..., :d_v] += found["v"].sum(1, True)
        exact: Any = self.exact
        rows = Bounds(
            exact=exact.rows[:, None],
            magnitude=sums["magnitude"],
            deviation=sums["deviation"].sqrt(),
            coherent=sums["coherent"].sqrt() * self.d_error,
            slack=sums["slack"],
            terms=self.terms["k"] * 2 * self.op.q.shape[1],
            spread=self.variance["rows"] ** 0.5,
            parts=torch.where(self.number[:, None] > 1, self.parts, 0.0)[:, None],
        )
        return {"q": self._of("q", exact.q, self.terms["q"], "q"), "rows": rows}

    def _add_to(
        self, name: str, row: Row, s: Tensor, k: Tensor, q: Tensor, p: Tensor, d_out: Tensor
    ) -> None:
        """Add a row as the dense form does; equal entries of a list round alike."""
        times = (row.keys[:, None] == row.keys).sum(0).double()
        alike = times if name == "deviation" else torch.ones_like(times)
        super()._add_to(name, row, s * alike, k, q, p * alike, d_out)

    def _add(self, row: Row) -> None:
        """What each entry gives to its row, too."""
        super()._add(row)
        for first in range(0, len(row.q), PART_HEADS):
            heads = slice(first, first + PART_HEADS)
            part = torch.einsum("hn,hd->nd", row.d_scores[heads], row.q[heads])
            part = part * self.op.weights.scale
            part[:, : self.op.v.shape[2]] += torch.einsum(
                "hn,hv->nv", row.p[heads], row.d_out[heads]
            )
            self.parts.index_add_(0, row.keys, part.abs())
            self.number.index_add_(0, row.keys, torch.ones_like(row.keys, dtype=torch.float64))

    def _add_variance(self, row: Row, eta: Tensor) -> None:
        """What roundings of dS, of D and of P in this row do to <error, exact>."""
        exact: Any = self.exact
        times = (row.keys[:, None] == row.keys).sum(0).double()
        d_rows = exact.rows[row.keys]
        by_rows = torch.einsum("hd,nd->hn", row.q, d_rows)
        by_queries = torch.einsum("hd,nhd->hn", exact.q[row.row], row.k)
        for name, per_score in (("q", by_queries), ("rows", by_rows)):
            step = self.scale * per_score
            by_scores = float(((row.d_scores * step) ** 2 * times).sum())
            by_out = float(((row.p * step).sum(-1) * eta * self.d_error).square().sum())
            self.variance[name] += by_scores + by_out
        per_weight = torch.einsum("hv,nv->hn", row.d_out, d_rows[:, : self.op.v.shape[2]])
        self.variance["rows"] += float(((row.p * per_weight) ** 2 * times).sum())
