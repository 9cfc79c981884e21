"""A layer on two gloo ranks, sharded by FSDP2 or copied by DDP: the gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backward import on_ranks
from distributed.ranks import Ranks

CLOSE, ROUNDED = 1e-5, 3e-2
"""Shares of a gradient's norm: of sums in another order, and of weights that bf16 has rounded."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "how", "close"),
    [
        (on_ranks.sharded_gradients, ("layer",), CLOSE),
        (on_ranks.sharded_gradients, ("projections",), CLOSE),
        (on_ranks.sharded_gradients, ("bf16",), ROUNDED),
        (on_ranks.replicated_gradients, (), CLOSE),
        (on_ranks.sharded_with_loss, (), CLOSE),
    ],
)
def test_ranks_have_the_gradients_of_one_process(
    train: Callable[..., Any], how: tuple[str, ...], close: float
) -> None:
    with_loss = train is on_ranks.sharded_with_loss
    expected: dict[str, torch.Tensor] = {}
    for seed in (0, 1):
        module = on_ranks.selecting_layer() if with_loss else on_ranks.layer()
        (on_ranks.step_with_loss if with_loss else on_ranks.step)(module, seed)
        for name, p in module.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad / 2
    with Ranks(2) as ranks:
        for found in ranks.run(train, *how):
            assert set(found) == set(expected)
            for name, x in found.items():
                assert x.dtype == torch.float32, name
                assert (x - expected[name]).norm() <= close * expected[name].norm(), name


@pytest.mark.slow
def test_heads_of_dtensors_are_mapped() -> None:
    """As docs/torchtitan-and-megatron.md has it; a DTensor that is handed to a call is refused."""
    rows, cu = on_ranks.rows_of_heads()
    whole = [x.requires_grad_() for x in rows]
    expected = torch.autograd.grad(on_ranks.attend_heads(*whole, cu).square().sum(), whole)
    with Ranks(2) as ranks:
        for found, said in ranks.run(on_ranks.mapped_gradients):
            for got, want in zip(found, expected, strict=True):
                assert (got - want).abs().max() <= CLOSE * want.abs().max()
            assert said.startswith("q is a DTensor, and openmla has no sharding rules")
