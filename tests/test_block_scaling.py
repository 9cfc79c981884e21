"""Elements of quantized rows as numbers: every code that there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import formula
from openmla.block_scaling import E2M1, dequantize, e4m3_values, unpack

BYTES = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(params=[False, True], ids=["", "subnormal numbers flushed"])
def flushed(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("flushed")
def test_e4m3_codes_are_the_numbers_that_torch_has_for_them():
    codes = BYTES.view(torch.float8_e4m3fn)
    numbers = codes[~codes.float().isnan()]
    assert numbers.numel() == 254
    assert formula.same_bits(e4m3_values(numbers), numbers.float())
    assert formula.same_bits(e4m3_values(codes), codes.float())  # with both NaN


def test_columns_of_wider_rows_need_not_be_copied():
    rows = torch.randint(0, 0x7F, (5, 40), dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert formula.same_bits(e4m3_values(rows[:, 3:20]), rows[:, 3:20].float())
    assert e4m3_values(rows[:0]).shape == (0, 40)


@pytest.mark.usefixtures("flushed")
def test_both_e2m1_codes_of_every_byte():
    values = torch.tensor(E2M1)
    expected = torch.stack([values[(BYTES & 15).int()], values[(BYTES >> 4).int()]], -1)
    assert formula.same_bits(unpack(BYTES[:, None]), expected)


@pytest.mark.parametrize("width", [12, 10])
def test_a_block_has_one_scale_and_the_last_may_be_short(width: int):
    elements = torch.arange(3 * width).view(3, width).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 0.5, 2.0**127], [3.0, 0.1, 7.0], [0.0, 1.0, 2.0]])
    spread = torch.stack([scales[:, column // 4] for column in range(width)], -1)
    expected: Tensor = (elements.float() * spread).to(torch.bfloat16)
    assert formula.same_bits(dequantize(elements, scales, 4), expected)
