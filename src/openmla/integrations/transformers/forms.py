"""The ways to attend, over what a layer of Transformers has at hand.

    expanded   mla_prefill: K and V per head, from kv_b_proj or ready made
    masked     expanded, with bits that hide the keys which the model's indexer did not select
    latent     the queries go through kv_b_proj, keys and values are the cached rows themselves
    sparse     latent, over the rows that the model's indexer selected

Queries are [B, H, S, nope + rope] as Transformers has them, rows [B, 1, T, width] as it caches
them; results are [B, S, H, v].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla.errors import Unsupported
from openmla.integrations.transformers.masks import Ragged, bits

PAGE = 64


@dataclass(frozen=True)
class Heads:
    """One layer's part in the arithmetic: its widths, and the projection from latent to K and V."""

    nope: int
    v: int
    projection: Any
    """kv_b_proj: [.., latent] -> [.., H * (nope + v)], each head's K before its V."""

    @staticmethod
    def of(module: Any) -> Heads:
        """The heads of an attention module that has `kv_b_proj`."""
        return Heads(module.qk_nope_head_dim, module.v_head_dim, module.kv_b_proj)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """[keys, latent] -> K without rope [keys, H, nope] and V [keys, H, v], views of one."""
        kv = self.projection(latent).view(latent.shape[0], -1, self.nope + self.v)
        k_nope, v = kv.split_with_sizes((self.nope, self.v), -1)
        return k_nope, v

    def absorb(self, query: Tensor) -> Tensor:
        """[B, H, S, nope + rope] -> [B, S, H, latent + rope], to be compared with cached rows."""
        to_k = self._weight()[:, : self.nope]
        latent = torch.einsum("bhsn,hnl->bshl", query[..., : self.nope], to_k)
        return torch.cat([latent, query[..., self.nope :].transpose(1, 2)], dim=-1)

    def release(self, out: Tensor) -> Tensor:
        """[B, S, H, latent] -> [B, S, H, v]."""
        return torch.einsum("bshl,hvl->bshv", out, self._weight()[:, self.nope :])

    def why_not_latent(self) -> str:
        """Why queries cannot go through the projection; "" when they can."""
        if type(self.projection) is not nn.Linear:
            return f"kv_b_proj is a {type(self.projection).__name__}, not a plain nn.Linear"
        return "" if self.projection.bias is None else "kv_b_proj has a bias"

    def _weight(self) -> Tensor:
        """[H, nope + v, latent]."""
        why = self.why_not_latent()
        if why:
            raise Unsupported(why, nearest='optimize(model, form="expanded")')
        weight: Any = self.projection.weight
        if hasattr(weight, "to_local"):  # heads are split over ranks
            weight = weight.to_local()
        by_head: Tensor = weight.view(-1, self.nope + self.v, weight.shape[1])
        return by_head


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the type of the autocast around the call, as torch's SDPA takes them: some come
    from projections, which have it, and others from norms and rope, which are in float32."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def expanded(
    query: Tensor, heads: Heads, rows: tuple[Tensor, Tensor], keep: Tensor | None, **options: Any
) -> Tensor:
    """mla_prefill over K and V of the cached rows: latent [B, 1, T, latent], rope [B, 1, T, rope].

    Padding is moved behind the rest while rows are still narrow.
    """
    ragged = Ragged.of(keep, query.shape[0], query.shape[2], rows[0].shape[2], query.device)
    latent, rope = (ragged.rows(x) for x in rows)
    k_nope, v = heads.expand(latent)
    return prefilled(query, k_nope, rope, v, ragged, **options)


def masked(
    query: Tensor, heads: Heads, rows: tuple[Tensor, Tensor], seen: Tensor, **options: Any
) -> Tensor:
    """mla_prefill over K and V of all cached rows, of which each query sees what bool
    [B or 1, 1, S, T] says: how selected keys have gradients."""
    b, _, s, _ = query.shape
    ragged = Ragged.of(None, b, s, rows[0].shape[2], query.device)
    latent, rope = (ragged.rows(x) for x in rows)
    k_nope, v = heads.expand(latent)
    shown = bits(seen.expand(b, -1, -1, -1))
    return prefilled(query, k_nope, rope, v, ragged, causal=False, key_mask=shown, **options)


def dense(
    query: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    keep: Tensor | None,
    **options: Any,
) -> Tensor:
    """mla_prefill. k_nope [B, T, H or 1, nope], k_rope [B, T, rope], v [B, T, H or 1, v]."""
    b, h, s, _ = query.shape
    ragged = Ragged.of(keep, b, s, k_rope.shape[1], query.device)
    k_nope, v = (ragged.keys(x).expand(-1, h, -1) for x in (k_nope, v))
    return prefilled(query, k_nope, ragged.keys(k_rope), v, ragged, **options)


def prefilled(
    query: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, ragged: Ragged, **options: Any
) -> Tensor:
    """mla_prefill over ragged keys, k_nope [keys, H, nope]; its rows as `query` has them."""
    out = openmla.mla_prefill(
        ragged.queries(query.transpose(1, 2)),
        k_nope,
        k_rope,
        v,
        cu_seqlens_q=ragged.cu_q,
        cu_seqlens_k=ragged.cu_k,
        **options,
    )
    assert isinstance(out, Tensor)
    return ragged.restored(out, query.shape[0])


def latent(
    query: Tensor, heads: Heads, rows: tuple[Tensor, Tensor], keep: Tensor | None, **options: Any
) -> Tensor:
    """Absorbed queries over the cached rows: latent [B, 1, T, latent], rope [B, 1, T, rope]."""
    absorbed = heads.absorb(query)
    if query.dtype == torch.bfloat16:
        out = _paged(absorbed, rows, keep, **options)
    else:
        # Pages hold bf16. In float32 (on a CPU) one row stands for every head instead, uncopied.
        shared = rows[0].transpose(1, 2)
        out = dense(absorbed.transpose(1, 2), shared, rows[1][:, 0], shared, keep, **options)
    return heads.release(out)


def sparse(
    query: Tensor, heads: Heads, rows: tuple[Tensor, Tensor], indices: Tensor, **options: Any
) -> Tensor:
    """Absorbed queries over the rows that indices int [B, S, topk] name; -1 names none."""
    b, _, t, width = rows[0].shape
    first = torch.arange(b, device=indices.device, dtype=torch.int32).view(b, 1, 1) * t
    physical = torch.where(indices < 0, -1, indices.to(torch.int32) + first)
    out = openmla.mla_prefill_sparse(
        heads.absorb(query).flatten(0, 1),
        torch.cat(rows, dim=-1).flatten(0, 2),
        physical.flatten(0, 1),
        d_v=width,
        **options,
    )
    assert isinstance(out, Tensor)
    return heads.release(out.view(b, -1, *out.shape[1:]))


def visible(indices: Tensor, mask: Tensor) -> Tensor:
    """`indices` [B, S, topk] with -1 where the mask bool [B, 1, S, T] hides the key.

    The indexer's top-k of an early query names keys of the future, having no others to name.
    """
    named = indices.clamp(min=0).long()
    seen = mask[:, 0].expand(indices.shape[0], -1, -1).gather(-1, named)
    return torch.where(seen & (indices >= 0), indices, -1)


def unique(indices: Tensor) -> Tensor:
    """`indices` with all but one of equal entries in a row replaced by -1: a duplicate counts."""
    ordered = indices.sort(dim=-1).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    return ordered.masked_fill(repeated, -1)


def _paged(
    absorbed: Tensor, rows: tuple[Tensor, Tensor], keep: Tensor | None, **options: Any
) -> Tensor:
    """mla_prefill_latent over a copy of the rows in pages, padding moved behind the rest."""
    b, s, _, _ = absorbed.shape
    t, width = rows[0].shape[2:]
    ragged = Ragged.of(keep, b, s, t, absorbed.device)
    pages = -(-t // PAGE)
    # A size that does not change from token to token keeps one compiled kernel.
    pool = absorbed.new_empty(b, pages * PAGE, absorbed.shape[3])
    pool[:, :t, :width] = rows[0][:, 0]
    pool[:, :t, width:] = rows[1][:, 0]
    lengths = torch.full((b,), t, dtype=torch.int32, device=pool.device)
    if keep is not None:
        order = torch.argsort(~keep, dim=1, stable=True)
        pool[:, :t] = pool[:, :t].gather(1, order[..., None].expand(-1, -1, pool.shape[2]))
        lengths = keep.sum(1, dtype=torch.int32)
    table = torch.arange(b * pages, dtype=torch.int32, device=pool.device).view(b, pages)
    cache = openmla.LatentCache(
        pool.view(b * pages, PAGE, -1), None, width, pool.shape[2] - width, "bf16"
    )
    out = openmla.mla_prefill_latent(
        ragged.queries(absorbed), cache, table, lengths, cu_seqlens_q=ragged.cu_q, **options
    )
    assert isinstance(out, Tensor)
    return ragged.restored(out, b)
