"""The public calls: check, allocate, hand over. Nothing else happens here.

Every call accepts the same options, but for q_scale and k_scale, which `mla_attend` does not have:

    scale        multiplies the scores; default 1/sqrt(d_nope + d_rope) in the dense form
    sink         float32 [heads], one extra term exp(sink) in the softmax denominator
    q_scale      float32 [total_q], k_scale float32 [keys]: scores are multiplied by both
    out          where to write; allocated otherwise. In float32 it has the sums as they are, which
                 are rounded to the dtype of q otherwise
    return_lse   also return the natural-log lse, float32 [total_q, heads]; the sink is not in it
    backend      "auto", or one kernel family, which is then never replaced by another

A query that sees no key gets zeros, and -inf in lse.
"""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from openmla import cached, checks, ops
from openmla.api.options import AttendOptions, DenseOptions, LatentOptions, SparseOptions
from openmla.backward import ops as backward_ops
from openmla.backward import sparse_ops
from openmla.cache import LatentCache
from openmla.cached import MADE, wanted, with_extras
from openmla.errors import InvalidArgument, Unsupported
from openmla.planning import BACKENDS
from openmla.problem import Backend
from openmla.sources import Listed, Source, Span, TurnBack

__all__ = ["mla_attend", "mla_prefill", "mla_prefill_latent", "mla_prefill_sparse"]

assert (
    ops.FORMS and backward_ops.SCHEMAS and sparse_ops.SPARSE_SCHEMAS
)  # importing them registers torch.ops.openmla.*


@overload
def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | LatentCache | None,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DenseOptions],
) -> Tensor: ...
@overload
def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | LatentCache | None,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[DenseOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | LatentCache | None,
    v: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[DenseOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def mla_prefill(
    q: Tensor,
    k_nope: Tensor,
    k_rope: Tensor | LatentCache | None,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    k_start: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_lengths: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sink: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    key_mask: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Dense prefill in MHA form over ragged sequences.

    Returns out [total_q, H, d_v] in the dtype of q (bf16 for e4m3), with return_lse also lse. A
    query that sees no key has a row of zeros and an lse of -inf. Tensors that require gradients
    have them (docs/training.md).

    Args:
        q: [total_q, H, d_nope + d_rope], bf16, fp16, fp32 or e4m3; H from 1 to 128.
        k_nope: [total_k, H_kv, d_nope], often a strided view of a projection. H_kv is H or divides
            it: query head h reads head h // (H / H_kv), as the grouped heads of GQA do.
        k_rope: [total_k, d_rope] or [total_k, 1, d_rope] shared by all heads, or
            [total_k, H_kv, d_rope], or a LatentCache whose rope columns are read through
            block_table and cache_lengths, or None where there is no rope.
        v: [total_k, H_kv, d_v], often a strided view of a projection.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin.
        cu_seqlens_k: the same for keys; cu_seqlens_q if None.
        k_start: int32 [batch]: the keys of sequence b begin at row k_start[b], so that sequences
            may share keys, and cu_seqlens_k only counts them.
        block_table: int32 [batch, max_pages], the pages of each sequence; only with a LatentCache.
        cache_lengths: int32 [batch], keys of each sequence in those pages; only with a LatentCache.
        scale: a factor for all scores; 1 / sqrt(d_nope + d_rope) if None.
        causal: aligned bottom-right: the last query of a sequence sees its last key.
        window: a query at position p sees keys p - window + 1 … p alone, 1 or more of them; None:
            all up to p. Keys that no query of a sequence sees are not read. Needs causal: without
            it there is no last key that a window could end at.
        sink: fp32 [H]: one more term exp(sink) in each head's denominator.
        q_scale: fp32 [total_q], a factor for each query's scores; e4m3 queries come with one.
        k_scale: fp32 [total_k], a factor for each key's scores; e4m3 keys come with one.
        key_mask: int32 [total_q, words]: bit s % 32 of word s // 32 of row t lets query t see key s
            of its sequence, where causal allows it too; what select_topk and index_topk return as
            mask. Bits past the sequence's keys are ignored; on a GPU, keys past the last word are
            not seen.
        out: where to write the result, [total_q, H, d_v], in its dtype or in fp32; made if None.
        return_lse: also return lse, fp32 [total_q, H]: natural log, without the sink.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> cu = torch.tensor([0, 5, 8], dtype=torch.int32)  # two sequences, of 5 and 3 tokens
    >>> q, kv = torch.randn(8, 16, 192), torch.randn(8, 16, 256)
    >>> k_nope, v, k_rope = kv[..., :128], kv[..., 128:], torch.randn(8, 64)
    >>> out, lse = mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=cu, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([8, 16, 128]), torch.Size([8, 16]))
    """
    given_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if cached.any_kept() and type(q) is Tensor and q.dim() == 3 and q.size(2):
        rope, pool = _rope_and_pool(k_rope, q)
        done = cached.run(
            "dense",
            (
                q,
                k_nope,
                rope,
                v,
                *_cache_parts(pool),
                block_table,
                cache_lengths,
                cu_seqlens_q,
                given_k,
                k_start,
                sink,
                q_scale,
                k_scale,
                key_mask,
                q.size(2) ** -0.5 if scale is None else scale,
                causal,
                _plain_number(window),
                backend,
                MADE if out is None else out,
                wanted(return_lse),
            ),
        )
        if done is not None:
            return _with_lse(*done)
    q = checks.queries(q)
    k_nope, v = checks.keys_and_values(q, k_nope, v)
    cu_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    cu_k = checks.cu_seqlens("cu_seqlens_k", given_k, q.device)
    if cu_k.shape[0] != cu_q.shape[0]:
        expected = f"{cu_q.shape[0]} entries, as cu_seqlens_q has"
        raise InvalidArgument("cu_seqlens_k", expected, cu_k.shape[0])
    if k_start is not None:
        checks.tensor("k_start", k_start, (cu_q.shape[0] - 1,), (torch.int32,), q.device)
    rope, cache = _checked_rope(k_rope, q, k_nope, block_table, cache_lengths, cu_q.shape[0] - 1)
    key_mask = checks.key_mask(key_mask, q.shape[0], q.device)
    factor = checks.scale(scale)
    keys_seen = checks.window(window, checks.flag("causal", causal))
    sink, *scales = _weights(q, sink, q_scale, k_scale, k_nope.shape[0])
    checks.no_gradients(k_rope=cache)
    checks.no_tangents(q=q, k_nope=k_nope, k_rope=rope, v=v, sink=sink)
    number = q.shape[2] ** -0.5 if factor is None else factor
    if checks.needs_gradients(q, k_nope, rope, v, sink):
        given = {"k_rope": cache, "k_start": k_start, "q_scale": q_scale, "k_scale": k_scale}
        checks.plain_for_gradients(out=out, **given)
        checks.can_be_kept(q=q, k_nope=k_nope, k_rope=rope, v=v, sink=sink, key_mask=key_mask)
        checks.can_be_kept(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        wants_lse = checks.flag("return_lse", return_lse)
        out, lse = torch.ops.openmla.dense_train(
            *(q, k_nope, rope, v, cu_q, cu_k, sink, key_mask),
            *(number, causal, keys_seen, checks.backend(backend, BACKENDS), wants_lse),
        )
        return _with_lse(out, lse if wants_lse else None)
    out, lse = _outputs(q, v.shape[2], out, return_lse)
    torch.ops.openmla.dense(
        q,
        k_nope,
        rope,
        v,
        *_cache_parts(cache),
        block_table,
        cache_lengths,
        cu_q,
        cu_k,
        k_start,
        sink,
        *scales,
        key_mask,
        number,
        causal,
        keys_seen,
        checks.backend(backend, BACKENDS),
        out,
        lse,
    )
    return _with_lse(out, lse)


@overload
def mla_prefill_latent(
    q: Tensor,
    cache: LatentCache | Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[LatentOptions],
) -> Tensor: ...
@overload
def mla_prefill_latent(
    q: Tensor,
    cache: LatentCache | Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[LatentOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_prefill_latent(
    q: Tensor,
    cache: LatentCache | Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[LatentOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def mla_prefill_latent(
    q: Tensor,
    cache: LatentCache | Tensor,
    block_table: Tensor,
    cache_lengths: Tensor,
    *,
    cu_seqlens_q: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    invariant: bool = False,
    range_keys: int | None = None,
    d_v: int | None = None,
    sink: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Decode, and prefill in latent form: absorbed queries over a paged cache.

    Returns out [total_q, H, d_v] in the dtype of q (bf16 for e4m3), with return_lse also lse. A
    query that sees no key has a row of zeros and an lse of -inf.

    Args:
        q: [total_q, H, latent + rope], bf16, fp16, fp32 or e4m3; H from 1 to 128.
        cache: a LatentCache, or bf16 rows [pages, page_size, latent + rope].
        block_table: int32 [batch, max_pages], the pages of each sequence.
        cache_lengths: int32 [batch], keys of each sequence, the new tokens among them.
        cu_seqlens_q: int32 [batch + 1], where each sequence's queries begin.
        scale: a factor for all scores. Required: 192**-0.5 for DeepSeek-V3, whose heads have 128 +
            64 columns before absorption; the width of latent rows does not tell it.
        causal: aligned bottom-right: the last query of a sequence sees its last key.
        window: a query at position p sees keys p - window + 1 … p alone, 1 or more of them; None:
            all up to p. Keys before every query's window are not read, and the table may name any
            page for them: a server may reuse theirs. Needs causal: without it there is no last key
            that a window could end at.
        d_v: how many leading columns of a row are V: all but the rope of a cache, 512 of a tensor.
        sink: fp32 [H]: one more term exp(sink) in each head's denominator.
        q_scale: fp32 [total_q], a factor for each query's scores; e4m3 queries come with one.
        k_scale: fp32 [physical rows], a factor for the scores of each row of the cache.
        out: where to write the result, [total_q, H, d_v], in its dtype or in fp32; made if None.
        return_lse: also return lse, fp32 [total_q, H]: natural log, without the sink.
        invariant: the bits of a row of out and lse depend on that row of q and on the keys it sees,
            and on nothing else: a prompt in one call, in chunks, token by token or after a cached
            prefix has the same bits. Otherwise they also depend on how many queries there are.
        range_keys: a GPU works on so many keys of a request side by side with the next so many and
            adds up what they give: a power of two from 128 to 2^20. Short ranges keep a chip busy
            that has few requests; with many they cost time (docs/performance.md). The call is then
            invariant, as with invariant=True, whose ranges have 2048 keys; bits also depend on this
            number. None: each request's own queries and keys decide, a compromise for batches.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> cache = LatentCache.allocate(num_pages=4, page_size=64, format="fp8_656")
    >>> cache.append(torch.randn(70, 512), torch.randn(70, 64), slot_mapping=torch.arange(70))
    >>> q, cu = torch.randn(3, 16, 576).bfloat16(), torch.tensor([0, 3]).int()  # the last 3 tokens
    >>> pages, lengths = torch.tensor([[0, 1]]).int(), torch.tensor([70]).int()
    >>> mla_prefill_latent(q, cache, pages, lengths, cu_seqlens_q=cu, scale=192**-0.5).shape
    torch.Size([3, 16, 512])
    """
    if cached.any_kept():
        pool = cache if type(cache) is LatentCache else None
        width = d_v if d_v is not None else 512 if pool is None else pool.latent
        done = cached.run(
            "latent",
            (
                q,
                *((cache, None, "bf16", width) if pool is None else _cache_parts(pool)),
                block_table,
                cache_lengths,
                cu_seqlens_q,
                sink,
                q_scale,
                k_scale,
                scale,
                causal,
                _plain_number(window),
                invariant,
                _plain_number(range_keys),
                width,
                backend,
                MADE if out is None else out,
                wanted(return_lse),
            ),
        )
        if done is not None:
            return _with_lse(*done)
    q = checks.queries(q)
    rows, width = checks.latent_rows("cache", cache, d_v, dims=3)
    pool = rows if isinstance(rows, LatentCache) else _bf16_pool(rows, width)
    checks.row_width("cache", pool.width, q)
    checks.on_device("cache", pool, q.device)
    cu_q = checks.cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    checks.paging(block_table, cache_lengths, cu_q.shape[0] - 1, q.device)
    factor = checks.scale(scale, required_for="mla_prefill_latent")
    keys_seen = checks.window(window, checks.flag("causal", causal))
    checks.flag("invariant", invariant)
    keys_of_range = checks.range_keys(range_keys)
    weights = _weights(q, sink, q_scale, k_scale, pool.rows)
    checks.no_gradients(q=q, cache=pool, sink=weights[0])
    out, lse = _outputs(q, width, out, return_lse)
    torch.ops.openmla.latent(
        q,
        *_cache_parts(pool),
        block_table,
        cache_lengths,
        cu_q,
        *weights,
        factor,
        causal,
        keys_seen,
        invariant,
        keys_of_range,
        width,
        checks.backend(backend, BACKENDS),
        out,
        lse,
    )
    return _with_lse(out, lse)


@overload
def mla_prefill_sparse(
    q: Tensor,
    kv: LatentCache | Tensor,
    indices: Tensor,
    *,
    return_lse: Literal[False] = False,
    return_max_logits: Literal[False] = False,
    **options: Unpack[SparseOptions],
) -> Tensor: ...
@overload
def mla_prefill_sparse(
    q: Tensor,
    kv: LatentCache | Tensor,
    indices: Tensor,
    *,
    return_lse: Literal[True],
    return_max_logits: Literal[False] = False,
    **options: Unpack[SparseOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_prefill_sparse(
    q: Tensor,
    kv: LatentCache | Tensor,
    indices: Tensor,
    *,
    return_lse: bool = False,
    return_max_logits: bool,
    **options: Unpack[SparseOptions],
) -> Tensor | tuple[Tensor, ...]: ...
@overload
def mla_prefill_sparse(
    q: Tensor,
    kv: LatentCache | Tensor,
    indices: Tensor,
    *,
    return_lse: bool,
    return_max_logits: bool = False,
    **options: Unpack[SparseOptions],
) -> Tensor | tuple[Tensor, ...]: ...
def mla_prefill_sparse(
    q: Tensor,
    kv: LatentCache | Tensor,
    indices: Tensor,
    *,
    scale: float | None = None,
    topk_lengths: Tensor | None = None,
    d_v: int | None = None,
    sink: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Sparse prefill in latent form: each query attends to the rows its indices name.

    Returns out [total_q, H, d_v] in the dtype of q (bf16 for e4m3), or a tuple in the order out,
    lse, max_logits. A query that sees no row has zeros, an lse and a max_logits of -inf.
    Gradients are those of q, of a plain kv and of sink.

    Args:
        q: [total_q, H, latent + rope], bf16, fp16, fp32 or e4m3; H from 1 to 128.
        kv: a LatentCache, or rows [rows, latent + rope].
        indices: int32 [total_q, topk], physical rows (page * page_size + offset for a cache). An
            index is ignored when it is negative, past the rows, or at or past topk_lengths; a
            duplicate counts twice.
        topk_lengths: int32 [total_q], how many entries of a list count; all if None.
        scale: a factor for all scores. Required: 192**-0.5 for DeepSeek-V3, whose heads have 128 +
            64 columns before absorption; the width of latent rows does not tell it.
        d_v: how many leading columns of a row are V: all but the rope of a cache, 512 of a tensor.
        sink: fp32 [H]: one more term exp(sink) in each head's denominator.
        q_scale: fp32 [total_q], a factor for each query's scores; e4m3 queries come with one.
        k_scale: fp32 [rows], a factor for the scores of each row.
        out: where to write the result, [total_q, H, d_v], in its dtype or in fp32; made if None.
        return_lse: also return lse, fp32 [total_q, H]: natural log, without the sink.
        return_max_logits: also return each row's largest scaled score, fp32 [total_q, H].
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> q, rows = torch.randn(2, 16, 576), torch.randn(100, 576)
    >>> indices = torch.tensor([[3, 1, -1], [99, -1, -1]], dtype=torch.int32)  # -1: no row
    >>> out, lse = mla_prefill_sparse(q, rows, indices, scale=192**-0.5, return_lse=True)
    >>> torch.allclose(out[1], rows[99, :512].expand(16, 512))  # one row seen: its values
    True
    """
    if cached.any_kept():
        pool = kv if type(kv) is LatentCache else None
        width = d_v if d_v is not None else 512 if pool is None else pool.latent
        done = cached.run(
            "sparse",
            (
                q,
                *((kv, None, "", 0) if pool is None else _cache_parts(pool)),
                indices,
                topk_lengths,
                sink,
                q_scale,
                k_scale,
                scale,
                width,
                backend,
                MADE if out is None else out,
                wanted(return_lse),
                wanted(return_max_logits),
            ),
        )
        if done is not None:
            return with_extras(*done)
    q = checks.queries(q)
    rows, width = checks.latent_rows("kv", kv, d_v, dims=2)
    if isinstance(rows, LatentCache):
        checks.on_device("kv", rows, q.device)
        checks.row_width("kv", rows.width, q)
        total_rows, kv_parts = rows.rows, _cache_parts(rows)
    else:
        stored = checks.tensor("kv", rows, ("rows", q.shape[2]), (q.dtype,), q.device)
        total_rows, kv_parts = stored.shape[0], (stored, None, "", 0)
    indices, lengths = checks.index_lists(indices, topk_lengths, q.shape[0], q.device)
    factor = checks.scale(scale, required_for="mla_prefill_sparse")
    weights = _weights(q, sink, q_scale, k_scale, total_rows)
    cache = rows if isinstance(rows, LatentCache) else None
    plain = kv_parts[0] if cache is None else None
    checks.no_gradients(kv=cache)
    checks.no_tangents(q=q, kv=plain, sink=weights[0])
    if checks.needs_gradients(q, plain, weights[0]):
        checks.plain_for_gradients(out=out, kv=cache, q_scale=q_scale, k_scale=k_scale)
        if checks.flag("return_max_logits", return_max_logits):
            raise Unsupported(
                "max_logits of a call that needs gradients: they have none",
                nearest="the same call without return_max_logits, or under torch.no_grad()",
            )
        checks.can_be_kept(q=q, kv=plain, indices=indices, topk_lengths=lengths, sink=weights[0])
        wants_lse = checks.flag("return_lse", return_lse)
        out, lse = torch.ops.openmla.sparse_train(
            *(q, plain, indices, lengths, weights[0], factor, width),
            *(checks.backend(backend, BACKENDS), wants_lse),
        )
        return with_extras(out, lse if wants_lse else None)
    out, lse = _outputs(q, width, out, return_lse)
    max_logits = None
    if checks.flag("return_max_logits", return_max_logits):
        max_logits = q.new_empty(q.shape[:2], dtype=torch.float32)
    torch.ops.openmla.sparse(
        q,
        *kv_parts,
        indices,
        lengths,
        *weights,
        factor,
        width,
        checks.backend(backend, BACKENDS),
        out,
        lse,
        max_logits,
    )
    return with_extras(out, lse, max_logits)


@overload
def mla_attend(
    q: Tensor,
    sources: Sequence[Source],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttendOptions],
) -> Tensor: ...
@overload
def mla_attend(
    q: Tensor,
    sources: Sequence[Source],
    *,
    return_lse: Literal[True],
    **options: Unpack[AttendOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def mla_attend(
    q: Tensor,
    sources: Sequence[Source],
    *,
    return_lse: bool,
    **options: Unpack[AttendOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def mla_attend(
    q: Tensor,
    sources: Sequence[Source],
    *,
    scale: float,
    sink: Tensor | None = None,
    d_v: int | None = None,
    turn_back: TurnBack | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Attention over the rows of one or two sources, in one softmax: a layer of DeepSeek-V4.

    A source is one of

        Listed(rows, indices, lengths=None)                 rows that each query lists
        Span(cache, block_table, request, begin, end)       positions begin … end-1 of a request

    each with its own format, page size and strides (openmla.sources has their fields). One Listed
    source without `turn_back` is `mla_prefill_sparse`, bit for bit. Returns out [total_q, H, d_v],
    with return_lse also lse over all rows.

    Args:
        q: [total_q, H, latent + rope]; H from 1 to 128.
        sources: one or two sources, in the order of the softmax.
        scale: a factor for all scores.
        sink: fp32 [H]: one more term exp(sink) in each head's denominator, once for both sources.
        d_v: how many leading columns of a row are V: all but the rope of a cache, 512 of a tensor.
        turn_back: a TurnBack(table, positions): the last columns of every result are turned back
            by the angle of its query's position, before they are rounded. Rows of DeepSeek-V4 are
            turned by theirs, and V with K. None: results are left as they are.
        out: where to write the result, [total_q, H, d_v], in its dtype or in fp32; made if None.
        return_lse: also return lse, fp32 [total_q, H]: natural log, without the sink.
        backend: "auto" takes the best kernel of the chip; another name takes that one or raises.

    Raises:
        InvalidArgument: an argument is wrong; the message names it, and what was expected.
        Unsupported: no kernel serves such a call; the message says what would.

    >>> window = LatentCache.allocate(num_pages=4, page_size=64, rope=0, format="fp8_584")
    >>> window.append(torch.randn(200, 512), None, torch.arange(200))
    >>> pooled = LatentCache.allocate(num_pages=2, page_size=32, rope=0, format="fp8_584")
    >>> pooled.append(torch.randn(50, 512), None, torch.arange(50))  # one row for 4 tokens
    >>> chosen = torch.tensor([[3, 17, 49, -1]]).int()  # of the indexer; -1: no row
    >>> table, t = torch.tensor([[0, 1, 2, 3]]).int(), torch.tensor([199]).int()
    >>> last_128 = Span(window, table, torch.zeros(1).int(), begin=t - 127, end=t + 1)
    >>> q, sink = torch.randn(1, 64, 512).bfloat16(), torch.zeros(64)
    >>> mla_attend(q, [last_128, Listed(pooled, chosen)], scale=512**-0.5, sink=sink).shape
    torch.Size([1, 64, 512])
    """
    if cached.any_kept() and type(sources) in (list, tuple):
        parts = _attend_parts(sources)
        turn = _turn_parts(turn_back)
        width = d_v if d_v is not None else _latent_width(sources)
        if parts is not None and turn is not None:
            made = MADE if out is None else out
            done = cached.run(
                "attend", (q, *parts, *turn, sink, scale, width, backend, made, wanted(return_lse))
            )
            if done is not None:
                return with_extras(*done)
    q = checks.queries(q)
    checked, width = checks.row_sources(sources, q, d_v)
    turned = checks.turn_back(turn_back, q, width)
    if len(checked) == 1 and isinstance(checked[0], Listed) and turned is None:
        only = checked[0]
        return mla_prefill_sparse(
            q,
            only.rows,
            only.indices,
            scale=scale,
            topk_lengths=only.lengths,
            d_v=width,
            sink=sink,
            out=out,
            return_lse=return_lse,
            backend=backend,
        )
    factor = checks.scale(scale, required_for="mla_attend")
    sink = checks.sink(sink, q.shape[1], q.device)
    checks.no_gradients(q=q, sink=sink)
    for i, source in enumerate(checked):
        checks.no_gradients(**{f"sources[{i}].rows": source.rows})
    if turned is not None:
        checks.no_gradients(**{"turn_back.table": turned.table})
    out, lse = _outputs(q, width, out, return_lse)
    torch.ops.openmla.attend(
        q,
        *(_attend_parts(checked) or ()),
        *(_turn_parts(turned) or ()),
        sink,
        factor,
        width,
        checks.backend(backend, BACKENDS),
        out,
        lse,
    )
    return with_extras(out, lse)


NO_SOURCE = (None, None, "", 0, None, None, None, None, None, None)
"""A second source that is not there, as the operator takes it."""


def _attend_parts(sources: Sequence[object]) -> tuple[Any, ...] | None:
    """Sources as the operator takes them; None where they are not one or two. Nothing else is
    checked."""
    parts = [_source_parts(source) for source in sources]
    if None in parts or not 1 <= len(parts) <= checks.MOST_SOURCES:
        return None
    return (*parts[0], *(parts[1] if len(parts) > 1 else NO_SOURCE))  # type: ignore[misc]


def _source_parts(source: object) -> tuple[Any, ...] | None:
    """The tensors of the rows, then a list or a span."""
    ways: tuple[Any, ...]
    if type(source) is Listed:
        ways = source.indices, source.lengths, None, None, None, None
    elif type(source) is Span:
        ways = None, None, source.block_table, source.request, source.begin, source.end
    else:
        return None
    rows = source.rows
    stored = _cache_parts(rows) if type(rows) is LatentCache else (rows, None, "", 0)
    return (*stored, *ways)


def _turn_parts(turn_back: object) -> tuple[Any, Any] | None:
    """The table and the positions as the operator takes them; None where it is no TurnBack."""
    if turn_back is None:
        return None, None
    return (turn_back.table, turn_back.positions) if type(turn_back) is TurnBack else None


def _latent_width(sources: Sequence[object]) -> int:
    """d_v where none is given; nothing is checked."""
    rows = [getattr(source, "rows", None) for source in sources]
    return next((x.latent for x in rows if type(x) is LatentCache), 512)


def _with_lse(out: Tensor, lse: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return out if lse is None else (out, lse)


def _checked_rope(
    k_rope: object,
    q: Tensor,
    k_nope: Tensor,
    block_table: object,
    cache_lengths: object,
    batch: int,
) -> tuple[Tensor | None, LatentCache | None]:
    """Where rope comes from: a tensor, a cache, or nowhere."""
    if isinstance(k_rope, LatentCache):
        checks.rope_cache(k_rope, q, k_nope.shape[2])
        checks.paging(block_table, cache_lengths, batch, q.device)
        return None, k_rope
    rope = checks.rope_tensor(k_rope, q, k_nope)
    for name, value in (("block_table", block_table), ("cache_lengths", cache_lengths)):
        if value is not None:
            raise InvalidArgument(name, "None, unless k_rope is a LatentCache", "a tensor")
    return rope, None


def _plain_number(value: object) -> object:
    """A window or a range as the operator takes it, 0 for none; 0 from a caller makes a call that
    is not plain."""
    return 0 if value is None else value or ...


def _rope_and_pool(k_rope: object, q: Tensor) -> tuple[object, LatentCache | None]:
    """k_rope as the operator takes it, a tensor or the cache it lies in; nothing is checked."""
    if type(k_rope) is LatentCache:
        return None, k_rope
    if type(k_rope) is Tensor and k_rope.dim() == 3 and k_rope.size(1) == 1 != q.size(1):
        return k_rope.select(1, 0), None
    return k_rope, None


def _weights(
    q: Tensor, sink: object, q_scale: object, k_scale: object, keys: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """sink, q_scale and k_scale, checked."""
    sink = checks.sink(sink, q.shape[1], q.device)
    q_scale = checks.per_token_scale("q_scale", q_scale, q.shape[0], q.device)
    k_scale = checks.per_token_scale("k_scale", k_scale, keys, q.device)
    checks.no_gradients(q_scale=q_scale, k_scale=k_scale)
    return sink, q_scale, k_scale


def _outputs(
    q: Tensor, d_v: int, out: Tensor | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    checked = checks.output(out, q, d_v)
    checks.no_gradients(out=checked)
    if checked is None:
        checked = q.new_empty((*q.shape[:2], d_v), dtype=checks.out_dtype(q.dtype))
    lse = None
    if checks.flag("return_lse", return_lse):
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    return checked, lse


def _cache_parts(cache: LatentCache | None) -> tuple[Tensor | None, Tensor | None, str, int]:
    if cache is None:
        return None, None, "", 0
    return cache.data, cache.scales, cache.format, cache.latent


def _bf16_pool(rows: object, latent: int) -> LatentCache:
    """Plain rows [pages, page_size, width] as a cache."""
    pages = checks.tensor("cache", rows, ("pages", "page_size", "width"), (torch.bfloat16,))
    return LatentCache(pages.resolve_neg(), None, latent, pages.shape[2] - latent, "bf16")
