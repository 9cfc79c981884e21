"""What runs on every rank: one layer on this rank's tokens. Every rank makes the same batch."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import openmla
from openmla import LatentCache
from openmla.distributed import split
from openmla.indexer.cache import IndexCache
from openmla.nn import Batch, MLAAttention, split_heads

PAGE, PAGES = 16, 8


@dataclass(frozen=True, eq=False)
class Setting:
    """A layer and the hidden states of all tokens, sequences end to end; `cached` come before."""

    layer: MLAAttention
    x: Tensor
    new: tuple[int, ...]
    cached: tuple[int, ...]
    paged: bool = False

    def first(self) -> tuple[LatentCache | None, IndexCache | None, Tensor | None]:
        """The caches with the cached tokens in them, and their pages."""
        if not self.paged:
            return None, None, None
        config, count = self.layer.config, len(self.new) * PAGES
        dims = {"latent": config.dims.latent, "rope": config.dims.rope}
        cache = LatentCache.allocate(num_pages=count, page_size=PAGE, **dims)
        keys = IndexCache.allocate(num_pages=count, page_size=PAGE) if config.topk else None
        table = torch.arange(count, dtype=torch.int32).flip(0).view(len(self.new), PAGES)
        if any(self.cached):
            batch = Batch.of(self.cached, block_table=table)
            x = self.x[self.tokens(before=True)]
            self.layer(x, batch.positions, cache, batch, index_cache=keys)
        return cache, keys, table

    def tokens(self, before: bool = False) -> Tensor:
        """Rows of x that are new, or that are cached."""
        found, start = [], 0
        for new, cached in zip(self.new, self.cached, strict=True):
            part = (start, start + cached) if before else (start + cached, start + cached + new)
            found.append(torch.arange(*part))
            start += cached + new
        return torch.cat(found)

    @torch.no_grad()
    def run(self, layer: MLAAttention, rank: int, world: int, group: Any) -> tuple[Tensor, Any]:
        """(rows of the batch, what the layer makes of them); all of them where world is 0."""
        cache, keys, table = self.first()
        x = self.x[self.tokens()]
        batch = Batch.of(self.new, self.cached, table)
        if not world:
            out = layer(x, batch.positions, cache, batch, index_cache=keys)
            return torch.arange(len(x)), out
        shard = split(self.new, world, rank, cached=self.cached)
        mine = x[shard.rows()]
        out = layer(
            mine, shard.positions(), cache, batch, index_cache=keys, shard=shard, group=group
        )
        # A sum over heads of other ranks is on its way until somebody computes with it.
        return shard.rows(), (out.clone(), cache if cache is None else cache.data)


def attended(rank: int, world: int, setting: Setting) -> tuple[Tensor, Any]:
    return setting.run(setting.layer, rank, world, dist.group.WORLD)


def attended_in_a_mesh(rank: int, world: int, setting: Setting) -> tuple[Tensor, Any]:
    """2 x 2 ranks: sequences over one dimension, heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    layer = deepcopy(setting.layer)
    split_heads(layer, mesh["heads"])
    context = mesh["context"]
    return setting.run(layer, context.get_local_rank(), 2, context.get_group())


def refused(rank: int, world: int, setting: Setting, how: str) -> str:
    """What a call that cannot be right is told."""
    shard = split(setting.new, world, rank)
    x, batch = setting.x[shard.rows()], Batch.of(setting.new)
    if how == "batch":
        batch = Batch.of([n + 1 for n in setting.new])
    if how == "rows" and rank == 1:  # the others are told too
        x = x[1:]
    try:
        setting.layer(x, shard.positions(), None, batch, shard=shard, group=dist.group.WORLD)
    except openmla.OpenMLAError as error:
        return str(error)
    return ""


def trained(rank: int, world: int, setting: Setting) -> dict[str, Tensor]:
    """This rank's part of every weight's gradient; all of it where the world is 1."""
    layer = deepcopy(setting.layer).requires_grad_()
    shard = split(setting.new, world, rank)
    x, batch = setting.x[shard.rows()], Batch.of(setting.new)
    group = dist.group.WORLD if world > 1 else None
    out = layer(x, shard.positions(), None, batch, shard=shard, group=group)
    out.square().sum().backward()
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


def trained_by_heads(rank: int, world: int, setting: Setting) -> dict[str, Tensor]:
    """Gradients of x and of every weight, where each rank has some heads of all tokens."""
    layer, x = deepcopy(setting.layer).requires_grad_(), setting.x.clone().requires_grad_()
    if world > 1:
        split_heads(layer, init_device_mesh("cpu", (world,)))
    batch = Batch.of(setting.new)
    layer(x, batch.positions, batch=batch).square().sum().backward()
    found: dict[str, Any] = {name: p.grad for name, p in layer.named_parameters()}
    found = {name: g for name, g in found.items() if g is not None}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
    return {**whole, "x": x.grad}


def trained_in_a_mesh(rank: int, world: int, setting: Setting) -> dict[str, Tensor]:
    """Every weight's gradient: sequences over one dimension of a mesh, heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    layer, context = deepcopy(setting.layer).requires_grad_(), mesh["context"]
    split_heads(layer, mesh["heads"])
    shard = split(setting.new, 2, context.get_local_rank())
    x, batch = setting.x[shard.rows()], Batch.of(setting.new)
    group = context.get_group()
    out = layer(x, shard.positions(), None, batch, shard=shard, group=group)
    out.square().sum().backward()
    found: dict[str, Tensor] = {}
    for name, p in layer.named_parameters():
        whole: Any = p.grad
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        dist.all_reduce(whole, group=group)
        found[name] = whole
    return found


def loss_by_heads(rank: int, world: int, setting: Setting) -> str:
    """What the loss of an indexer is told where a rank has some heads."""
    layer = deepcopy(setting.layer)
    split_heads(layer, init_device_mesh("cpu", (world,)))
    batch = Batch.of(setting.new)
    try:
        layer.forward_and_loss(setting.x, batch.positions, batch)
    except openmla.Unsupported as error:
        return str(error)
    return ""
