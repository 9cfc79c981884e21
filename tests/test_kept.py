"""Tensors that are kept serve whoever comes later, and not who only looks."""

from __future__ import annotations

import doctest
import weakref

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from openmla import kept
from openmla.block_scaling import unpack


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(kept).attempted and not doctest.testmod(kept).failed


def test_what_is_made_while_somebody_looks_is_not_kept() -> None:
    @kept.kept(most=2)
    def ones(count: int) -> Tensor:
        return torch.ones(count)

    with FakeTensorMode():
        assert isinstance(ones(2), FakeTensor)
    made = ones(2)
    assert not isinstance(made, FakeTensor) and ones(2) is made
    with FakeTensorMode():
        assert isinstance(ones(2), FakeTensor)


def test_what_a_graph_was_captured_with_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads the memory whenever it is replayed, whatever was made since."""

    @kept.kept(most=1)
    def ones(count: int) -> Tensor:
        return torch.ones(count)

    before, capturing = weakref.ref(ones(2)), weakref.ref(ones(3))
    monkeypatch.setattr(kept, "_capturing", lambda: True)
    assert ones(3) is capturing()
    monkeypatch.undo()
    ones(4)
    assert before() is None and capturing() is not None


def test_codes_of_fp4_are_looked_up_in_a_table_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU would wait for one from the host, and a captured graph may not."""
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    first = unpack(codes)
    monkeypatch.setattr(torch, "tensor", None)
    assert torch.equal(unpack(codes), first)
