"""openmla.quantize on a GPU: the CPU's bits."""

from __future__ import annotations

import pytest
import torch

import openmla
from gpu.on_device import DEVICE, on_gpu

pytestmark = on_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "width", "rope"), [(128, 192, 0), (128, 128, 64), (3, 40, 5)])
def test_the_bits_of_the_cpu(heads: int, width: int, rope: int, dtype: torch.dtype) -> None:
    torch.manual_seed(heads + rope)
    x = (torch.randn(70, heads, 2 * width) * torch.rand(70, 1, 1) * 50).to(dtype)
    x[3], x[4, 0, 1], x[5, 1, 2] = 0, torch.nan, torch.inf
    parts = [x[..., :width], *([torch.randn(70, rope).to(dtype)] if rope else [])]
    want = openmla.quantize(*parts)
    given = [x.to(DEVICE)[..., :width], *(part.to(DEVICE) for part in parts[1:])]
    for host, device in zip(want, openmla.quantize(*given), strict=True):
        assert torch.equal(host.view(torch.uint8), device.cpu().view(torch.uint8))
