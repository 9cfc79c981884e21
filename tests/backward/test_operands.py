"""What a backward pass is handed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from openmla import plan
from openmla.backward.operands import BackwardOperands
from openmla.backward.ops import readable
from openmla.backward.problem import BackwardProblem
from openmla.operands import DenseOperands, Results, Weights

HEADS, WIDTH = 2, 16


def backward(cu_q: Tensor, cu_k: Tensor, causal: bool = True) -> BackwardOperands:
    """Four queries of which the first two see no key of two; their d_out is NaN."""
    q, kv = torch.ones(4, HEADS, WIDTH), torch.ones(2, HEADS, WIDTH)
    forward = DenseOperands(q, kv, None, kv, cu_q, cu_k, causal, Weights(0.1))
    lse, d_out = torch.zeros(4, HEADS), torch.ones(4, HEADS, WIDTH)
    lse[:2], d_out[:2] = -torch.inf, torch.nan
    return BackwardOperands(forward, torch.zeros_like(d_out), lse, d_out)


@pytest.mark.parametrize("apart", [True, False], ids=["two tensors", "two views of one address"])
def test_rows_that_see_no_key_have_no_gradient(apart: bool) -> None:
    one = torch.tensor([0, 4, 2], dtype=torch.int32)
    cu_q, cu_k = one[:2], one[::2]
    read = backward(cu_q, cu_k.clone() if apart else cu_k)
    seen = read.seen_d_out()
    assert torch.equal(seen[:2], torch.zeros(2, HEADS, WIDTH))
    assert torch.equal(seen[2:], read.d_out[2:])
    problem = read.forward.problem(Results(read.out, read.lse))
    assert not problem.self_attention


def test_where_all_rows_see_a_key_nothing_is_copied() -> None:
    cu = torch.tensor([0, 4], dtype=torch.int32)
    own = backward(cu, cu)
    assert own.seen_d_out() is own.d_out
    full = backward(cu, torch.tensor([0, 2], dtype=torch.int32), causal=False)
    assert full.seen_d_out() is full.d_out
    bits = torch.ones(4, 1, dtype=torch.int32)
    masked = replace(full, forward=replace(full.forward, key_mask=bits))
    assert masked.seen_d_out() is not full.d_out


@pytest.mark.parametrize("name", ["q", "k_nope", "k_rope", "v"])
def test_rows_that_are_one_row_are_not_copied_in_bulk(name: str) -> None:
    """A tensor map takes no stride of 0, which tensors have that `expand` made: other kernels read
    them, forwards and backwards."""
    cu = torch.tensor([0, 4], dtype=torch.int32)
    shapes = {"q": (4, 2, 192), "k_nope": (4, 2, 128), "k_rope": (4, 2, 64), "v": (4, 2, 128)}
    rows = {n: torch.ones(shape, dtype=torch.bfloat16) for n, shape in shapes.items()}
    out, lse = torch.empty(4, 2, 128, dtype=torch.bfloat16), torch.empty(4, 2)

    def backends() -> list[str]:
        op = DenseOperands(
            **rows, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, weights=Weights(0.1)
        )
        forward = op.problem(Results(out, lse))
        plans = plan(forward, "h200"), plan(BackwardProblem.of(forward), "h200")
        return [p.backend for p in plans]

    rows["k_rope"] = rows["k_rope"][:, 0]
    assert backends() == ["hopper", "hopper"]
    rows[name] = torch.ones(1, *shapes[name][1:], dtype=torch.bfloat16).expand(shapes[name])
    rows["k_rope"] = rows["k_rope"] if rows["k_rope"].dim() == 2 else rows["k_rope"][:, 0]
    assert backends() == ["portable", "portable"]


def test_columns_of_d_out_are_side_by_side() -> None:
    """As kernels read them; a sum hands back one number for all elements, a slice every other."""
    rows = torch.randn(3, 2 * HEADS, 2 * WIDTH)
    for given in (torch.ones(()).expand(3, HEADS, WIDTH), rows[..., ::2]):
        read = readable(given)
        assert read.stride(-1) == 1 and torch.equal(read, given)
    for given in (rows[:, ::2, :WIDTH], rows[..., 5:6], rows.transpose(0, 1)):
        assert readable(given) is given
