"""`LossProblem`: the loss that trains an indexer, or its gradients, as plain data for the planner.

>>> dense = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512)
>>> print(LossProblem.of(dense, index_heads=64, index_dim=128))
loss of an indexer of 64 heads, 128 wide, of dense bf16, 16 heads, d_nope 128 + d_rope 64 -> \
d_v 128, 512 queries x 0 keys, 1 sequence, causal
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from openmla.errors import InvalidArgument
from openmla.problem import MAX_HEADS, Problem

LossForm = Literal["index_loss"]
LOSS_FORM: LossForm = "index_loss"
"""The planner's name for the loss of an indexer."""


@dataclass(frozen=True, slots=True)
class LossProblem(Problem):
    """How far an indexer's scores are from what attention, a dense call, looked at."""

    form: LossForm  # type: ignore[assignment]  # one more form of the planner
    index_heads: int = 1
    index_dim: int = 1
    """Columns of the indexer's queries and keys."""
    wants_gradients: bool = False
    """Whether gradients are computed, not the loss itself."""

    def __post_init__(self) -> None:
        if self.form != LOSS_FORM:
            raise InvalidArgument("form", LOSS_FORM, repr(self.form))
        if not isinstance(self.wants_gradients, bool):
            raise InvalidArgument("wants_gradients", "True or False", repr(self.wants_gradients))
        if type(self.index_heads) is not int or not 1 <= self.index_heads <= MAX_HEADS:
            raise InvalidArgument("index_heads", f"1 to {MAX_HEADS}", self.index_heads)
        if type(self.index_dim) is not int or self.index_dim < 1:
            raise InvalidArgument("index_dim", "1 or more", self.index_dim)
        for name, value in _fields_of(self.attention).items():
            if name != "form":
                object.__setattr__(self, name, value)

    @staticmethod
    def of(
        attention: Problem, index_heads: int, index_dim: int, wants_gradients: bool = False
    ) -> LossProblem:
        """The loss against a dense call, whose lse is known."""
        values = {**_fields_of(attention), "form": LOSS_FORM, "wants_lse": True}
        values |= {"index_heads": index_heads, "index_dim": index_dim}
        return LossProblem(**values, wants_gradients=wants_gradients)

    @property
    def attention(self) -> Problem:
        """The call that the indexer is to follow; its checks are those of this one."""
        return Problem(**{**_fields_of(self), "form": "dense"})

    @property
    def flops(self) -> int:
        """Upper bound of the products: attention's scores, the indexer's, and their gradients."""
        pairs, index = self.total_q * self.total_k, self.index_heads * self.index_dim
        return 2 * pairs * (self.heads * self.d_qk + index * (3 if self.wants_gradients else 1))

    def __str__(self) -> str:
        text = str(self.attention).removesuffix(", lse")
        what = "gradients of the loss" if self.wants_gradients else "loss"
        return f"{what} of an indexer of {self.index_heads} heads, {self.index_dim} wide, of {text}"


def _fields_of(problem: Problem) -> dict[str, Any]:
    """What a problem of attention has, by name."""
    return {f.name: getattr(problem, f.name) for f in fields(Problem)}
