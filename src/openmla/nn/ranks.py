"""A layer over several ranks: sequences over one group, heads over another.

    shard = split(lengths, world, rank)                       # openmla.distributed
    out = layer(x, shard.positions(), cache, batch, shard=shard, group=group)
    split_heads(layer, mesh["heads"])                         # before, where heads are split too

x are this rank's tokens, the batch is that of all ranks, and so are the pages of its caches: rows
travel once and go into every rank's cache. Every part of a shard is a sequence whose keys end where
it ends (openmla.distributed.attention), for the indexer of a DSA layer as well, whose keys travel
likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from openmla.cache import LatentCache
from openmla.distributed import (
    ContextShard,
    gather_latent,
    prefill,
    prefill_latent,
    prefill_sparse,
)
from openmla.distributed.agreement import Facts, Group, check_together
from openmla.errors import InvalidArgument
from openmla.indexer.cache import IndexCache
from openmla.nn.batch import Batch, integers
from openmla.nn.indexer import Indexer, own_pages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from openmla.nn.mla import MLAAttention


def forward(
    layer: MLAAttention,
    x: Tensor,
    positions: Tensor,
    caches: tuple[LatentCache | None, IndexCache | None],
    batch: Batch | None,
    indices: Tensor | None,
    shard: ContextShard,
    group: Group,
) -> Tensor:
    """[tokens, hidden] of this rank; see MLAAttention.forward."""
    from openmla.nn.mla import check

    if not isinstance(shard, ContextShard):
        raise InvalidArgument("shard", "what split returns", type(shard).__name__)
    batch = batch or Batch.of(shard.lengths, shard.cached, device=x.device)
    (cache, keys), form = caches, layer.choose(batch).form

    def facts() -> Facts:
        check_shard(x, cache, batch, shard)
        check(x, positions, cache, batch, shard.tokens)
        if form == "sparse":
            layer.check_selection(batch, indices, keys)
        return {"form": form, "index_cache": keys is not None}

    check_together("MLAAttention", group, shard.world, facts)
    compressed = layer.compress_queries(x) if layer.config.q_lora else None
    rows = layer.project(x, positions, compressed)
    if isinstance(layer.indexer, Indexer) and indices is None and compressed is not None:
        given = x, compressed, positions
        indices = _selected(layer.indexer, given, form, keys, batch, shard, group)
    out = _attended(layer, rows, form, cache, batch, indices, shard, group)
    return layer.output(out, x)


def _attended(
    layer: MLAAttention,
    rows: tuple[Tensor, Tensor, Tensor],
    form: str,
    cache: LatentCache | None,
    batch: Batch,
    indices: Tensor | None,
    shard: ContextShard,
    group: Group,
) -> Tensor:
    """[tokens, heads, v] of this rank's rows: queries, latent, rope, as `project` makes them.

    `indices` are places in the query's own sequence, for the sparse form.
    """
    q, latent, rope = rows
    pages = {} if cache is None else {"cache": cache, "block_table": batch.block_table}
    # The layer has no number: every layer asks whether all ranks agree.
    options: dict[str, Any] = {**pages, "scale": layer.config.scale}
    if form == "sparse" and indices is not None:
        page_size = None if cache is None else cache.page_size
        named = _rows_of(indices, batch, shard, page_size)
        out = prefill_sparse(layer.absorb(q), latent, rope, named, shard, group, **options)
    elif form == "latent" and cache is not None:
        out = prefill_latent(layer.absorb(q), latent, rope, shard, group, **options)
    else:
        out = prefill(q, latent, rope, layer.expand, shard, group, **options)
        assert isinstance(out, Tensor)
        return out
    assert isinstance(out, Tensor)
    return layer.release(out)


def _selected(
    indexer: Indexer,
    given: tuple[Tensor, Tensor, Tensor],
    form: str,
    cache: IndexCache | None,
    batch: Batch,
    shard: ContextShard,
    group: Group,
) -> Tensor | None:
    """Lists of this rank's tokens, where the form needs some; index keys go to every rank."""
    if form != "sparse" and cache is None:
        return None
    if cache is None:
        cache, batch = own_pages(batch)
    q, k, weights = indexer.project(*given)
    cache.append(gather_latent(k, shard, group), batch.slots(cache.page_size))
    if form != "sparse":
        return None
    found = indexer.select(q, weights, _parts(batch, shard), cache)
    assert isinstance(found, Tensor)
    return found


def check_shard(x: Tensor, cache: LatentCache | None, batch: Batch, shard: ContextShard) -> None:
    """A shard must be that of the batch, x this rank's tokens, and rows what pages give back."""
    if (batch.new, batch.context) != (shard.lengths, shard.cached):
        expected = f"that of all ranks: {shard.lengths} new tokens after {shard.cached}"
        raise InvalidArgument("batch", expected, f"{batch.new} after {batch.context}")
    if x.shape[0] != shard.tokens:
        raise InvalidArgument("x", f"{shard.tokens} rows, as this rank has", x.shape[0])
    if cache is not None and x.dtype != torch.bfloat16:
        raise InvalidArgument("x", "torch.bfloat16 beside a cache and a shard", str(x.dtype))


def split_heads(layer: MLAAttention, mesh: DeviceMesh) -> None:
    """Keep this rank's heads alone, of a mesh of one dimension; outputs are summed over it.

    In training so are gradients of what all heads share: weights that are not split have the same
    gradients on every rank, those of one process.

    Args:
        layer: the layer, with all its weights; its parameters are replaced.
        mesh: a DeviceMesh of one dimension, whose size divides the heads.

    Raises:
        InvalidArgument: heads do not divide evenly.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if layer.config.heads % mesh.size():
        raise InvalidArgument("mesh", f"a divisor of {layer.config.heads} heads", mesh.size())
    queries = "q_b_proj" if layer.config.q_lora else "q_proj"
    by_head = {queries: ColwiseParallel(), "kv_b_proj": ColwiseParallel()}
    if layer.config.gate:
        by_head["g_proj"] = ColwiseParallel()
    parallelize_module(layer, mesh, {**by_head, "o_proj": RowwiseParallel()})
    if layer.config.dims.rope:
        layer.kv_a_proj_with_mqa.register_forward_hook(_Shared(layer.config.dims.rope, mesh))


class _Shared:
    """A hook behind the projection to rows. Heads of every rank give a part of the gradient of the
    rope columns, which is summed over the ranks; that of the latent was summed by kv_b_proj."""

    def __init__(self, rope: int, mesh: DeviceMesh) -> None:
        self.rope, self.mesh = rope, mesh

    def __call__(self, module: object, given: object, rows: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and rows.requires_grad):
            return rows
        from torch.distributed.tensor import DTensor, Partial, Replicate

        latent, rope = rows.tensor_split([rows.shape[-1] - self.rope], -1)
        everywhere = DTensor.from_local(rope, self.mesh, [Replicate()], run_check=False)
        return torch.cat([latent, everywhere.to_local(grad_placements=[Partial()])], -1)


def _parts(batch: Batch, shard: ContextShard) -> Batch:
    """The parts of a shard as a batch, over the pages of their sequences."""
    table = batch.block_table
    if table is not None:
        sequences = tuple(part.sequence for part in shard.parts)
        table = table[integers(sequences, torch.int64, table.device)]
    new = [part.tokens for part in shard.parts]
    before = [part.keys - part.tokens for part in shard.parts]
    return Batch.of(new, before, table, batch.cu_seqlens.device)


def _rows_of(indices: Tensor, batch: Batch, shard: ContextShard, page_size: int | None) -> Tensor:
    """Physical rows of places in the query's own sequence; without pages, rows of the batch."""
    parts = _parts(batch, shard)
    if page_size is not None:
        return parts.selected_rows(indices, page_size)
    firsts = tuple(shard.offsets[part.sequence] for part in shard.parts)
    first = integers(firsts, torch.int32, indices.device)[parts.sequences, None]
    inside = (indices >= 0) & (indices <= parts.positions[:, None])
    return torch.where(inside, indices + first, -1).to(torch.int32)
