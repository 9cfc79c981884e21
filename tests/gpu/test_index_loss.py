"""The loss of an indexer on a GPU: accepted by the rule, repeatable, in graphs; a layer trains."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from gpu.on_device import DEVICE, on_gpu
from indexer.small_layer import HIDDEN, small_layer
from openmla.indexer.loss_operands import LossOperands
from openmla.lab.testing.index_loss import (
    LossCase,
    build_loss,
    faults,
    random_loss_case,
    run_loss,
)
from openmla.nn import Batch

pytestmark = on_gpu
REPEATS = 100
V32 = LossCase(
    (150, 9, 1),
    (210, 9, 1),
    heads=16,
    index_heads=64,
    d_nope=128,
    d_rope=64,
    width=128,
    sink=True,
    masked=True,
    dtype=torch.bfloat16,
)


def on_device(op: LossOperands) -> LossOperands:
    """The same tensors on the GPU."""

    def moved(x: object) -> object:
        return x.to(DEVICE) if isinstance(x, Tensor) else x

    a = op.attention
    weights = replace(a.weights, sink=moved(a.weights.sink))
    attention = replace(a, **{f.name: moved(getattr(a, f.name)) for f in fields(a)})
    own = {f.name: moved(getattr(op, f.name)) for f in fields(op)}
    return replace(op, **{**own, "attention": replace(attention, weights=weights)})


def run(op: LossOperands) -> dict[str, Tensor]:
    """On the GPU; results on the CPU."""
    return {name: x.cpu() for name, x in run_loss(on_device(op)).items()}


@pytest.mark.parametrize("seed", range(100))
def test_the_rule_accepts_random_cases(seed: int) -> None:
    op = build_loss(replace(random_loss_case(seed), dtype=torch.bfloat16))
    assert faults(op, run(op), rounds_dz=True) == []


@pytest.mark.parametrize("rope", ["shared", "per_head"])
@pytest.mark.parametrize("causal", [False, True])
def test_model_widths(rope: str, causal: bool) -> None:
    op = build_loss(replace(V32, rope=rope, causal=causal, scale=192**-0.5))
    assert faults(op, run(op), rounds_dz=True) == []


@pytest.mark.parametrize("background", [torch.nan, torch.inf])
def test_memory_that_is_not_addressed_reaches_nothing(background: float) -> None:
    clean, found = run(build_loss(V32)), run(build_loss(V32, 3, background))
    for name, x in clean.items():
        assert torch.equal(found[name][: len(x)], x) and not found[name][len(x) :].any(), name


def test_repeats_and_a_captured_step_have_equal_bits() -> None:
    op = on_device(build_loss(V32))
    first = run_loss(op)
    for i in range(REPEATS):
        again = run_loss(op)
        assert all(torch.equal(x, again[name]) for name, x in first.items()), i
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_loss(op)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, captured[name]) for name, x in first.items())


def test_a_layer_learns_what_its_attention_looks_at() -> None:
    layer, batch = small_layer().to(DEVICE), Batch.of([40, 25], device=DEVICE)
    x = torch.randn(65, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    for sparse in (False, True):
        layer.zero_grad()
        _, loss = layer.forward_and_loss(x, batch.positions, batch, sparse)
        loss.mean().backward()
        names = {name for name, p in layer.named_parameters() if p.grad is not None}
        assert names == {n for n, _ in layer.named_parameters() if n.startswith("indexer.")}
