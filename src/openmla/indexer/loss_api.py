"""`indexer_loss`: how far an indexer's scores are from what attention looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from openmla import checks
from openmla.errors import InvalidArgument
from openmla.indexer import loss_ops
from openmla.planning import BACKENDS
from openmla.problem import MAX_HEADS, Backend

__all__ = ["indexer_loss"]

assert loss_ops.SCHEMAS  # importing it registers torch.ops.openmla.index_loss


def indexer_loss(
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    lse: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    sink: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """KL(p || softmax(I)) of every query, float32 [total_q]; its gradients are the indexer's.

    Scores are I = sum over heads of weight * relu(q . k). What follows them is the dense call that
    the indexer is to imitate, with the lse that mla_prefill returned: p is the sum of its weights
    over all heads, normalized, a target without gradient. Keys are those that the query sees: all
    of them in a dense warm-up, with a `key_mask` the selected ones. A query that sees none has a
    loss of 0.

    Args:
        index_q: [total_q, heads, width] in q's dtype, before it is quantized.
        index_k: [total_k, width] in q's dtype, before it is quantized.
        index_weights: fp32 [total_q, heads].
        q: as mla_prefill took it.
        k_nope: as mla_prefill took it.
        k_rope: as mla_prefill took it, a tensor or None.
        lse: fp32 [total_q, H], as mla_prefill returned it.
        cu_seqlens_q: as mla_prefill took it.
        cu_seqlens_k: as mla_prefill took it; cu_seqlens_q if None.
        scale: as mla_prefill took it.
        causal: as mla_prefill took it.
        sink: as mla_prefill took it.
        key_mask: as mla_prefill took it.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> import openmla
    >>> q, k, rope = torch.randn(3, 2, 24), torch.randn(3, 2, 16), torch.randn(3, 8)
    >>> cu = torch.tensor([0, 3], dtype=torch.int32)
    >>> _, lse = openmla.mla_prefill(q, k, rope, k, cu_seqlens_q=cu, return_lse=True)
    >>> index_q, index_k = torch.randn(3, 4, 128, requires_grad=True), torch.randn(3, 128)
    >>> loss = indexer_loss(index_q, index_k, torch.ones(3, 4), q, k, rope, lse, cu_seqlens_q=cu)
    >>> loss.sum().backward()
    >>> loss[0].item(), index_q.grad.shape  # the first query sees one key: nothing to learn
    (0.0, torch.Size([3, 4, 128]))
    """
    q, k_nope, lse = (x.detach() if isinstance(x, Tensor) else x for x in (q, k_nope, lse))
    k_rope, sink = (x.detach() if isinstance(x, Tensor) else x for x in (k_rope, sink))
    q = checks.queries(q)
    k_nope, _ = checks.keys_and_values(q, k_nope, k_nope)
    total_q, total_k = q.shape[0], k_nope.shape[0]
    rope = checks.rope_tensor(k_rope, q, k_nope)
    checks.tensor("lse", lse, tuple(q.shape[:2]), (torch.float32,), q.device)
    given_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    cu_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    cu_k = checks.cu_seqlens("cu_seqlens_k", given_k, q.device)
    if cu_k.shape[0] != cu_q.shape[0]:
        expected = f"{cu_q.shape[0]} entries, as cu_seqlens_q has"
        raise InvalidArgument("cu_seqlens_k", expected, cu_k.shape[0])
    shape = (total_q, "index heads", "width")
    index_q = checks.tensor("index_q", index_q, shape, (q.dtype,), q.device)
    heads, width = index_q.shape[1:]
    if not 1 <= heads <= MAX_HEADS or not width:
        raise InvalidArgument(
            "index_q", f"1 to {MAX_HEADS} heads, some width", tuple(index_q.shape)
        )
    index_k = checks.tensor("index_k", index_k, (total_k, width), (q.dtype,), q.device)
    checks.tensor("index_weights", index_weights, (total_q, heads), (torch.float32,), q.device)
    for name, rows in (("index_q", index_q), ("index_k", index_k)):
        checks.last_dim_contiguous(name, rows)
    checks.no_tangents(index_q=index_q, index_k=index_k, index_weights=index_weights)
    wanted = checks.needs_gradients(index_q, index_k, index_weights)
    factor = checks.scale(scale)
    sink = checks.sink(sink, q.shape[1], q.device)
    mask = checks.key_mask(key_mask, total_q, q.device)
    if wanted:
        checks.no_transforms()
        checks.can_be_kept(index_q=index_q, index_k=index_k, index_weights=index_weights)
        checks.can_be_kept(q=q, k_nope=k_nope, k_rope=rope, lse=lse, sink=sink, key_mask=mask)
        checks.can_be_kept(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    loss: Tensor = torch.ops.openmla.index_loss(
        *(index_q, index_k, index_weights, q, k_nope, rope, lse, cu_q, cu_k, sink),
        mask,
        q.shape[2] ** -0.5 if factor is None else factor,
        checks.flag("causal", causal),
        checks.backend(backend, BACKENDS),
    )
    return loss
