"""What runs on every rank: a tiny model on this rank's tokens."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import openmla
from integrations.transformers.tiny import tiny
from openmla.distributed import split
from openmla.integrations.transformers import gather_cache, optimize

HEADS = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}


def prompt(lengths: tuple[int, ...]) -> Tensor:
    """Sequences end to end."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(2, 128, (1, sum(lengths)), generator=generator)


@torch.no_grad()
def prefilled(
    rank: int, world: int, kind: str, form: str, lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(rows of the batch, their logits) of this rank."""
    model = tiny(kind, dtype)
    optimize(model, form, group=dist.group.WORLD)
    shard = split(lengths, world, rank)
    return shard.rows(), _logits(model, lengths, shard)


@torch.no_grad()
def prefilled_in_a_mesh(rank: int, world: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """2 x 2 ranks: sequences over one dimension, heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    model = deepcopy(tiny("deepseek_v3"))
    for layer in model.model.layers:
        parallelize_module(layer.self_attn, mesh["heads"], HEADS)
    optimize(model, group=mesh["context"].get_group())
    shard = split(lengths, 2, mesh["context"].get_local_rank())
    return shard.rows(), _logits(model, lengths, shard)


@torch.no_grad()
def generated(rank: int, world: int, length: int, more: int) -> list[int]:
    """Greedy tokens after a prompt that all ranks computed together."""
    model = tiny("deepseek_v3")
    optimize(model, group=dist.group.WORLD)
    ids, shard = prompt((length,)), split([length], world, rank)
    mine = ids[:, shard.rows()]
    out = model(mine, position_ids=shard.positions()[None], shard=shard)
    cache = gather_cache(out.past_key_values, shard, dist.group.WORLD)
    last = torch.zeros(1, model.config.vocab_size)  # whoever has the last token knows what follows
    if length - 1 in shard.rows():
        last = out.logits[:, shard.rows().tolist().index(length - 1)].float()
    dist.all_reduce(last)
    found: list[int] = []
    for _ in range(more):
        found.append(int(last.argmax()))
        step = model(torch.tensor([[found[-1]]]), past_key_values=cache)
        last = step.logits[:, -1]
    return found


@torch.no_grad()
def refused(rank: int, world: int, how: str) -> str:
    """What a call that cannot be right is told."""
    model, shard = tiny("deepseek_v3"), split([12], world, rank)
    optimize(model, group=None if how == "group" else dist.group.WORLD)
    options: dict[str, Any] = {"position_ids": shard.positions()[None], "shard": shard}
    ids = prompt((12,))[:, shard.rows()]
    if how == "mask":
        options["attention_mask"] = torch.zeros_like(ids)
    if how == "tokens" and rank == 1:  # the others are told too
        ids, options["position_ids"] = ids[:, 1:], options["position_ids"][:, 1:]
    if how == "cached":
        options["past_key_values"] = model(ids).past_key_values
    if how == "lengths":
        options["shard"] = split([12 + rank], world, rank)
        ids = prompt((13,))[:, : options["shard"].tokens]
        options["position_ids"] = options["shard"].positions()[None]
    try:
        model(ids, **options)
    except openmla.OpenMLAError as error:
        return str(error)
    return ""


def _logits(model: Any, lengths: tuple[int, ...], shard: Any) -> Tensor:
    ids, positions = prompt(lengths)[:, shard.rows()], shard.positions()[None]
    return model(ids, position_ids=positions, shard=shard).logits[0]


def trained(rank: int, world: int, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """This rank's part of every parameter's gradient."""
    model = optimize(deepcopy(tiny("deepseek_v3")), group=dist.group.WORLD)
    shard = split(lengths, world, rank)
    _logits(model, lengths, shard).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
