"""Positions and rows by pages of any size, without a division."""

import doctest
import random

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gluon_sim import intercept
from openmla.kernels.gluon import pages
from openmla.kernels.gluon.pages import Pages, divided, inverse_of

LAST = 2**31 - 1


def test_examples() -> None:
    assert doctest.testmod(pages).failed == 0


def sizes() -> list[int]:
    draw = random.Random(7)
    near = [(1 << i) + j for i in range(31) for j in (-1, 0, 1)]
    return sorted({x for x in (*near, 48, LAST, *(draw.randint(1, LAST) for _ in range(300))) if x})


def test_every_quotient_is_exact() -> None:
    """Also of the last row before and the first one after a page ends, up to 2^31 - 1."""
    draw = random.Random(8)
    for size in sizes():
        inverse = inverse_of(size)
        assert 2**31 <= inverse < 2**63
        most = LAST // size
        for page in {0, 1, most, *(draw.randint(0, most) for _ in range(20))}:
            for n in (page * size - 1, page * size, page * size + size - 1, LAST):
                if 0 <= n <= LAST:
                    assert (n * (inverse & 0xFFFFFFFF)) >> (inverse >> 32) == n // size, (n, size)


@gluon.jit
def dividing_kernel(numbers_ptr, pages_ptr, rows_ptr, size, inverse):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    here = gl.arange(0, 128, L)
    page, row = divided(gl.load(numbers_ptr + here), Pages(size=size, inverse=inverse))
    gl.store(pages_ptr + here, page)
    gl.store(rows_ptr + here, row)


@pytest.mark.parametrize("size", [1, 3, 48, 64, 4097, LAST])
def test_on_the_device(size: int) -> None:
    draw = random.Random(size)
    numbers = torch.tensor([0, 1, LAST, *(draw.randint(0, LAST) for _ in range(125))]).int()
    found, rows = torch.empty_like(numbers), torch.empty_like(numbers)
    with intercept() as reports:
        dividing_kernel[(1,)](numbers, found, rows, size, inverse_of(size))
    assert all(report.ok for report in reports)
    assert torch.equal(found, numbers // size) and torch.equal(rows, numbers % size)
