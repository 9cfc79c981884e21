"""FlashMLA's calls, served by openmla: sparse prefill here, decode in flash_mla_decode.py.

Same signature, shapes and conventions as `flash_mla.flash_mla_sparse_fwd`; any head count, any
topk, and CPU tensors work too. What differs from openmla's own call:

| | FlashMLA, here | openmla.mla_prefill_sparse |
|---|---|---|
| kv | [s_kv, 1, d_qk] | [rows, d_qk] |
| indices | [s_q, 1, topk] | [total_q, topk] |
| a row that sees no key | lse +inf, max_logits -inf | lse -inf, max_logits -inf |
| results | (out, max_logits, lse) | out, then what was asked for |

In both, lse is the natural log, does not contain the sink, and the sink scales only `out`. A module
that can be imported as `flash_mla` is made by openmla.compat.stand_in.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from openmla import checks
from openmla.api import mla_prefill_sparse
from openmla.compat.flash_mla_decode import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [s_q, h_q, d_v], max_logits [s_q, h_q], lse [s_q, h_q]).

    Args:
        q: [s_q, h_q, d_qk], bf16, fp16, fp32 or e4m3; 1 to 128 heads.
        kv: [s_kv, 1, d_qk] in the dtype of q; V is its first d_v columns.
        indices: int32 [s_q, 1, topk], rows of kv; a negative one or one of s_kv or more is ignored.
        sm_scale: a factor for all scores.
        d_v: how many leading columns of a row are V.
        attn_sink: float32 [h_q]: one more term exp(sink) in each head's denominator; None without
            one.
        topk_length: int32 [s_q], entries of a list at or past it are ignored; all count if None.
        use_legacy: a bool that changes nothing: which of FlashMLA's kernels runs.
        return_log2_lse: lse to base 2 instead of the natural one, as SGLang asks for.
        out: where to write the result, [s_q, h_q, d_v]; made if None.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: a tensor requires gradients, or no kernel serves such a call.
    """
    checks.flag("use_legacy", use_legacy)
    in_bits = return_log2_lse is not None and checks.flag("return_log2_lse", return_log2_lse)
    q = checks.queries(q)
    s_q, heads, d_qk = q.shape
    kv = checks.tensor("kv", kv, ("s_kv", 1, d_qk), (q.dtype,), q.device)
    indices = checks.tensor("indices", indices, (s_q, 1, "topk"), (torch.int32,), q.device)
    if topk_length is not None:
        checks.tensor("topk_length", topk_length, (s_q,), (torch.int32,), q.device)
    checks.no_gradients(q=q, kv=kv, attn_sink=checks.sink(attn_sink, heads, q.device, "attn_sink"))
    result, lse, max_logits = mla_prefill_sparse(
        q,
        kv[:, 0],
        indices[:, 0],
        scale=checks.scale(sm_scale, "flash_mla_sparse_fwd", name="sm_scale"),
        topk_lengths=topk_length,
        d_v=d_v,
        sink=attn_sink,
        out=out,
        return_lse=True,
        return_max_logits=True,
    )
    lse = lse.masked_fill_(lse == -torch.inf, torch.inf)
    return result, max_logits, lse.div_(math.log(2)) if in_bits else lse
