"""The tensors of one call, checked and bundled, as kernels receive them.

One record per form. `out` and `lse` are always given: the caller allocated them, a kernel only
writes into them. `max_logits` is the largest scaled score of a row, -inf where it sees no key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openmla.cache import LatentCache


@dataclass(frozen=True, eq=False)
class Results:
    """Where a kernel writes: out [total_q, H, d_v]; lse, max_logits fp32 [total_q, H] or None."""

    out: Tensor
    lse: Tensor | None = None
    max_logits: Tensor | None = None

    def clear(self) -> None:
        """Make every row an empty row: zeros, -inf."""
        self.out.zero_()
        for rows in (self.lse, self.max_logits):
            if rows is not None:
                rows.fill_(-torch.inf)


@dataclass(frozen=True, eq=False)
class Weights:
    """What shapes the scores besides the dot product, the same for every form.

    scores = scale * q_scale[query] * k_scale[key] * (q . k); sink is one more term exp(sink[head])
    in the denominator.
    """

    scale: float
    sink: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DenseOperands:
    """MHA form: per-head keys and values, ragged; rope from a tensor or from a cache."""

    q: Tensor
    k_nope: Tensor
    k_rope: Tensor | None
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool
    weights: Weights
    rope_cache: LatentCache | None = None
    block_table: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LatentOperands:
    """Latent form over a paged cache: every head reads the same rows."""

    q: Tensor
    cache: LatentCache
    block_table: Tensor
    cache_lengths: Tensor
    cu_seqlens_q: Tensor
    causal: bool
    d_v: int
    weights: Weights


@dataclass(frozen=True, eq=False)
class SparseOperands:
    """Latent form, each query with its own list of physical rows."""

    q: Tensor
    cache: LatentCache | Tensor
    indices: Tensor
    topk_lengths: Tensor | None
    d_v: int
    weights: Weights

    @property
    def rows(self) -> int:
        """Rows an index may name."""
        return self.cache.rows if isinstance(self.cache, LatentCache) else self.cache.shape[0]

    def read(self, rows: Tensor) -> Tensor:
        """The values of physical rows, [len(rows), d_qk]."""
        if isinstance(self.cache, LatentCache):
            return self.cache.read(rows)
        return self.cache.index_select(0, rows)
