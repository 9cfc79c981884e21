"""`BackwardProblem`: the backward pass of one attention call, as plain data for the planner.

>>> forward = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512)
>>> print(BackwardProblem.of(forward))
backward of dense bf16, 16 heads, d_nope 128 + d_rope 64 -> d_v 128, 512 queries x 0 keys, \
1 sequence, causal
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from openmla.arithmetic import Limit
from openmla.errors import InvalidArgument, Unsupported
from openmla.problem import Problem

BackwardForm = Literal["dense_backward", "sparse_backward"]
BACKWARD_FORM: BackwardForm = "dense_backward"
"""The planner's name for gradients of the dense form."""
SPARSE_BACKWARD_FORM: BackwardForm = "sparse_backward"
"""Its name for gradients of the sparse form."""
BACKWARD_FORMS = (BACKWARD_FORM, SPARSE_BACKWARD_FORM)
_SUFFIX = "_backward"


@dataclass(frozen=True, slots=True)
class BackwardProblem(Problem):
    """Gradients of an attention call: all that the call is, and what comes in besides."""

    form: BackwardForm  # type: ignore[assignment]  # one more form of the planner
    has_d_lse: bool = False
    """Whether a gradient of lse comes in, beside that of out."""

    def __post_init__(self) -> None:
        if self.form not in BACKWARD_FORMS:
            raise InvalidArgument("form", " or ".join(BACKWARD_FORMS), repr(self.form))
        if not isinstance(self.has_d_lse, bool):
            raise InvalidArgument("has_d_lse", "True or False", repr(self.has_d_lse))
        for name, value in _fields_of(self.forward).items():
            if name != "form":
                object.__setattr__(self, name, value)

    @staticmethod
    def of(forward: Problem, has_d_lse: bool = False) -> BackwardProblem:
        """The backward pass of a call, which always has the lse, whether its caller does or not."""
        form = forward.form + _SUFFIX
        if form not in BACKWARD_FORMS:
            raise Unsupported(
                f"the {forward.form} form has no backward pass, dense and sparse have one",
                nearest="the same call under torch.no_grad()",
            )
        changed = {"form": form, "wants_lse": True, "has_d_lse": has_d_lse}
        return BackwardProblem(**{**_fields_of(forward), **changed})

    @property
    def forward(self) -> Problem:
        """The call that this is the backward pass of; its checks are those of this one."""
        return Problem(**{**_fields_of(self), "form": self.form.removesuffix(_SUFFIX)})

    @property
    def flops(self) -> int:
        """Upper bound of the work of five products, 2 flops each: scores, dP, dQ, dK and dV."""
        keys = self.total_k if self.form == BACKWARD_FORM else self.most_rows
        pairs = self.heads * self.total_q * keys
        return 2 * pairs * (3 * self.d_qk + 2 * self.d_v)

    def __str__(self) -> str:
        text = str(self.forward).removesuffix(", lse")
        return f"backward of {text}" + ", gradient of lse" * self.has_d_lse


def _fields_of(problem: Problem) -> dict[str, Any]:
    """What a problem of attention has, by name."""
    return {f.name: getattr(problem, f.name) for f in fields(Problem)}


# With a sink, lse and what weights are relative to differ by any amount: one delta would not hold
# both.
ONE_DELTA: Limit[BackwardProblem] = Limit(
    lambda p: not (p.has_sink and p.has_d_lse),
    lambda p: "a sink beside a gradient of lse: the portable kernels have it",
)
"""What kernels refuse that keep one delta of a query row."""
