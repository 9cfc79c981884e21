"""The cache's torch operators: what `append` and `gather` call on a GPU."""

from __future__ import annotations

import pytest
import torch

import calls
import formula
from openmla.cache import LatentCache
from openmla.problem import CACHE_FORMATS


def pools(format: str) -> list[LatentCache]:
    shape = dict(zip(("latent", "rope"), calls.widths_of(format), strict=True))
    return [
        LatentCache.allocate(num_pages=2, page_size=4, format=format, **shape) for _ in range(2)
    ]


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_operators_do_what_the_methods_do(format: str):
    one, other = pools(format)
    torch.manual_seed(0)
    latent, rope = torch.randn(3, one.latent), torch.randn(3, one.rope)
    slots = torch.tensor([5, 0, 7])
    one.append(latent, rope, slots)
    parts = (other.data, other.scales, format, other.latent)
    torch.ops.openmla.cache_append(*parts, latent, rope, slots)
    out = torch.full((3, other.width), torch.nan, dtype=torch.bfloat16)
    torch.ops.openmla.cache_gather(*parts, slots, out)
    assert formula.same_bits(one.gather(slots), out)


@pytest.mark.parametrize("format", ["bf16", "fp8_656", "fp8_block64"])
def test_operators_are_well_formed(format: str):
    cache, _ = pools(format)
    latent, rope, slots = torch.randn(3, 512), torch.randn(3, 64), torch.tensor([5, 0, 7])
    out = torch.empty(3, 576, dtype=torch.bfloat16)
    checks = ("test_schema", "test_faketensor")
    append = torch.ops.openmla.cache_append.default
    gather = torch.ops.openmla.cache_gather.default
    parts = (cache.data, cache.scales, format, 512)
    if format == "bf16":  # the checker cannot compare tensors of e4m3 or of random bytes
        torch.library.opcheck(append, (*parts, latent, rope, slots), test_utils=checks)
        torch.library.opcheck(gather, (*parts, slots, out), test_utils=checks)
    else:
        torch.library.opcheck(append, (*parts, latent, rope, slots), test_utils=checks[1:])
        torch.library.opcheck(gather, (*parts, slots, out), test_utils=checks[1:])
