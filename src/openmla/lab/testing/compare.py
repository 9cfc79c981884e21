"""The acceptance rule: is a result as accurate as its dtype allows?

Judged against the float64 reference. With u the unit roundoff of the output dtype, n the keys of a
row and eps = 2^-23, every element must satisfy

    |out - truth| <= u |truth| + (u + n eps + score) * sum(p |v|) + floor + p_floor * sum|v| / l

where `score` = expm1(2 delta), delta = max(8, d_qk / 16) eps * (largest scale * sum|q||k| of the
row): what fp32 arithmetic of scores may legally cost, negligible until scores reach hundreds.
Tensor cores add 16 columns at a time and cut off what does not fit: on an H200 scores of 500 over
896 columns, all of one sign, are 46 eps too small. On a GPU, products of e4m3 queries and keys may
be summed as its tensor cores do, which add 32 columns at a time and cut all of them off 13 places
below the sum so far: delta grows by 2^-14 of the same sum for every 32 columns, and for lse, which
all scores move the same way, in the n-th 32 columns by n times that. `floor` is what denormals of
the output may cost. The last term is what small weights may: a kernel holds them as P = exp(s - m),
1 for the largest score m, and divides by their sum l. Rounded to fp16 a P has a relative error u
down to 2^-14; below, the error is 2^-25 whatever P is, and below 2^-25 P becomes 0 (`p_floor`; in
bf16 and fp32 that happens at 2^-126). Four keys with P = 1, 2^-20, 2^-21, 2^-26 and v = 2^-14, 1,
1, 1: out is 6.2e-5, for which the terms with u allow 6.1e-8, and the rounding of the three small
weights may cost 3 * 2^-25 = 8.9e-8. P has the dtype of V, which may be fp16 where the output is
bf16: beside e4m3 queries. Where a kernel is known to round weights for e4m3 values to e4m3 as well,
the u of the second term is theirs, 2^-4. Beside an fp32 output of narrower inputs the u of the
first term is fp32's, and the second keeps that of the inputs (`rule_of_fp32`); and no row may
consist of numbers of the narrower type where the truth lies between such numbers, which is what an
output rounded to it on its way looks like.

That is an upper bound, and an upper bound alone misses small errors in every element, so more is
bounded as well (limits in `Rule`), beyond what `score` and the floors allow:

    all elements together, in the Frobenius norm
    the worst row of one head
    the bias: how much larger or smaller than the truth all rows are, which rounding is not
    lse, within 4e-6 * max(1, |lse|) + delta; max_logits likewise

Norms are relative to the truth, or to its deviation sqrt(sum((p v)^2)) where that is larger: the
errors of P are independent, about 0.41 u p each, so they add up to 0.41 u times the deviation,
however small the sum of p v is that cancelling values leave. A row of many columns has a norm of
about its deviation; one of a single column (d_v = 1) may be anything below it. A norm over few
values is noisy: its limit is widened by 1 + 2/sqrt(values that carry it), up to 2u (for a single
value 2u of truth and deviation together: 5 standard deviations); equal values and nearly equal
ones, which round alike, count as one.
Rows without a key must be exactly +0 and -inf. NaN and Inf in what a row uses: where the truth is
not finite the result must not be, and where it is finite the result must be (which of NaN and Inf
it is, weights too small for their dtype decide; Inf times a weight of exactly 0 may be either, and
so may a row whose scores are all -inf, or NaN at a scale of 0); lse likewise. Where every number is
exactly representable (`exact`), rows of 2^n keys must match bit for bit. Where an eager result of
the same dtype is given, the error may be at most 1.1 times its error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from openmla.checks import out_dtype
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.operands import DenseOperands
from openmla.reference import Truth

EPS32 = 2.0**-23
SCORE_STEPS, COLUMNS_PER_STEP = 8, 16
FP8_KEPT, FP8_COLUMNS_PER_STEP = 2.0**-14, 32
EAGER_LIMIT = 1.1


@dataclass(frozen=True, slots=True)
class Rule:
    """Limits for one output dtype."""

    u: float
    """Unit roundoff: bf16 keeps 8 bits, so 2^-8."""
    frobenius: float
    row: float
    bias: float
    """For infinitely many rows; for R rows, 2.6 u / sqrt(R) more (6 standard deviations)."""
    floor: float
    """Absolute error that flushed or rounded denormals of the output may cost."""
    p_floor: float = 2.0**-126
    """Absolute error of a weight (the largest is 1): it may be flushed below 2^-126."""
    lse: float = 4e-6
    p: float = 0.0
    """Unit roundoff of P where that is larger."""
    alike: float = 0.0
    """Unit roundoff by which values round alike, where it is not that of the output."""


# bf16 and fp16: the limits were set against simulated kernels that round P to the same dtype (worst
# correct bf16 figures 2.3e-3 and 3.6e-3); fp16 rows scale with u. fp32: u is 16 roundoffs, for the
# exponential, the products that rescale, and sums of a thousand terms that cancel. Measured
# 2026-11-15, CPU path: at most 0.50 of the bound and 0.23 of the lse limit in random_case(0 … 2999)
# and (100000 … 111999); worst row of the former 3.9e-3 (bf16), 4.8e-4 (fp16), 3.7e-7 (fp32).
RULES = {
    torch.bfloat16: Rule(u=2.0**-8, frobenius=3.0e-3, row=6.0e-3, bias=4.0e-4, floor=2.0**-124),
    torch.float16: Rule(
        u=2.0**-11, frobenius=4.0e-4, row=7.5e-4, bias=5.0e-5, floor=2.0**-24, p_floor=2.0**-25
    ),
    torch.float32: Rule(u=2.0**-20, frobenius=1.0e-6, row=1.8e-6, bias=1.0e-6, floor=2.0**-124),
}

# Weights of e4m3, which end at 2^-9 and of which a row's largest is 2^4 or more. Sums of FP8
# products over the keys of a step are cut off: on an H200, of 128 values of one sign, 2.5e-3.
FP8_WEIGHTS = replace(
    RULES[torch.bfloat16],
    p=2.0**-4,
    frobenius=3.0e-2,
    row=6.0e-2,
    bias=5.0e-3,
    p_floor=2.0**-14,
)


HALF_AS_MANY = 0.5**0.5
NARROW = {2.0**-8: torch.bfloat16, 2.0**-11: torch.float16}
"""The type of a unit roundoff."""
FLUSHED = 2.0**-100
"""Smaller numbers are 0 or denormals on their way, which are of every type."""
ENOUGH_BETWEEN = 16
"""So many numbers of a row are not all of a narrower type by chance: one is in 2^16, or in 2^13."""


def rule_of_fp32(narrow: Rule) -> Rule:
    """The rule of an fp32 output beside inputs that `narrow` is the rule of.

    P is rounded as ever, the output is not: of two errors of one size one is left, and norms, in
    which both are independent, lose a factor of sqrt(2).
    """
    fp32 = RULES[torch.float32]
    return replace(
        fp32,
        p=narrow.u,
        alike=narrow.u,
        frobenius=narrow.frobenius * HALF_AS_MANY,
        row=narrow.row * HALF_AS_MANY,
        bias=narrow.bias,
        p_floor=narrow.p_floor,
    )


@dataclass(frozen=True)
class Verdict:
    """What was measured, and what was wrong, worst first."""

    ok: bool
    bound: float
    """Largest error as a share of its componentwise bound: at most 1."""
    frobenius: float
    worst_row: float
    bias: float
    lse: float
    """Largest lse error as a share of its limit."""
    eager: float | None = None
    """Error over eager's error, where one was given."""
    problems: tuple[str, ...] = field(default=())

    def report(self) -> str:
        """Readable: the verdict, the figures, and where it went wrong."""
        figures = (
            f"bound {self.bound:.3g}, frobenius {self.frobenius:.3g}, "
            f"worst row {self.worst_row:.3g}, bias {self.bias:.3g}, "
            f"lse {self.lse:.3g} of its limit"
        )
        if self.eager is not None:
            figures += f", {self.eager:.3g} x eager error"
        lines = ["accepted" if self.ok else "REJECTED", f"  figures: {figures}"]
        return "\n".join(lines + [f"  {problem}" for problem in self.problems])


def judge(
    built: BuiltCase,
    outcome: Outcome,
    eager: Tensor | None = None,
    *,
    fp8_sums: bool | None = None,
    fp8_weights: bool = False,
) -> Verdict:
    """`compare` for a built case. `fp8_sums`: whether FP8 products were summed as tensor cores do
    (None: on a GPU); `fp8_weights`: whether weights were rounded to e4m3, as V is."""
    rule = RULES[out_dtype(built.operands.q.dtype)]
    if outcome.out.dtype == torch.float32 != built.operands.q.dtype:
        rule = rule_of_fp32(rule)
    if fp8_weights:
        rule = FP8_WEIGHTS
    elif isinstance(built.operands, DenseOperands) and built.operands.v.dtype == torch.float16:
        rule = replace(rule, p_floor=RULES[torch.float16].p_floor)
    return compare(
        outcome,
        built.truth(),
        fp8_columns=_fp8_columns(built, fp8_sums),
        exact=built.is_exact,
        eager=eager,
        rule=rule,
        columns=built.case.d_qk,
        describe_row=built.describe_row,
    )


def _fp8_columns(built: BuiltCase, fp8_sums: bool | None) -> int:
    """Columns whose products may have been summed by the tensor cores' rules for FP8."""
    op = built.operands
    is_fp8 = op.q.dtype == torch.float8_e4m3fn
    summed = op.q.is_cuda if fp8_sums is None else fp8_sums
    return built.case.d_qk if is_fp8 and summed else 0


def compare(
    outcome: Outcome,
    truth: Truth,
    *,
    exact: bool = False,
    eager: Tensor | None = None,
    rule: Rule | None = None,
    columns: int = 0,
    fp8_columns: int = 0,
    describe_row: Callable[[int], str] = lambda row: "",
) -> Verdict:
    """Judge a result. `rule` defaults to that of the output dtype; `columns` are those of Q, and
    `fp8_columns` those multiplied as FP8."""
    out = outcome.out.detach().cpu()
    steps = max(SCORE_STEPS, columns / COLUMNS_PER_STEP) * EPS32
    groups = fp8_columns / FP8_COLUMNS_PER_STEP
    losses = steps + groups * FP8_KEPT, steps + groups * (groups + 1) / 2 * FP8_KEPT
    judgement = _Judgement(out, truth, rule or RULES[out.dtype], describe_row, losses)
    if out.shape != truth.out.shape:
        problem = f"out has shape {list(out.shape)}, expected {list(truth.out.shape)}"
        inf = torch.inf
        return Verdict(False, inf, inf, inf, inf, inf, None, (problem,))
    judgement.anomalies()
    bound = judgement.elements()
    frobenius, worst_row, bias = judgement.whole(), judgement.rows(), judgement.bias()
    if exact:
        judgement.exact()
    if judgement.rule.alike:
        judgement.rounded_before(NARROW[judgement.rule.alike])
    lse = 0.0
    if outcome.lse is not None:
        lse = judgement.per_row("lse", outcome.lse, truth.lse)
    if outcome.max_logits is not None:
        lse = max(lse, judgement.per_row("max_logits", outcome.max_logits, truth.max_logits))
    ratio = None if eager is None else judgement.against(eager)
    problems = tuple(judgement.problems)
    return Verdict(not problems, bound, frobenius, worst_row, bias, lse, ratio, problems)


def _without(truth: Truth, lost: Tensor) -> Truth:
    """The truth with zeros for elements that are not finite, and for what bounds their errors."""
    if not bool(lost.any()):
        return truth
    names = ("out", "magnitude", "deviation", "total_v")
    kept = {name: torch.where(lost, 0.0, getattr(truth, name)) for name in names}
    return replace(truth, **kept)


class _Judgement:
    """One comparison under way: error, slack and the problems found so far."""

    def __init__(
        self,
        out: Tensor,
        truth: Truth,
        rule: Rule,
        describe_row: Callable[[int], str],
        losses: tuple[float, float],
    ) -> None:
        """losses: of out and of lse, as shares of the largest sum of |q||k| of a row."""
        self.raw, self.truth, self.rule, self.describe_row = out, truth, rule, describe_row
        self.p = max(rule.u, rule.p)
        self.problems: list[str] = []
        if out.shape != truth.out.shape:
            return
        self.lost = ~truth.out.isfinite()
        """Elements of which the truth is NaN or Inf. They are judged by that alone."""
        truth = self.truth = _without(truth, self.lost)
        self.out = torch.where(self.lost, 0.0, out.double())
        self.error = (self.out - truth.out).abs().nan_to_num(nan=torch.inf)
        delta, self.lse_delta = (loss * truth.score_magnitude for loss in losses)
        score = torch.expm1((2 * delta).clamp(max=50.0))
        self.distinct = _distinct(truth.out, rule.alike or rule.u)
        # The row sum in units of the largest weight: at least 1, and n where all weights are equal.
        row_sum = torch.exp(truth.lse - truth.max_logits).nan_to_num(nan=1.0).clamp(min=1)
        small = rule.p_floor * truth.total_v / row_sum[..., None]
        self.slack = score[..., None] * truth.magnitude + rule.floor + small

    def anomalies(self) -> None:
        """Empty rows exactly +0; NaN or Inf where the truth is not finite, and nowhere else."""
        kept = self.lost & ~self.truth.unsettled & self.raw.isfinite()
        if bool(kept.any()):
            self._blame("finite, though what it is made of is not", kept, kept)
        wrong = ~torch.isfinite(self.out)
        if bool(wrong.any()):
            self._blame("not finite", wrong, wrong)
        empty = (self.truth.keys == 0)[:, None, None].expand_as(self.out)
        marked = empty & ((self.out != 0) | torch.signbit(self.out))
        if bool(marked.any()):
            self._blame("row sees no key, must be exactly +0", marked, marked)

    def elements(self) -> float:
        """The componentwise bound."""
        rule, truth = self.rule, self.truth
        rounding = self.p + truth.keys.double()[:, None, None] * EPS32
        bound = rule.u * truth.out.abs() + rounding * truth.magnitude + self.slack
        share = self.error / bound
        if not share.numel():
            return 0.0
        if float(share.max()) > 1:
            self._blame("beyond the componentwise bound", share > 1, share, bound)
        return float(share.max())

    def whole(self) -> float:
        """Relative Frobenius error."""
        truth = self.truth
        if not self.out.numel() or float(truth.magnitude.norm()) == 0:
            return 0.0
        carriers = _carriers(truth.out.flatten()).clamp(max=self.distinct)
        norm, most = self._scale(
            self.rule.frobenius, carriers, truth.out.flatten(), truth.deviation.flatten()
        )
        share, limit = max(float((self.error.norm() - self.slack.norm()) / norm), 0.0), float(most)
        if share > limit:
            self.problems.append(f"relative Frobenius error {share:.3g}, limit {limit:.3g}")
        return share

    def rows(self) -> float:
        """Worst relative error of a row of one head, against what rounding can do to it."""
        if not self.out.numel():
            return 0.0
        truth, carriers = self.truth, _carriers(self.truth.out)
        norm, limit = self._scale(self.rule.row, carriers, truth.out, truth.deviation)
        error, slack = self.error.norm(dim=-1), self.slack.norm(dim=-1)
        share = (error - slack).clamp(min=0) / norm
        if bool((share > limit).any()):
            self._blame("row error too large", share > limit, share)
        return float(share.max())

    def rounded_before(self, narrow: torch.dtype) -> None:
        """An fp32 output holds what was computed, not numbers of the inputs' type. Of a row those
        elements tell whose truth is not near such a number; rows of few are taken together."""
        if not self.out.numel():
            return
        truth = self.truth.out
        near = (truth - truth.to(narrow).double()).abs() <= self.rule.alike / 16 * truth.abs()
        tells = ~near & ~self.lost & self.raw.isfinite() & (self.raw.abs() > FLUSHED)
        fits = self.raw.to(narrow).to(self.raw.dtype) == self.raw
        every = (fits | ~tells).all(dim=-1) & (tells.sum(dim=-1) >= ENOUGH_BETWEEN)
        if int(tells.sum()) >= ENOUGH_BETWEEN and bool(fits[tells].all()):
            every = every | tells.any(dim=-1)
        if bool(every.any()):
            what = f"rounded to {str(narrow).removeprefix('torch.')} before it was fp32"
            self._blame(what, every, every)

    def bias(self) -> float:
        """The factor b that explains out = (1 + b) truth best; rounding to nearest has none."""
        truth = self.truth.out
        scale = truth.abs().amax().clamp(min=1e-300) if truth.numel() else truth.new_ones(())
        scaled = truth / scale  # squares must stay inside float64's range
        energy = (scaled**2).sum(dim=-1)
        if not truth.numel() or float(energy.sum()) == 0 or not bool(self.error.isfinite().all()):
            return 0.0
        share = float((scaled * ((self.out - truth) / scale)).sum() / energy.sum())
        alike = self.distinct / max(int((truth != 0).sum()), 1)
        rows = max(float(_carriers(energy.sqrt().flatten())) * alike, 1.0)
        # However many rows, over a handful of keys they are all made of the same few values.
        rows = min(rows, max(int(self.truth.keys.max()), 1) * truth.shape[1])
        # Where values cancel, what is left is small beside the rounding errors of P.
        cancelled = (scaled * self.truth.deviation / scale).norm() ** 2 / (energy**2).sum()
        allowed = self.rule.bias + 2.6 * self.p * (max(1.0, float(cancelled)) / rows) ** 0.5
        limit = allowed + float(self.slack.norm() / truth.norm())
        if abs(share) > limit:
            self.problems.append(f"all rows off by a factor of {1 + share:.6f}, limit {limit:.3g}")
        return abs(share)

    def exact(self) -> None:
        """Rows over 2^n keys, where nothing can round: bit for bit."""
        keys = self.truth.keys
        rows = (keys > 0) & ((keys & (keys - 1)) == 0)
        # The sum of a row is a multiple of 2^-12; the reference is off it by float64 rounding.
        count = keys.clamp(min=1).double()[:, None, None] * 2.0**12
        expected = ((self.truth.out * count).round() / count).to(self.raw.dtype)
        wrong = (self.raw != expected) & rows[:, None, None]
        if bool(wrong.any()):
            self._blame("must be exact: every number is representable", wrong, self.error)

    def per_row(self, name: str, got: Tensor, expected: Tensor) -> float:
        """lse or max_logits: -inf exactly where the truth says so, close elsewhere. The largest of
        scores of which some are NaN may be any."""
        got = got.detach().cpu().double()
        if got.shape != expected.shape or not got.numel():
            if got.shape != expected.shape:
                self.problems.append(f"{name} has shape {list(got.shape)}")
            return 0.0
        lost = expected.isnan() | (expected == torch.inf)
        if name == "lse":  # of keys whose scores are all -inf
            lost |= (expected == -torch.inf) & (self.truth.keys > 0)[:, None]
        settled = ~(expected.isnan() & self.truth.unsettled.all(-1))  # a scale of 0
        kept = lost & settled & got.isfinite() if name == "lse" else torch.zeros_like(lost)
        if bool(kept.any()):
            self.problems.append(f"{name}: {int(kept.sum())} finite, though scores are not")
        got, expected = torch.where(lost, 0.0, got), torch.where(lost, 0.0, expected)
        empty = expected == -torch.inf
        error = torch.where(empty, (got != expected).double() * torch.inf, (got - expected).abs())
        error = error.nan_to_num(nan=0.0 if bool(empty.all()) else torch.inf)
        error = torch.where(empty & (got == -torch.inf), 0.0, error)
        limit = self.rule.lse * expected.abs().nan_to_num(posinf=1.0).clamp(min=1) + self.lse_delta
        share = error / limit
        if float(share.max()) > 1:
            row, head = _argmax(share)
            want, came, most = (float(t[row, head]) for t in (expected, got, limit))
            self.problems.append(
                f"{name}: {int((share > 1).sum())} of {share.numel()} wrong; worst at row {row} "
                f"({self.describe_row(row)}), head {head}: expected {want:.9g}, got {came:.9g}, "
                f"limit {most:.3g}"
            )
        return float(share.max())

    def against(self, eager: Tensor) -> float:
        """Our error over eager's, both against the truth."""
        theirs = float((eager.detach().cpu().double() - self.truth.out).norm())
        ratio = float(self.error.norm()) / max(theirs, 1e-300)
        if float(self.error.norm()) > EAGER_LIMIT * theirs + float(self.slack.norm()):
            self.problems.append(f"error {ratio:.3g} x that of eager, limit {EAGER_LIMIT}")
        return ratio

    def _scale(
        self, limit: float, carriers: Tensor, out: Tensor, deviation: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What an error norm along the last dim is relative to, and how large it may be so."""
        sizes = out.norm(dim=-1), deviation.norm(dim=-1)
        norm = torch.maximum(*sizes).clamp(min=1e-300)
        # The rounding of the output and that of P may be at their worst together in one value.
        both = 1 + (torch.hypot(*sizes) / norm - 1).clamp(min=0) / carriers
        return norm, torch.minimum(limit * (1 + 2 / carriers.sqrt()), 2 * self.p * both)

    def _blame(
        self, what: str, wrong: Tensor, badness: Tensor, bound: Tensor | None = None
    ) -> None:
        """Name the worst of the wrong elements (or rows)."""
        place = _argmax(torch.where(wrong, badness.double().nan_to_num(posinf=1e300), -1.0))
        row, head = place[:2]
        column = place[2] if len(place) == 3 else int(self.error[row, head].argmax())
        text = (
            f"{what}: {int(wrong.sum())} of {wrong.numel()}; worst at row {row} "
            f"({self.describe_row(row)}), head {head}, column {column}: "
            f"expected {float(self.truth.out[row, head, column]):.6g}, "
            f"got {float(self.out[row, head, column]):.6g}"
        )
        if bound is not None:
            text += f", bound {float(bound[row, head, column]):.3g}"
        self.problems.append(text)


def _carriers(values: Tensor) -> Tensor:
    """How many values carry the norm along the last dim: (sum x^2)^2 / sum x^4, at least 1.

    >>> _carriers(torch.tensor([1.0, 1.0, 1.0, 0.0]).double()), _carriers(torch.zeros(4).double())
    (tensor(3., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    # Scaled to 1 first: squares of the smallest and largest numbers leave even float64's range.
    scaled = values / values.abs().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    squares = scaled**2
    spread = squares.sum(-1) ** 2 / (squares**2).sum(-1).clamp(min=1e-300)
    return spread.clamp(min=1)


def _distinct(values: Tensor, u: float) -> int:
    """How many values differ by more than u/8: closer ones round alike, so they count as one.

    >>> _distinct(torch.tensor([1.0, -1.0, 0.5, 0.5 + 1e-6, 0.0]).double(), u=2.0**-8)
    2
    """
    mantissa, exponent = torch.frexp(values[values != 0].abs())
    bins = (mantissa * (16 / u)).round() + exponent.double() * (16 / u)
    kinds: Tensor = bins.unique()  # type: ignore[no-untyped-call]
    return max(kinds.numel(), 1)


def _argmax(values: Tensor) -> tuple[int, ...]:
    flat = int(values.flatten().argmax())
    return tuple(
        int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), values.shape)
    )
