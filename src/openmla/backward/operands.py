"""The tensors of one backward pass, as kernels receive them.

Gradients are allocated by the caller; a kernel writes every element of those that are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openmla.backward.problem import BackwardProblem
from openmla.operands import DenseOperands, Results, aligned_16, same_offsets


@dataclass(frozen=True, eq=False)
class BackwardOperands:
    """What the forward pass read and wrote, and the gradients of what it wrote."""

    forward: DenseOperands
    out: Tensor
    """[total_q, H, d_v], as it was rounded."""
    lse: Tensor
    """float32 [total_q, H], without the sink."""
    d_out: Tensor
    """Gradient of out, in its dtype; elements of a row are contiguous."""
    d_lse: Tensor | None = None
    """Gradient of lse, float32 [total_q, H]."""

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.forward.q.device

    def seen_d_out(self) -> Tensor:
        """d_out, but 0 in rows that see no key: a key pass multiplies all rows of a block, and 0 x
        NaN would reach keys. Where queries and keys have the same offsets and no key is masked, all
        rows see one."""
        op = self.forward
        all_see = not op.causal or same_offsets(op.cu_seqlens_q, op.cu_seqlens_k)
        if op.key_mask is None and all_see:
            return self.d_out
        blind = (self.lse == -torch.inf)[..., None]
        return torch.where(blind, self.d_out.new_zeros(()), self.d_out)

    def problem(self, gradients: Any = None) -> BackwardProblem:
        """This pass without its tensors, whichever gradients are wanted of it."""
        forward = self.forward.problem(Results(self.out, self.lse))
        return BackwardProblem.of(forward, self.d_lse is not None)


class Wanted(NamedTuple):
    """Which gradients somebody asks for."""

    q: bool = True
    kv: bool = True
    """The gradients of k_nope, k_rope and v, which one kernel computes together."""
    sink: bool = True


EVERY = Wanted()


@dataclass(frozen=True, eq=False)
class Gradients:
    """Where a kernel writes. What is not wanted is None."""

    q: Tensor | None
    """[total_q, H, d_qk]"""
    kv: Tensor | None
    """[total_k, H, d_nope + d_v]: those of k_nope and v side by side, as one projection makes
    them, so that its backward pass reads one tensor."""
    k_rope: Tensor | None
    """[total_k, d_rope], summed over the heads, or [total_k, H, d_rope]; as k_rope is."""
    sink: Tensor | None
    """float32 [H]"""
    d_nope: int
    """Columns of k_nope in kv."""

    @staticmethod
    def allocate(op: DenseOperands, wanted: Wanted = EVERY) -> Gradients:
        """Uninitialized tensors, contiguous."""
        total_k, heads, d_nope = op.k_nope.shape
        rope, sink = op.k_rope, op.weights.sink
        has_rope, has_sink = wanted.kv and rope is not None, wanted.sink and sink is not None
        return Gradients(
            q=op.q.new_empty(op.q.shape) if wanted.q else None,
            kv=op.v.new_empty(total_k, heads, d_nope + op.v.shape[2]) if wanted.kv else None,
            k_rope=rope.new_empty(rope.shape) if has_rope and rope is not None else None,
            sink=sink.new_empty(sink.shape) if has_sink and sink is not None else None,
            d_nope=d_nope,
        )

    @property
    def k_nope(self) -> Tensor | None:
        """[total_k, H, d_nope], a part of kv."""
        return None if self.kv is None else self.kv[..., : self.d_nope]

    @property
    def v(self) -> Tensor | None:
        """[total_k, H, d_v], the other part of kv."""
        return None if self.kv is None else self.kv[..., self.d_nope :]

    def tensors(self) -> dict[str, Tensor]:
        """The gradients that are wanted, by the names of what they are gradients of."""
        names = ("q", "k_nope", "k_rope", "v", "sink")
        found = {name: getattr(self, name) for name in names}
        return {name: x for name, x in found.items() if x is not None}

    def clear(self) -> None:
        """Make every element +0: the gradient of what nobody sees."""
        for x in (self.q, self.kv, self.k_rope, self.sink):
            if x is not None:
                x.zero_()


def copyable(x: Tensor) -> Tensor:
    """A tensor that copies of 16 bytes can read: its own, unless strides or its address forbid."""
    return x if aligned_16(x) else x.contiguous() if not x.is_contiguous() else x.clone()
