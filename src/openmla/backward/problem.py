"""`BackwardProblem`: the backward pass of one attention call, as plain data for the planner.

>>> forward = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512)
>>> print(BackwardProblem.of(forward))
backward of dense bf16, 16 heads, d_nope 128 + d_rope 64 -> d_v 128, 512 queries x 0 keys, \
1 sequence, causal
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from openmla.problem import Problem


@dataclass(frozen=True, slots=True)
class BackwardProblem(Problem):
    """Gradients of an attention call: all that the call is, and what comes in besides."""

    has_d_lse: bool = False
    """Whether a gradient of lse comes in, beside that of out."""

    @staticmethod
    def of(forward: Problem, has_d_lse: bool = False) -> BackwardProblem:
        """The backward pass of a call, which always has the lse, whether its caller does or not."""
        given = {f.name: getattr(forward, f.name) for f in fields(Problem)}
        return BackwardProblem(**{**given, "wants_lse": True}, has_d_lse=has_d_lse)

    @property
    def flops(self) -> int:
        """Upper bound of the work of five products, 2 flops each: scores, dP, dQ, dK and dV."""
        pairs = self.heads * self.total_q * self.total_k
        return 2 * pairs * (3 * self.d_qk + 2 * self.d_v)

    def __str__(self) -> str:
        text = Problem.__str__(self).removesuffix(", lse")
        return f"backward of {text}" + ", gradient of lse" * self.has_d_lse
