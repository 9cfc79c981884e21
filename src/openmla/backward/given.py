"""Gradients of the expanded form for an output that another form computed.

A trainer whose forward pass must have the bits of a server's computes it as the server does, in
latent form, and differentiates the expanded form, which has less than a third of the arithmetic:
both are the same function of q, k_nope, k_rope and v. The backward pass reads out and lse of the
forward pass that was, so weights and what they are differentiated from belong together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla import checks
from openmla.backward import ops
from openmla.errors import InvalidArgument
from openmla.planning import BACKENDS

assert ops.SCHEMAS  # importing them registers torch.ops.openmla.*


def with_expanded_gradients(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | None,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    scale: float,
    causal: bool = True,
    sink: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Copies of out and lse whose gradients are those of `mla_prefill(q, k_nope, k_rope, v, …)`.

    out [total_q, H, d_v] and lse float32 [total_q, H] are results of the same attention in any
    form, without gradients of their own; the other arguments are `mla_prefill`'s.

    >>> import openmla
    >>> cu, q = torch.tensor([0, 3]).int(), torch.randn(3, 2, 24, requires_grad=True)
    >>> k, v = torch.randn(3, 2, 24), torch.randn(3, 2, 16)
    >>> kept = {"cu_seqlens_q": cu, "scale": 0.2}
    >>> out, lse = openmla.mla_prefill(q.detach(), k, None, v, return_lse=True, **kept)
    >>> again, _ = with_expanded_gradients(out, lse, q, k, None, v, **kept)
    >>> again.sum().backward()
    >>> torch.equal(again, out), q.grad.shape
    (True, torch.Size([3, 2, 24]))
    """
    q = checks.queries(q)
    k_nope, v = checks.keys_and_values(q, k_nope, v)
    cu_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    given_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    cu_k = checks.cu_seqlens("cu_seqlens_k", given_k, q.device)
    if cu_k.shape[0] != cu_q.shape[0]:
        expected = f"{cu_q.shape[0]} entries, as cu_seqlens_q has"
        raise InvalidArgument("cu_seqlens_k", expected, cu_k.shape[0])
    rope = checks.rope_tensor(k_rope, q, k_nope)
    factor = checks.scale(scale, required_for="with_expanded_gradients")
    checks.flag("causal", causal)
    sink = checks.sink(sink, q.shape[1], q.device)
    shape = (*q.shape[:2], v.shape[2])
    checks.tensor("out", out, shape, (checks.out_dtype(q.dtype),), q.device)
    checks.tensor("lse", lse, q.shape[:2], (torch.float32,), q.device)
    checks.no_gradients(out=out, lse=lse)
    checks.no_tangents(q=q, k_nope=k_nope, k_rope=rope, v=v, sink=sink)
    if checks.needs_gradients(q, k_nope, rope, v, sink):
        checks.no_transforms()
        checks.can_be_kept(q=q, k_nope=k_nope, k_rope=rope, v=v, sink=sink)
        checks.can_be_kept(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    found: tuple[Tensor, Tensor] = torch.ops.openmla.dense_given(
        *(out, lse, q, k_nope, rope, v, cu_q, cu_k, sink, None),
        *(factor, causal, 0, checks.backend(backend, BACKENDS), True),
    )
    return found
