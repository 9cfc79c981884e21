"""FlashMLA's decode over lists on a GPU: rows of 656, 584, 528 and 288 bytes, one cache and two."""

from __future__ import annotations

import pytest

from compat.flash_mla_decode_cases import DecodeCase, cases, problems
from gpu.on_device import DEVICE, on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: f"{case.format} {case.seed}")
def test_within_flash_mlas_limits(case: DecodeCase) -> None:
    assert problems(case, DEVICE) == []
