"""A layer's training step as a captured graph: nothing in it waits for the host, and what it reads
stays where it is, whatever is made between the replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpu.on_device import DEVICE, normal, on_gpu
from indexer.small_layer import HIDDEN, small_layer
from openmla.nn import Batch, MLAAttention
from openmla.nn.batch import MOST_KEPT
from openmla.planning.form import LayerDims

pytestmark = on_gpu
LENGTHS = (40, 25)
REPLAYS = 20
WIDE = LayerDims(latent=512, nope=128, rope=64, v=128)


def layer_of(kind: str) -> MLAAttention:
    torch.manual_seed(0)
    config = small_layer().config
    if kind in ("expanded", "invariant"):
        assert config.rope is not None
        rope = replace(config.rope, width=WIDE.rope)
        options = {"dims": WIDE, "rope": rope, "topk": 0, "indexer": None}
        config = replace(config, **options, invariant=kind == "invariant")
    return MLAAttention(config).to(DEVICE, torch.bfloat16)


def gradients(layer: MLAAttention, kind: str, x: Tensor) -> list[Tensor]:
    """Of the weights that have one; the batch is made anew, as a trainer does."""
    batch = Batch.of(LENGTHS, device=DEVICE)
    if kind == "indexer's loss":
        out, loss = layer.forward_and_loss(x, batch.positions, batch, sparse=True)
        total = out.float().square().sum() + loss.sum()
    else:
        total = layer(x, batch.positions, batch=batch).float().square().sum()
    found = torch.autograd.grad(total, list(layer.parameters()), allow_unused=True)
    return [g for g in found if g is not None]


@pytest.mark.parametrize("kind", ["expanded", "selected keys", "indexer's loss", "invariant"])
def test_a_captured_step_of_a_layer_replays(kind: str) -> None:
    layer, x = layer_of(kind), normal(sum(LENGTHS), HIDDEN)
    want = gradients(layer, kind, x)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(layer, kind, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = gradients(layer, kind, x)
    graph.replay()
    torch.cuda.synchronize()
    first = [g.clone() for g in got]
    # Products of torch may be other kernels while a graph is captured.
    for mine, plain in zip(first, want, strict=True):
        assert (mine.float() - plain.float()).norm() <= 1e-2 * plain.float().norm()
    for i in range(REPLAYS):
        for n in range(MOST_KEPT):  # whose lengths would take the place of the graph's
            Batch.of((n + 1, i), device=DEVICE)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), i
