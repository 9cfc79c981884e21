"""The acceptance rule for gradients: are they as accurate as their dtype allows?

Judged against the float64 reference (openmla.backward.reference, whose names are used here). With u
the unit roundoff of the dtype, n the terms of a sum, eps = 2^-23, and

    a = P * (sum|d_out||v| + sum|out||d_out|) + P0 * |d_lse|

what the gradient of one score is made of, every element must satisfy

    d_v     |error| <= u |d_v| + (u + n eps + score) * sum of P |d_out|                  + floors
    d_q     |error| <= u |d_q| + (2u + (n + d_v) eps + score) * scale * sum of a |k|     + floors
    d_k     likewise, with |q| and over queries; d_rope of a shared row, over heads too

`score` and `floors` are those of the forward rule (compare.py). 2u, because gradients of scores are
rounded to the dtype before they are multiplied, and are made of an `out` that was.

An upper bound alone misses small errors in every element, so norms are bounded as well: of all
elements together, and of the worst row. Roundings of the gradients of scores are independent: they
add up to 0.41 u times the deviation, for d_q sqrt(sum over keys (scale dS k)^2). The rounding of
`out`, and of the weights that it was made of, is different. It makes D wrong by about 0.41 u times
eta = sqrt(sum d_out^2 (out^2 + sum (P v)^2)), the same for all keys of a row, which moves d_q by
scale * eta * sum(P k), and where one key has all the weight, truth and deviation vanish while this
does not. So a norm is relative to

    sqrt(max(|truth|, |deviation|)^2 + |coherent|^2)     coherent: scale eta |sum(P k)| for d_q,
                                                         scale sqrt(sum (P eta q)^2) for d_k

A norm over few values is noisy; its limit is widened as in the forward rule, up to 3u.

Rounding has no bias, so the share of the truth that an error is, <error, truth> / <truth, truth>,
must be small: at most `bias`, and 6 standard deviations of what roundings can do to it. These are
known: every dS is off by 0.41 u of itself, every D by 0.41 u eta, every result by 0.41 u of itself,
all independent, and each moves the product by a number that the reference has. Values that are
equal round alike: gradients of scores that occur several times in a row count as one, and where
there are few different weights or results, limits are those of few values.

Keys that nobody sees, queries that see no key, and rows past the last sequence: exactly +0.

A backward pass knows `out` and `lse` only as the forward pass rounded them. It is judged twice: end
to end, and with these taken as they are (`saved`), where no rounding of `out` is an excuse: then
coherent is what fp32 arithmetic of D may cost, and limits are lower.

Weights and gradients of scores may be rounded to bf16, never to fp16, which flushes what a loss
that is not scaled leaves of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backward import reference
from openmla.backward.reference import ExactGradients, Row, Saved
from openmla.lab.testing.compare import (
    COLUMNS_PER_STEP,
    EPS32,
    RULES,
    SCORE_STEPS,
    _argmax,
    _carriers,
    _distinct,
)
from openmla.lab.testing.gradients import BuiltGradients, build_gradients

ROUNDING = 0.41
"""Standard deviation of a relative rounding error, in units of u."""
DEVIATIONS = 6
MOST_ROUNDINGS = 3
"""Roundings of one value at most: a gradient of a score, out, the result."""
P_FLOOR = 2.0**-126
"""Absolute error of a weight, and of the gradient of a score: smaller ones may be flushed."""
D_STEPS = 8
"""fp32 roundings of D, where out is taken as it is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of norms, relative; end to end, or with saved results taken as they are."""

    frobenius: float
    row: float


# bf16, correct results of a plain blocked backward pass: see tests/backward/test_rule.py. Others
# scale with u. The figures of fp32 are those of the forward rule, where u is 16 roundoffs.
LIMITS: dict[torch.dtype, dict[str, Limits]] = {
    torch.bfloat16: {
        "scores": Limits(frobenius=3.6e-3, row=1.0e-2),
        "scores, saved": Limits(frobenius=3.0e-3, row=7.5e-3),
        "values": Limits(frobenius=3.0e-3, row=6.0e-3),
    },
    torch.float16: {
        "scores": Limits(frobenius=4.5e-4, row=1.25e-3),
        "scores, saved": Limits(frobenius=3.75e-4, row=9.4e-4),
        "values": Limits(frobenius=3.75e-4, row=7.5e-4),
    },
    torch.float32: {
        "scores": Limits(frobenius=1.0e-6, row=2.5e-6),
        "scores, saved": Limits(frobenius=1.0e-6, row=2.5e-6),
        "values": Limits(frobenius=1.0e-6, row=1.8e-6),
    },
}


class Bounds(NamedTuple):
    """One exact gradient [rows, H or 1, columns], and what its errors scale with."""

    exact: Tensor
    magnitude: Tensor
    """Sums of absolute terms."""
    deviation: Tensor
    """Roots of sums of squared terms."""
    coherent: Tensor
    """What the rounding of out costs, in units of it."""
    slack: Tensor
    """What scores in fp32, and weights too small for their dtype, may cost."""
    terms: Tensor
    """Terms of each sum, [rows]."""
    spread: float
    """Standard deviation of <error, exact>, in units of one rounding error."""
    carriers: float = float("inf")
    """How many different numbers the terms are made of, where that is few."""
    parts: Tensor | float = 0.0
    """Sums of absolute parts that may be rounded before they are added; norms do not allow it."""


@dataclass(frozen=True)
class GradientFigures:
    """What was measured of one gradient."""

    bound: float
    """Largest error as a share of its componentwise bound: at most 1."""
    frobenius: float
    worst_row: float
    bias: float
    """Bias as a share of its limit: at most 1."""


@dataclass(frozen=True)
class GradientVerdict:
    """What was measured of every gradient, and what was wrong."""

    figures: dict[str, GradientFigures]
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems

    def report(self) -> str:
        """Readable: the verdict, the figures, and where it went wrong."""
        lines = ["accepted" if self.ok else "REJECTED"]
        lines += [
            f"  d_{name}: bound {f.bound:.3g}, frobenius {f.frobenius:.3g}, "
            f"worst row {f.worst_row:.3g}, bias {f.bias:.3g} of its limit"
            for name, f in self.figures.items()
        ]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def judge_gradients(
    built: BuiltGradients, got: Mapping[str, Tensor], saved: Saved | None = None
) -> GradientVerdict:
    """Judge gradients by name. With `saved`, the forward pass is taken as it is."""
    if built.d_out.device.type != "cpu":
        built = build_gradients(built.case)  # the same numbers, where the reference is
    op = built.operands
    here = None if saved is None else Saved(saved.out.cpu(), saved.lse.cpu())
    account = Account(built, here)
    bounds = account.bounds()
    figures: dict[str, GradientFigures] = {}
    problems: list[str] = []
    given = {"q": op.q, "k_nope": op.k_nope, "k_rope": op.k_rope, "v": op.v}
    given["sink"] = op.weights.sink
    expected = {name for name, x in given.items() if x is not None}
    for name in sorted(expected - set(got)):
        problems.append(f"d_{name} is missing")
    for name in (n for n in ("q", "k_nope", "k_rope", "v") if n in got and n in bounds):
        judgement = _Judgement(f"d_{name}", got[name], bounds[name], saved is not None)
        figures[name] = judgement.figures()
        problems += judgement.problems
    if "sink" in got:
        problems += account.sink_problems(got["sink"])
    return GradientVerdict(figures, tuple(problems))


def judge_twice(
    built: BuiltGradients, got: Mapping[str, Tensor], saved: Saved
) -> tuple[GradientVerdict, GradientVerdict]:
    """End to end, and with the forward pass taken as it is."""
    return judge_gradients(built, got), judge_gradients(built, got, saved)


class Account:
    """Sums over all query rows: what every gradient's errors scale with."""

    def __init__(self, built: BuiltGradients, saved: Saved | None) -> None:
        op, d_out, d_lse = built.operands, built.d_out, built.d_lse
        self.op, self.rule, self.saved = op, RULES[op.q.dtype], saved
        self.exact: ExactGradients = reference.backward(op, d_out, d_lse, saved)
        self.scale = abs(op.weights.scale)
        self.d_nope = op.k_nope.shape[2]
        columns = op.q.shape[2]
        self.loss = max(SCORE_STEPS, columns / COLUMNS_PER_STEP) * EPS32
        # Where out is taken as it is, D is off by what fp32 arithmetic costs.
        self.d_error = 1.0 if saved is None else min(D_STEPS * EPS32 / self.rule.u, 1.0)
        heads, total_k = op.q.shape[1], op.k_nope.shape[0]
        make: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        wide = {"q": op.q.shape, "k": (total_k, heads, columns), "v": op.v.shape}
        names = ("magnitude", "deviation", "coherent", "slack")
        self.sums = {n: {w: torch.zeros(s, **make) for w, s in wide.items()} for n in names}
        self.terms = {"q": torch.zeros(op.q.shape[0], **make), "k": torch.zeros(total_k, **make)}
        self.variance = dict.fromkeys(("q", "k_nope", "k_rope", "v"), 0.0)
        self.sink_variance, self.sink_size, self.sink_slack = (
            torch.zeros(heads, **make) for _ in range(3)
        )
        self.weights: list[Tensor] = []
        for row in reference.rows(op, d_out, d_lse, saved):
            self._add(row)

    def bounds(self) -> dict[str, Bounds]:
        """By the names of what they are gradients of."""
        nope, rope = slice(self.d_nope), slice(self.d_nope, None)
        found = {
            "q": self._of("q", self.exact.q, self.terms["q"], "q"),
            "k_nope": self._of("k", self.exact.k_nope, self.terms["k"], "k_nope", nope),
            "v": self._of("v", self.exact.v, self.terms["k"], "v"),
        }
        if self.weights:
            different = _distinct(torch.cat(self.weights), self.rule.u)
            found["v"] = found["v"]._replace(carriers=different)
        if self.exact.k_rope is not None:
            per_head = self.exact.k_rope.dim() == 3
            exact = self.exact.k_rope if per_head else self.exact.k_rope[:, None]
            terms = self.terms["k"] * (1 if per_head else self.op.q.shape[1])
            whole = self._of("k", exact, terms, "k_rope", rope)
            if not per_head:
                square = whole.deviation.square().sum(1, True).sqrt()
                whole = whole._replace(
                    magnitude=whole.magnitude.sum(1, True),
                    deviation=square,
                    coherent=whole.coherent.square().sum(1, True).sqrt(),
                    slack=whole.slack.sum(1, True),
                )
            found["k_rope"] = whole
        return found

    def sink_problems(self, got: Tensor) -> list[str]:
        """d_sink is a sum over all queries, in fp32; D alone was made of rounded numbers."""
        if self.exact.sink is None:
            return ["d_sink, though there is no sink"]
        u = self.rule.u * self.d_error
        count = float(self.terms["q"].count_nonzero()) + self.op.v.shape[2]
        arithmetic = (count * EPS32 + 8 * EPS32) * self.sink_size + self.sink_slack
        likely = DEVIATIONS * ROUNDING * u * self.sink_variance.sqrt() * self._alike(self.op.v)
        bound = torch.minimum(likely, u * self.sink_size) + arithmetic + self.rule.floor
        error = (got.detach().cpu().double() - self.exact.sink).abs().nan_to_num(nan=torch.inf)
        if got.shape != self.exact.sink.shape or not bool((error > bound).any()):
            return [] if got.shape == self.exact.sink.shape else ["d_sink has another shape"]
        head = int((error / bound).argmax())
        return [
            f"d_sink: {int((error > bound).sum())} of {len(bound)} wrong; worst of head {head}: "
            f"expected {float(self.exact.sink[head]):.6g}, got {float(got[head]):.6g}, "
            f"bound {float(bound[head]):.3g}"
        ]

    def _of(
        self, which: str, exact: Tensor, terms: Tensor, name: str, part: slice = slice(None)
    ) -> Bounds:
        values = {n: found[which][..., part] for n, found in self.sums.items()}
        return Bounds(
            exact=exact,
            magnitude=values["magnitude"],
            deviation=values["deviation"].sqrt(),
            coherent=values["coherent"].sqrt() * self.d_error,
            slack=values["slack"],
            terms=terms,
            spread=self.variance[name] ** 0.5,
        )

    def _alike(self, values: Tensor) -> float:
        """How much larger deviations are where few values differ."""
        different = _distinct(values[values.isfinite()].double(), self.rule.u)
        return math.sqrt(max(min(values.numel(), 4096) / max(different, 1), 1.0))

    def _add(self, row: Row) -> None:
        """The terms of one query row."""
        scale, floor = self.scale, P_FLOOR
        q, k, d_out = row.q.abs(), row.k.abs(), row.d_out.abs()
        parts = torch.einsum("hv,nhv->hn", d_out, row.v.abs())
        parts = parts + (row.out.abs() * d_out).sum(-1, True)
        a = row.p * parts + row.p_alone * row.d_lse.abs()[:, None]
        small = floor * (parts + row.d_lse.abs()[:, None] + 1)
        sizes = torch.einsum("hd,nhd->hn", q, k).amax(-1) * scale
        score = torch.expm1((2 * self.loss * sizes).clamp(max=50.0))[:, None]
        eta = (row.out * row.d_out).norm(dim=-1)
        if self.saved is None:
            by_weights = torch.einsum("hn,nhv->hv", row.p**2, row.v**2).sqrt() * d_out
            eta = torch.hypot(eta, by_weights.norm(dim=-1))
        # Denormals of out are rounded to multiples of its smallest number.
        flushed = self.rule.floor * d_out.sum(-1) if self.saved is None else torch.zeros_like(eta)
        lost = score * a + small + row.p * flushed[:, None]

        self._add_to("magnitude", row, a * scale, k, q, row.p, d_out)
        self._add_to("deviation", row, (row.d_scores * scale) ** 2, k**2, q**2, row.p**2, d_out**2)
        self._add_to("slack", row, lost * scale, k, q, score * row.p + floor, d_out)
        self.sums["deviation"]["q"][row.row] *= self._repeated(row.d_scores)[:, None]
        self.weights.append(row.p.flatten())
        p_eta = row.p * eta[:, None] * scale
        mean_k = torch.einsum("hn,nhd->hd", p_eta, row.k)
        self.sums["coherent"]["q"][row.row] = mean_k**2
        squares = torch.einsum("hn,hd->nhd", p_eta**2, row.q**2)
        self.sums["coherent"]["k"].index_add_(0, row.keys, squares)
        self.terms["q"][row.row] = len(row.keys)
        self.terms["k"][row.keys] += 1
        self._add_variance(row, eta)
        self.sink_variance += (row.p_sink * eta) ** 2
        made_of = row.out.abs() + torch.einsum("hn,nhv->hv", row.p, row.v.abs())
        each = (made_of * d_out).sum(-1)
        size = row.p_sink * each
        self.sink_size += size
        # A weight of the sink below the smallest normal number may be 0.
        self.sink_slack += size * score[:, 0] + row.p_sink * flushed + P_FLOOR * each

    def _repeated(self, x: Tensor) -> Tensor:
        """How many times each different value of a row [H, n] occurs, on average: they round
        alike."""
        ordered = x.sort(-1).values
        steps = ordered.diff(dim=-1).abs() > self.rule.u / 8 * ordered[:, 1:].abs()
        return x.shape[1] / (1 + steps.sum(-1).double())

    def _add_to(
        self, name: str, row: Row, s: Tensor, k: Tensor, q: Tensor, p: Tensor, d_out: Tensor
    ) -> None:
        """Sums of terms of scores times k and q, and of weights times d_out."""
        sums = self.sums[name]
        sums["q"][row.row] = torch.einsum("hn,nhd->hd", s, k)
        sums["k"].index_add_(0, row.keys, torch.einsum("hn,hd->nhd", s, q))
        sums["v"].index_add_(0, row.keys, torch.einsum("hn,hv->nhv", p, d_out))

    def _add_variance(self, row: Row, eta: Tensor) -> None:
        """What roundings of dS, of D and of P in this row do to <error, exact>."""
        exact, d_nope = self.exact, self.d_nope
        moved = {"q": torch.einsum("hd,nhd->hn", exact.q[row.row], row.k)}
        nope = exact.k_nope[row.keys]
        moved["k_nope"] = torch.einsum("hd,nhd->hn", row.q[:, :d_nope], nope)
        if exact.k_rope is not None:
            rope = exact.k_rope[row.keys]
            rope = rope if rope.dim() == 3 else rope[:, None].expand(-1, len(row.q), -1)
            moved["k_rope"] = torch.einsum("hd,nhd->hn", row.q[:, d_nope:], rope)
        for name, per_score in moved.items():
            step = self.scale * per_score
            by_scores = float(((row.d_scores * step) ** 2).sum())
            by_out = float(((row.p * step).sum(-1) * eta * self.d_error).square().sum())
            self.variance[name] += by_scores + by_out
        per_weight = torch.einsum("hv,nhv->hn", row.d_out, exact.v[row.keys])
        self.variance["v"] += float(((row.p * per_weight) ** 2).sum())


class _Judgement:
    """One gradient under judgement."""

    def __init__(self, name: str, got: Tensor, bounds: Bounds, saved: bool) -> None:
        raw = got.detach().cpu()
        self.name, self.rule = name, RULES[raw.dtype]
        kind = "values" if name == "d_v" else "scores, saved" if saved else "scores"
        self.limits = LIMITS[raw.dtype][kind]
        shared = raw.dim() == 2
        self.got = (raw[:, None] if shared else raw).double()
        self.bounds, self.saved, self.problems = bounds, saved, list[str]()
        self.error = torch.zeros(())
        if self.got.shape != bounds.exact.shape:
            self.problems.append(f"{name} has shape {list(raw.shape)}")
            return
        # What the dtype cannot hold may be anything.
        held = bounds.exact.abs() < torch.finfo(raw.dtype).max / 2
        self.error = torch.where(held, (self.got - bounds.exact).abs(), 0.0)
        self.error = self.error.nan_to_num(nan=torch.inf)

    def figures(self) -> GradientFigures:
        """All measurements; problems are noted on the way."""
        if self.problems or not self.got.numel():
            return GradientFigures(0.0, 0.0, 0.0, 0.0)
        self._unseen()
        return GradientFigures(self._elements(), self._whole(), self._rows(), self._bias())

    def _unseen(self) -> None:
        """What nobody sees gets exactly +0."""
        unseen = (self.bounds.terms == 0)[:, None, None].expand_as(self.got)
        wrong = unseen & ((self.got != 0) | torch.signbit(self.got))
        if bool(wrong.any()):
            self._blame("no term at all, must be exactly +0", wrong, wrong)
        broken = ~torch.isfinite(self.error)
        if bool(broken.any()):
            self._blame("not finite", broken, broken)

    def _elements(self) -> float:
        b, u = self.bounds, self.rule.u
        roundings = 1 if self.name == "d_v" else 1 + (not self.saved or u < 2**-12)
        terms = (b.terms[:, None, None] + b.exact.shape[2]) * EPS32
        bound = u * (b.exact.abs() + b.parts) + (roundings * u + terms) * b.magnitude + b.slack
        share = self.error / (bound + self.rule.floor)
        if float(share.max()) > 1:
            self._blame("beyond the componentwise bound", share > 1, share)
        return float(share.max())

    def _scale(self, limit: float, dims: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """What an error norm is relative to, and how large it may be so."""
        b = self.bounds
        exact, deviation = dims(b.exact), dims(b.deviation)
        size = torch.maximum(exact.norm(dim=-1), deviation.norm(dim=-1))
        norm = torch.hypot(size, dims(b.coherent).norm(dim=-1)).clamp(min=1e-300)
        carriers = _carriers(torch.maximum(exact.abs(), dims(b.coherent)))
        carriers = carriers.clamp(max=min(self._distinct(), self.bounds.carriers))
        most = limit * (1 + 2 / carriers.sqrt())
        return norm, most.clamp(max=max(MOST_ROUNDINGS * self.rule.u, limit))

    def _distinct(self) -> int:
        return _distinct(self.bounds.exact, self.rule.u)

    def _whole(self) -> float:
        if float(self.bounds.magnitude.norm()) == 0:
            return 0.0
        norm, most = self._scale(self.limits.frobenius, Tensor.flatten)
        error = self.error.norm() - self.bounds.slack.norm() - self._floor(self.error.numel())
        share = max(float(error / norm), 0.0)
        if share > float(most):
            self.problems.append(
                f"{self.name}: relative Frobenius error {share:.3g}, limit {float(most):.3g}"
            )
        return share

    def _rows(self) -> float:
        norm, limit = self._scale(self.limits.row, lambda x: x)
        slack = self.bounds.slack.norm(dim=-1) + self._floor(self.error.shape[-1])
        share = (self.error.norm(dim=-1) - slack).clamp(min=0) / norm
        if bool((share > limit).any()):
            self._blame("row error too large", share > limit, share)
        return float(share.max())

    def _floor(self, values: int) -> float:
        return self.rule.floor * math.sqrt(values)

    def _bias(self) -> float:
        exact = self.bounds.exact
        largest = float(exact.abs().max())
        if largest < 2.0**-100:
            return 0.0
        scaled, energy = exact / largest, float((exact / largest).square().sum())
        error = (self.got - exact).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) / largest
        share = abs(float((error * scaled).sum()) / energy)
        rounding = float((scaled**2).norm()) + self.bounds.spread / largest**2
        different = max(self._distinct(), 1)
        alike = math.sqrt(max(int((exact != 0).sum()) / different, 1.0))
        deviation = ROUNDING * self.rule.u * rounding / energy * alike
        slack = float((self.bounds.slack + self.rule.floor).norm() / exact.norm())
        limit = self.rule.bias + DEVIATIONS * deviation + slack
        if share > limit:
            self.problems.append(
                f"{self.name}: all rows off by a share of {share:.3g}, limit {limit:.3g}"
            )
        return share / limit

    def _blame(self, what: str, wrong: Tensor, badness: Tensor) -> None:
        """Name the worst of the wrong elements (or rows)."""
        place = _argmax(torch.where(wrong, badness.double().nan_to_num(posinf=1e300), -1.0))
        row, head = place[:2]
        column = place[2] if len(place) == 3 else int(self.error[row, head].argmax())
        self.problems.append(
            f"{self.name}: {what}: {int(wrong.sum())} of {wrong.numel()}; worst at row {row}, "
            f"head {head}, column {column}: "
            f"expected {float(self.bounds.exact[row, head, column]):.6g}, "
            f"got {float(self.got[row, head, column]):.6g}"
        )
