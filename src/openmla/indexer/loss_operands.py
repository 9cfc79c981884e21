"""The tensors of an indexer's loss, and of its gradients, as kernels receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from openmla.indexer.loss_problem import LossProblem
from openmla.operands import DenseOperands, Results


@dataclass(frozen=True, eq=False)
class LossOperands:
    """An indexer's queries and keys, and the attention that it is to follow."""

    index_q: Tensor
    """[total_q, index heads, width]"""
    index_k: Tensor
    """[total_k, width]"""
    index_weights: Tensor
    """float32 [total_q, index heads]: a score is sum over heads of weight * relu(q . k)."""
    attention: DenseOperands
    """What attention read: queries, keys, sequences, mask, scale and sink. Nobody reads its v."""
    lse: Tensor
    """float32 [total_q, H], of that attention, without the sink."""
    d_loss: Tensor | None = None
    """float32 [total_q]: what comes back to the rows of the loss; None: the loss is asked for."""

    @property
    def device(self) -> torch.device:
        """Where all of them are."""
        return self.index_q.device

    def problem(self, results: Any = None) -> LossProblem:
        """This call without its tensors."""
        dense = self.attention.problem(Results(self.attention.q, self.lse))
        heads, width = self.index_q.shape[1:]
        return LossProblem.of(dense, heads, width, self.d_loss is not None)


@dataclass(frozen=True, eq=False)
class LossGradients:
    """Where a kernel writes gradients: of the indexer's queries, keys and weights."""

    q: Tensor
    k: Tensor
    weights: Tensor

    @staticmethod
    def allocate(op: LossOperands) -> LossGradients:
        """Uninitialized tensors, contiguous."""
        q, k, weights = op.index_q, op.index_k, op.index_weights
        return LossGradients(*(x.new_empty(x.shape) for x in (q, k, weights)))

    def tensors(self) -> dict[str, Tensor]:
        """By the names of what they are gradients of."""
        return dict(vars(self))

    def clear(self) -> None:
        """Make every element +0: the gradient of what no row sees."""
        for x in self.tensors().values():
            x.zero_()
