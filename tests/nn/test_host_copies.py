"""A training step of a layer copies nothing from the host but what is kept: a GPU would wait for it
in every layer, and a captured graph may not have it.

Tensors without memory (device "meta") stand for those of a GPU. While operations are watched,
nothing is kept, so whatever is made in openmla.kept shows in every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openmla import IndexCache, LatentCache, kept
from openmla.nn import Batch, IndexerConfig, MLAAttention, MLAConfig, mla
from openmla.nn.rope import Rope
from openmla.planning.form import LayerDims
from openmla.planning.target import target_by_name

LENGTHS = [70, 9]
DSA = {
    "topk": 4,
    "indexer": IndexerConfig(hidden=64, q_lora=32, heads=8, topk=4, rope=Rope(64, 1e4)),
}


class Copies(TorchDispatchMode):
    """Counts operations between devices, those inside `kept` apart."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.others = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        found = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, found)) if isinstance(x, Tensor)]
        if len({x.device.type for x in tensors if x.dim()}) > 1:
            inside = _called_from(kept.__file__)
            self.kept, self.others = self.kept + inside, self.others + (not inside)
        return found


def _called_from(file: str) -> bool:
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def plain(layer: MLAAttention, x: Tensor, batch: Batch) -> Tensor:
    return layer(x, batch.positions, batch=batch)


def with_loss(layer: MLAAttention, x: Tensor, batch: Batch) -> Tensor:
    out, loss = layer.forward_and_loss(x, batch.positions, batch, sparse=True)
    return out.float().sum() + loss.sum()


def given(layer: MLAAttention, x: Tensor, batch: Batch) -> Tensor:
    indices = torch.empty(len(x), 4, dtype=torch.int32, device=x.device)
    return layer(x, batch.positions, batch=batch, indices=indices)


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({}, plain),
        ({"gate": True}, plain),
        ({"invariant": True}, plain),
        (DSA, plain),
        (DSA, with_loss),
        (DSA, given),
    ],
)
def test_a_step_copies_nothing_from_the_host(
    options: dict[str, Any],
    step: Callable[[MLAAttention, Tensor, Batch], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mla, "device_target", lambda device: target_by_name("h200"))
    for cache in (LatentCache, IndexCache):  # on a GPU, operators of the portable family
        monkeypatch.setattr(cache, "append", lambda *arguments: None)
    dims = LayerDims(latent=512, nope=128, rope=64, v=128)
    sizes: dict[str, Any] = {"hidden": 64, "heads": 4, "dims": dims, "q_lora": 32}
    with torch.device("meta"):
        layer = MLAAttention(MLAConfig(**sizes, rope=Rope(64, 1e4), scale=0.07, **options))
        x = torch.empty(sum(LENGTHS), 64, dtype=torch.bfloat16).requires_grad_()
    batch = Batch.of(LENGTHS, device="meta")
    with Copies() as copies:
        step(layer.bfloat16(), x, batch).float().sum().backward()
    assert x.grad is not None
    assert copies.kept > 0 and copies.others == 0
