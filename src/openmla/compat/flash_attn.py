"""FlashAttention-3's ragged call, served by openmla's dense form.

Same signature, shapes and conventions as `flash_attn_interface.flash_attn_varlen_func`: v may be
narrower than q and k (192/128), causal is aligned bottom-right, and a query that sees no key gets
zeros and an lse of -inf. q, k and v that require gradients have them. `seqused_q` and
`seqused_k` say how many rows of a sequence count. Hints about speed (num_splits, pack_gqa,
sm_margin) change nothing, and results and gradients are always
deterministic. What openmla has no kernel for raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openmla import checks
from openmla.api import mla_prefill
from openmla.errors import InvalidArgument, Unsupported

__all__ = ["flash_attn_varlen_func"]

UNBOUNDED, UP_TO_ITSELF = -1, 0
"""Keys that a window may have on one side of a query: any number, or none."""


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """out [total_q, H, d_v], or (out, lse [H, total_q], natural log) with return_attn_probs.

    Args:
        q: [total_q, H, d], bf16, fp16, fp32 or e4m3; H from 1 to 128.
        k: [total_k, H_k, d] in the dtype of q; H is a multiple of H_k, and query head h reads key
            head h // (H / H_k).
        v: [total_k, H_k, d_v] in the dtype of q.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin.
        cu_seqlens_k: int32 [batch + 1], where each sequence's keys begin.
        max_seqlen_q: an int of 0 or more, which sizes FlashAttention's grid; it changes nothing.
        max_seqlen_k: the same for keys.
        seqused_q: int32 [batch], how many of each sequence's queries count; the others get zeros
            and an lse of -inf. None: all. Queries are copied; not with gradients.
        seqused_k: int32 [batch], how many of each sequence's keys count, from its first; others are
            not read. None: all. Not with gradients.
        softmax_scale: a factor for all scores; 1 / sqrt(d) if None.
        causal: aligned bottom-right: the last query of a sequence sees its last key.
        qv: None; anything else is refused.
        q_descale: None; anything else is refused.
        k_descale: None; anything else is refused.
        v_descale: None; anything else is refused.
        window_size: (left, right), keys before and after a query that it sees beside its own; -1:
            all. (left, 0), or any right with causal, which sets it to 0, is a causal window of left
            + 1 keys; (-1, -1) and (-1, 0) have no window. Others are refused.
        attention_chunk: 0; anything else is refused.
        softcap: 0; anything else is refused.
        num_splits: an int of 0 or more, a hint about speed; it changes nothing.
        pack_gqa: a bool or None, a hint about speed; it changes nothing.
        deterministic: a bool; results and gradients are deterministic either way.
        sm_margin: an int of 0 or more, a hint about speed; it changes nothing.
        return_attn_probs: also return lse, fp32 [H, total_q].

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: openmla has no kernel for what was asked; the message says what would serve.
    """
    _refuse_what_has_no_kernel(
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    _refuse_other_scores(attention_chunk, softcap)
    _check_hints(max_seqlen_q, max_seqlen_k, num_splits, sm_margin)
    checks.flag("deterministic", deterministic)
    if pack_gqa is not None:
        checks.flag("pack_gqa", pack_gqa)
    q = checks.queries(q)
    k, v = _check_keys_and_values(q, k, v)
    checks.no_tangents(q=q, k=k, v=v)
    wants_lse = checks.flag("return_attn_probs", return_attn_probs)
    scale = checks.scale(softmax_scale, name="softmax_scale")
    visible, window = _mask(checks.flag("causal", causal), window_size)

    cu_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    cu_k = checks.cu_seqlens("cu_seqlens_k", cu_seqlens_k, q.device)
    used_q = _used("seqused_q", seqused_q, cu_q)
    used_k = _used("seqused_k", seqused_k, cu_k)
    first_key = None
    if (used_q is not None or used_k is not None) and checks.needs_gradients(q, k, v):
        raise Unsupported(
            "gradients of sequences with unused rows", "cu_seqlens of exactly the rows in use"
        )
    if used_k is not None:  # keys of a sequence begin where they did, and end earlier
        first_key, cu_k = cu_k[:-1].contiguous(), _sums(used_k)
    order = None
    if used_q is not None:
        order = _used_first(cu_q, used_q, q.shape[0])
        # Plain bytes: indexing is not implemented for float8 everywhere.
        rows = q.view(torch.uint8) if q.dtype == torch.float8_e4m3fn else q
        q, cu_q = rows[order].view(q.dtype), _sums(used_q)

    # Calls that need gradients have results of their own, which are joined.
    parts: list[tuple[Tensor, Tensor]] | None = None
    out = lse = None
    if checks.needs_gradients(q, k, v):
        parts = []
    else:
        out = q.new_empty((*q.shape[:2], v.shape[2]), dtype=checks.out_dtype(q.dtype))
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if wants_lse else None
    # Several query heads per key head: one call for each key head, which its query heads all see
    # through a stride of 0. Nothing is copied.
    calls = 1 if k.shape[1] == q.shape[1] else k.shape[1]
    per_call, key_heads = q.shape[1] // calls, k.shape[1] // calls
    for call in range(calls):
        heads = slice(call * per_call, (call + 1) * per_call)
        shared = slice(call * key_heads, (call + 1) * key_heads)
        result = mla_prefill(
            q[:, heads],
            k[:, shared].expand(-1, per_call, -1),
            None,
            v[:, shared].expand(-1, per_call, -1),
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            k_start=first_key,
            scale=scale,
            causal=visible,
            window=window,
            out=None if out is None else out[:, heads],
            return_lse=wants_lse or parts is not None,
        )
        if parts is not None:
            parts.append((result[0], result[1]))
        elif lse is not None:
            lse[heads] = result[1].T
    if parts is not None:
        out = torch.cat([part for part, _ in parts], dim=1)
        lse = torch.cat([rows.T for _, rows in parts]) if wants_lse else None
    assert out is not None
    if order is not None:
        out = torch.empty_like(out).index_copy_(0, order, out)
        lse = None if lse is None else torch.empty_like(lse).index_copy_(1, order, lse)
    return out if lse is None else (out, lse)


def _used(name: str, value: object, cu_seqlens: Tensor) -> Tensor | None:
    """How many rows of each sequence count, at most those that it has."""
    if value is None:
        return None
    batch = cu_seqlens.shape[0] - 1
    used = checks.tensor(name, value, (batch,), (torch.int32,), cu_seqlens.device)
    return torch.minimum(used.clamp(min=0), cu_seqlens.diff())


def _sums(lengths: Tensor) -> Tensor:
    """int32 [batch + 1]: where sequences of these lengths begin, end to end."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _used_first(cu_seqlens: Tensor, used: Tensor, total: int) -> Tensor:
    """int64 [total]: all queries, those that count before the others, else in their order."""
    token = torch.arange(total, dtype=torch.int32, device=used.device)
    sequence = torch.bucketize(token, cu_seqlens[1:], right=True)
    inside = sequence < used.shape[0]
    sequence = sequence.clamp(max=max(used.shape[0] - 1, 0))
    if not used.shape[0]:
        return token.long()
    counts = inside & (token - cu_seqlens[:-1][sequence] < used[sequence])
    return torch.argsort(~counts, stable=True)


def _mask(causal: bool, window_size: object) -> tuple[bool, int | None]:
    """Whether the mask is causal, and the window beside it.

    >>> _mask(False, (127, 0)), _mask(True, (-1, -1)), _mask(True, (3, 5))
    ((True, 128), (True, None), (True, 4))
    """
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise InvalidArgument("window_size", "(left, right)", checks.describe(window_size))
    for size in window_size:
        if isinstance(size, bool) or not isinstance(size, int) or size < UNBOUNDED:
            raise InvalidArgument("window_size", "two ints, -1 or more", f"{tuple(window_size)}")
    left, right = window_size
    causal = causal or right == UP_TO_ITSELF
    if not causal and (left, right) != (UNBOUNDED, UNBOUNDED):
        raise Unsupported(
            f"window_size: expected (-1, -1) or (left, 0) without causal, got {left, right}",
            "window_size=(left, 0): a causal window",
        )
    return causal, None if left == UNBOUNDED else left + 1


def _check_keys_and_values(q: Tensor, k: object, v: object) -> tuple[Tensor, Tensor]:
    keys = checks.tensor("k", k, ("total_k", "heads_k", q.shape[2]), (q.dtype,), q.device)
    heads, key_heads = q.shape[1], keys.shape[1]
    if key_heads == 0 or heads % key_heads:
        expected = f"a number of heads that divides q's {heads}"
        raise InvalidArgument("k", expected, f"{key_heads} heads")
    wanted = (keys.shape[0], key_heads, "d_v")
    values = checks.tensor("v", v, wanted, (q.dtype,), q.device)
    if values.shape[2] == 0:
        raise InvalidArgument("v", "a width above 0 in dimension 2", checks.describe(values))
    checks.last_dim_contiguous("k", keys)
    checks.last_dim_contiguous("v", values)
    return keys, values


def _refuse_what_has_no_kernel(**given: object) -> None:
    reasons = {
        "qv": ("absorbed queries beside rope queries", "openmla.mla_prefill_latent"),
        "descale": (
            "scales per sequence and head",
            "openmla.mla_prefill with q_scale and k_scale, one per token",
        ),
    }
    for name, value in given.items():
        if value is not None:
            what, nearest = next(reasons[kind] for kind in reasons if kind in name)
            got = checks.describe(value)
            raise Unsupported(f"{name} ({what}): expected None, got {got}", nearest)


def _refuse_other_scores(attention_chunk: object, softcap: object) -> None:
    for name, value in (("attention_chunk", attention_chunk), ("softcap", softcap)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidArgument(name, "0", checks.describe(value))
        if value != 0:
            raise Unsupported(f"{name}: expected 0, got {value}", f"{name}=0")


def _check_hints(
    max_seqlen_q: object, max_seqlen_k: object, splits: object, margin: object
) -> None:
    names = ("max_seqlen_q", "max_seqlen_k", "num_splits", "sm_margin")
    for name, value in zip(names, (max_seqlen_q, max_seqlen_k, splits, margin), strict=True):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgument(name, "an int of 0 or more", checks.describe(value))
