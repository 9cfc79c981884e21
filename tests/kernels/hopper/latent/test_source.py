"""Where work items of the latent kernel come from."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_sim import intercept
from openmla.kernels.hopper.latent.source import longest_first


@gluon.jit
def order_kernel(lengths_ptr, order_ptr, tokens):
    for turn in range(0, tokens):
        gl.store(order_ptr + turn, longest_first(turn, tokens, lengths_ptr))


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 150])
def test_the_last_64_lists_are_drawn_longest_first(tokens: int):
    """Lengths may be equal, negative, or beyond the list: every token has one turn."""
    lengths = torch.randint(-3, 40, (tokens,), generator=torch.Generator().manual_seed(0)).int()
    order = torch.empty(tokens, dtype=torch.int32)
    with intercept() as reports:
        order_kernel[(1,)](lengths, order, tokens)
    assert all(report.ok for report in reports)
    first = max(tokens - 64, 0)
    last = sorted(range(first, tokens), key=lambda token: -int(lengths[token]))
    assert order.tolist() == [*range(first), *last]
