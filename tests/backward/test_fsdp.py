"""A layer whose weights are sharded by FSDP2, on two gloo ranks: the gradients of one process."""

from __future__ import annotations

import pytest
import torch

from backward import on_ranks
from distributed.ranks import Ranks


@pytest.mark.slow
def test_sharded_weights_have_the_gradients_of_one_process() -> None:
    expected: dict[str, torch.Tensor] = {}
    for seed in (0, 1):
        module = on_ranks.layer()
        on_ranks.step(module, seed)
        for name, p in module.named_parameters():
            expected[name] = expected.get(name, 0) + p.grad / 2
    with Ranks(2) as ranks:
        for found in ranks.run(on_ranks.sharded_gradients):
            assert set(found) == set(expected)
            for name, x in found.items():
                assert torch.allclose(x, expected[name], rtol=1e-5, atol=1e-6), name
