"""What runs on every rank of a group: one step of a layer whose weights FSDP2 has sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import openmla
from openmla import Unsupported
from openmla.nn import Batch, IndexerConfig, MLAAttention, MLAConfig
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims

LENGTHS = [9, 4]


def layer() -> MLAAttention:
    """The same weights everywhere."""
    torch.manual_seed(3)
    config = MLAConfig(
        hidden=32,
        heads=4,
        dims=LayerDims(latent=16, nope=8, rope=4, v=8),
        q_lora=0,
        rope=Rope(width=4, theta=100.0),
        scale=12**-0.5,
    )
    return MLAAttention(config)


def selecting_layer() -> MLAAttention:
    """One with an indexer, the same everywhere."""
    torch.manual_seed(4)
    rope = Rope(width=4, theta=100.0)
    config = MLAConfig(
        hidden=32,
        heads=4,
        dims=LayerDims(latent=16, nope=8, rope=4, v=8),
        q_lora=16,
        rope=rope,
        scale=12**-0.5,
        topk=3,
        indexer=IndexerConfig(hidden=32, q_lora=16, heads=4, topk=3, rope=rope),
    )
    return MLAAttention(config)


def step_with_loss(module: MLAAttention, seed: int) -> None:
    """Gradients of a batch's outputs and of its indexer's loss."""
    batch = Batch.of(LENGTHS)
    x = torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(seed))
    out, loss = module.forward_and_loss(x, batch.positions, batch, sparse=True)
    (out.square().sum() + loss.sum()).backward()


def sharded_with_loss(rank: int, world: int) -> dict[str, Tensor]:
    """As sharded_gradients, by a method that FSDP2 has to be told of."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    module = selecting_layer()
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    register_fsdp_forward_method(module, "forward_and_loss")
    step_with_loss(module, seed=rank)
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


def step(module: nn.Module, seed: int) -> None:
    """Gradients of one batch, which the seed draws."""
    batch = Batch.of(LENGTHS)
    x = torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(seed))
    module(x, batch.positions, batch=batch).float().square().sum().backward()


def sharded_gradients(rank: int, world: int, how: str = "layer") -> dict[str, Tensor]:
    """Gradients of the mean over the ranks, each with a batch of its own.

    how: "layer" as a whole, its "projections" by themselves too, or in "bf16".
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    module, options = layer(), {}
    if how == "bf16":
        narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": narrow}
    if how == "projections":
        for projection in module.children():
            fully_shard(projection, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(module, mesh=init_device_mesh("cpu", (world,)), **options)
    step(module, seed=rank)
    return {name: p.grad.full_tensor() for name, p in module.named_parameters()}


def replicated_gradients(rank: int, world: int) -> dict[str, Tensor]:
    """Likewise, by DistributedDataParallel, whose forward pass is computed again."""
    module = nn.parallel.DistributedDataParallel(layer(), static_graph=True)
    batch = Batch.of(LENGTHS)
    x = torch.randn(sum(LENGTHS), 32, generator=torch.Generator().manual_seed(rank))

    def run(x: Tensor) -> Tensor:
        return module(x, batch.positions, batch=batch)

    checkpoint(run, x.requires_grad_(), use_reentrant=False).square().sum().backward()
    return {name: p.grad for name, p in module.module.named_parameters()}


def attend_heads(q: Tensor, kv: Tensor, k_rope: Tensor, cu_seqlens: Tensor) -> Tensor:
    """A call of 16 columns of K and V, 8 of rope."""
    return openmla.mla_prefill(q, kv[..., :16], k_rope, kv[..., 16:], cu_seqlens_q=cu_seqlens)


def rows_of_heads() -> tuple[list[Tensor], Tensor]:
    """q, kv and k_rope of four heads, the same everywhere, and offsets."""
    g = torch.Generator().manual_seed(1)
    rows = [torch.randn(*shape, generator=g) for shape in ((8, 4, 24), (8, 4, 32), (8, 8))]
    return rows, torch.tensor([0, 5, 8], dtype=torch.int32)


def mapped_gradients(rank: int, world: int) -> tuple[list[Tensor], str]:
    """Gradients of DTensors whose heads are split, by local_map; what a call without it says."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    mesh, (rows, cu) = init_device_mesh("cpu", (world,)), rows_of_heads()
    heads, whole = [Shard(1)], [Replicate()]
    attend_sharded = local_map(
        attend_heads,
        out_placements=heads,
        in_placements=(heads, heads, whole, None),
        in_grad_placements=(heads, heads, [Partial()], None),
        device_mesh=mesh,
    )
    places = heads, heads, whole
    given = [distribute_tensor(x, mesh, p) for x, p in zip(rows, places, strict=True)]
    try:
        attend_heads(*given, cu)
    except Unsupported as error:
        said = str(error)
    given = [x.requires_grad_() for x in given]
    attend_sharded(*given, cu).to_local().square().sum().backward()
    return [x.grad.full_tensor() for x in given], said
