"""Cases of gradients: a `Case` of the dense form and what comes back to its outputs.

>>> built = build_gradients(random_gradient_case(3))
>>> outcome = built.run()
>>> outcome.gradients["q"].shape == built.operands.q.shape
True
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

import openmla
from openmla.backward.operands import BackwardOperands
from openmla.backward.reference import Saved
from openmla.lab.testing.build import BuiltCase, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.draw import fit, random_case
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.values import to_dtype
from openmla.operands import DenseOperands
from openmla.problem import Backend

D_OUTS = ("normal", "small", "few", "ones")
"""small: 2^-20 of normal, as the mean of a loss leaves them; few: of one row in five alone; ones:
of `out.sum()`."""
ROPES = {"cache": "shared"}
"""Rope of a cache has no gradient."""
COST_LIMIT = 600_000
"""Multiply-adds of the forward pass; float64 references of gradients cost several times that."""


@dataclass(frozen=True)
class GradientCase:
    """One backward pass as plain data. Everything random about it follows from the case's seed."""

    case: Case
    d_out: str = "normal"
    d_lse: bool = False

    def __str__(self) -> str:
        return f"{self.case}, d_out {self.d_out}" + ", d_lse" * self.d_lse


@dataclass(frozen=True, eq=False)
class GradientOutcome:
    """What an implementation returned: the forward pass, and gradients by name."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor]

    @property
    def saved(self) -> Saved:
        """The forward pass as the backward pass knows it."""
        return Saved(self.out, self.lse)


@dataclass(frozen=True, eq=False)
class BuiltGradients:
    """A gradient case with its tensors."""

    case: GradientCase
    built: BuiltCase
    d_out: Tensor
    d_lse: Tensor | None

    @property
    def operands(self) -> DenseOperands:
        """The operands of the forward pass."""
        assert isinstance(self.built.operands, DenseOperands)
        return self.built.operands

    def backward(self, saved: Saved) -> BackwardOperands:
        """The operands of the backward pass."""
        return BackwardOperands(self.operands, saved.out, saved.lse, self.d_out, self.d_lse)

    def run(self, backend: Backend = "auto") -> GradientOutcome:
        """The public call on tensors that require gradients, and autograd's backward pass."""
        arguments: dict[str, Any] = dict(self.built.arguments)
        leaves: dict[str, Tensor] = {}
        for name in ("q", "k_nope", "k_rope", "v", "sink"):
            if arguments.get(name) is not None:
                leaves[name] = arguments[name] = arguments[name].detach().requires_grad_()
        out, lse = openmla.mla_prefill(**arguments, return_lse=True, backend=backend)
        roots, incoming = [out], [self.d_out]
        if self.d_lse is not None:
            roots, incoming = [out, lse], [self.d_out, self.d_lse]
        found = torch.autograd.grad(roots, list(leaves.values()), incoming)
        named = dict(zip(leaves, found, strict=True))
        if "k_rope" in named and self.case.case.rope == "shared_3d":
            named["k_rope"] = named["k_rope"][:, 0]
        return GradientOutcome(out.detach(), lse.detach(), named)


def build_gradients(case: GradientCase, memory: Memory | None = None) -> BuiltGradients:
    """The tensors of a case; rows that belong to no sequence keep the memory's background."""
    built = build(case.case, memory=memory)
    return BuiltGradients(case, built, *drawn_gradients(case, built))


def drawn_gradients(case: GradientCase, built: BuiltCase) -> tuple[Tensor, Tensor | None]:
    """What comes back to out and lse: (d_out, d_lse)."""
    generator = torch.Generator("cpu").manual_seed(case.case.seed + 1)
    op, total_q = built.operands, case.case.total_q
    shape = (total_q, case.case.heads, case.case.d_v)
    values = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    if case.d_out == "small":
        values = values * 2.0**-20
    elif case.d_out == "few":
        kept = torch.rand(total_q, generator=generator, device="cpu", dtype=torch.float32) < 0.2
        values = values * kept[:, None, None]
    elif case.d_out == "ones":
        values = torch.ones_like(values)
    d_out = built.memory.new((op.q.shape[0], *shape[1:]), op.q.dtype, **_gaps(case.case))
    d_out[:total_q] = to_dtype(values, op.q.dtype).to(d_out.device)
    d_lse = None
    if case.d_lse:
        d_lse = built.memory.new(op.q.shape[:2], torch.float32)
        drawn = torch.randn(shape[:2], generator=generator, device="cpu", dtype=torch.float32)
        d_lse[:total_q] = drawn.to(d_lse.device)
    return d_out, d_lse


def _gaps(case: Case) -> dict[str, bool]:
    return {"strided": case.layout == "strided", "aligned": case.layout == "aligned"}


def has_gradients(case: Case) -> bool:
    """Whether a case is of the kind that has a backward pass."""
    return case.form == "dense" and case.dtype != "e4m3"


def with_gradients(case: Case, **changed: Any) -> Case:
    """The nearest case that has them: no scales per token, no cache, an out of its own, a head of K
    for each of q."""
    rope = ROPES.get(case.rope, case.rope)
    plain = replace(case, q_scale=False, k_scale=False, rope=rope, return_lse=True)
    plain = replace(plain, out="fresh", fp32_out=False, group=1)
    # Values up to 2^100 make gradients of scores that fp32 does not hold.
    values = "normal" if plain.values == "large" else plain.values
    return fit(replace(plain, values=values, **changed), COST_LIMIT)


def random_gradient_case(seed: int) -> GradientCase:
    """The gradient case number `seed`."""
    rng = random.Random(f"gradients {seed}")
    case = next(found for found in _dense_cases(rng.randrange(2**31)))
    d_out = rng.choices(D_OUTS, weights=(6, 2, 1, 1))[0]
    return GradientCase(replace(with_gradients(case), seed=seed), d_out, rng.random() < 0.4)


def _dense_cases(first: int) -> Iterator[Case]:
    for seed in count(first):
        case = random_case(seed)
        if has_gradients(case):
            yield case
