"""The portable kernels and the cache's own kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import openmla
from gpu.on_device import DEVICE, different, drawn_problems, normal, offsets, on, on_gpu, problems
from openmla import LatentCache
from openmla.formats import FORMATS
from openmla.lab.testing.case import Case
from openmla.lab.testing.cases import named_cases

pytestmark = on_gpu

DENSE = Case("dense", 3, 128, 64, 128, q_lens=(129, 0, 65), k_lens=(129, 5, 301), spare=3)
LATENT = Case(
    "latent",
    20,
    512,
    64,
    512,
    q_lens=(33, 5),
    k_lens=(300, 2),
    scale=0.05,
    kv="bf16",
    page_size=64,
    spare=3,
)
SPARSE = Case(
    "sparse",
    20,
    512,
    64,
    512,
    q_lens=(40,),
    k_lens=(900,),
    topk=200,
    scale=0.05,
    index_kind="mixed",
)


def over_caches(case: Case) -> Iterator[tuple[str, Case]]:
    """The case over rows of every format, at all widths if the format has few."""
    for name, format in FORMATS.items():
        for latent, rope in format.widths or ((case.d_nope, case.d_rope),):
            yield (
                f"{name} {latent}+{rope}",
                replace(case, kv=name, d_nope=latent, d_v=latent, d_rope=rope),
            )


CASES: dict[str, Case] = {
    **named_cases(),
    "dense odd widths": replace(DENSE, d_nope=33, d_rope=2, d_v=17, layout="strided"),
    "dense rope from fp8 pages": replace(DENSE, rope="cache", kv="fp8_block32", page_size=7),
    "dense fp8 with scales": replace(DENSE, dtype="e4m3", q_scale=True, k_scale=True),
    "dense split": replace(DENSE, heads=2, q_lens=(40,), k_lens=(5000,), causal=False),
    "latent fp16": replace(LATENT, dtype="fp16", d_nope=256, d_v=256),
    "latent split": replace(LATENT, heads=4, q_lens=(3,), k_lens=(6000,)),
    "sparse lengths sink": replace(SPARSE, topk_lengths="wild", sink="mixed"),
    **{f"latent {name}": case for name, case in over_caches(LATENT)},
    **{f"sparse {name}": replace(case, page_size=24) for name, case in over_caches(SPARSE)},
    "dense rope beside ue8m0 scales": replace(DENSE, rope="cache", kv="fp8_584", page_size=7),
}
# Other chips get other tiles; where this GPU can run them, they must be right here too.
CHIPS = ("a100", "l40s", "rtx5090", "mi300x")


@pytest.mark.parametrize("name", CASES)
def test_right_repeatable_and_deaf_to_poison(name: str):
    assert problems(CASES[name], "portable") == []


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_drawn_cases(form: str):
    assert drawn_problems(form, "portable", count=16) == []


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("case", [DENSE, LATENT, replace(SPARSE, kv="fp8_656")], ids=str)
def test_tiles_of_other_chips(case: Case, chip: str):
    assert problems(case, "portable", target=chip) == []


@pytest.mark.parametrize(
    "case",
    [
        replace(DENSE, heads=16, q_lens=(64,), k_lens=(4096,)),
        replace(LATENT, heads=16, q_lens=(64,), k_lens=(4096,)),
        replace(SPARSE, heads=16, q_lens=(64,), k_lens=(4096,), topk=256, index_kind="distinct"),
        replace(SPARSE, heads=16, q_lens=(64,), k_lens=(4096,), topk=256, kv="fp8_656"),
    ],
    ids=str,
)
def test_a_thousand_launches_give_the_same_bits(case: Case):
    built = on(case)
    assert different(lambda: built.run("portable").out, 1000) == 0


@pytest.mark.parametrize("format", FORMATS)
def test_the_cache_has_the_bytes_it_has_on_the_cpu(format: str):
    """append and gather, values of every size, zeros among them."""
    widths = calls.widths_of(format)
    shape = {"num_pages": 128, "page_size": 64, "latent": widths[0], "rope": widths[1]}
    host = LatentCache.allocate(**shape, format=format)
    device = LatentCache.allocate(**shape, format=format, device=DEVICE)
    for cache in (host, device):  # rows that nobody appends
        cache.data.view(torch.uint8).zero_()
        if cache.scales is not None:
            cache.scales.zero_()
    x = torch.randn(4096, host.width) * torch.logspace(-8, 4, 4096)[:, None]
    x[7], x[8, ::3] = 0, 0
    slots = torch.randperm(host.rows)[:4096]
    latent, rope = x.split(widths, dim=1)
    host.append(latent, rope, slots)
    device.append(latent.to(DEVICE), rope.to(DEVICE), slots.to(DEVICE))
    assert torch.equal(host.data.view(torch.uint8), device.data.cpu().view(torch.uint8))
    if host.scales is not None and device.scales is not None:
        assert torch.equal(host.scales, device.scales.cpu())
    rows = device.gather(slots.to(DEVICE)).cpu()
    assert torch.equal(host.gather(slots).view(torch.int16), rows.view(torch.int16))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@pytest.mark.parametrize(
    ("tokens", "heads", "length"),
    [(70_000, 2, 500), (90_000, 128, 1000)],
    ids=["more than 65535 tokens", "more than 2^31 elements"],
)
def test_many_dense_tokens(tokens: int, heads: int, length: int):
    """The first sequence, one in the middle and the last against fp32."""
    q, k, v = (normal(tokens, heads, width) for width in (192, 128, 128))
    rope, cu = normal(tokens, 64), offsets(*[length] * (tokens // length))
    assert tokens > 65535 and (heads == 2 or q.numel() > 2**31)
    out = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, backend="portable")
    assert isinstance(out, Tensor) and bool(out.isfinite().all())
    future = torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)
    for start in (0, tokens // length // 2 * length, tokens - length):
        part = slice(start, start + length)
        keys = torch.cat([k[part], rope[part, None].expand(-1, heads, -1)], -1).float()
        scores = torch.einsum("qhd,khd->hqk", q[part].float(), keys) * 192**-0.5
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        want = torch.einsum("hqk,khv->qhv", weights, v[part].float())
        assert relative_error(out[part], want) < 0.01, start


@pytest.mark.parametrize(
    ("tokens", "rows", "topk"),
    [(70_000, 8192, 64), (2048, 4_200_000, 128)],
    ids=["more than 65535 tokens", "more than 2^31 elements"],
)
def test_many_sparse_tokens_and_rows(tokens: int, rows: int, topk: int):
    """Lists of rows in the upper half of the pool; three tokens against fp32."""
    q, kv = normal(tokens, 16, 576) / 10, normal(rows, 576)
    assert tokens > 65535 or kv.numel() > 2**31
    make: dict[str, Any] = {"dtype": torch.int32, "device": DEVICE}
    indices = torch.randint(rows // 2, rows, (tokens, topk), **make)
    scale = 192**-0.5
    out = openmla.mla_prefill_sparse(q, kv, indices, scale=scale, backend="portable")
    assert isinstance(out, Tensor) and bool(out.isfinite().all())
    for token in (0, tokens // 2, tokens - 1):
        keys = kv[indices[token].long()].float()
        want = (q[token].float() @ keys.T * scale).softmax(-1) @ keys[:, :512]
        assert relative_error(out[token], want) < 0.01, token


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "width", "rope"), [(128, 192, 0), (128, 128, 64), (3, 40, 5)])
def test_quantize_gives_the_bits_of_the_cpu(
    heads: int, width: int, rope: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads + rope)
    x = (torch.randn(70, heads, 2 * width) * torch.rand(70, 1, 1) * 50).to(dtype)
    x[3], x[4, 0, 1], x[5, 1, 2] = 0, torch.nan, torch.inf
    parts = [x[..., :width], *([torch.randn(70, rope).to(dtype)] if rope else [])]
    want = openmla.quantize(*parts)
    given = [x.to(DEVICE)[..., :width], *(part.to(DEVICE) for part in parts[1:])]
    for host, device in zip(want, openmla.quantize(*given), strict=True):
        # Bytes: NaN is not equal to itself.
        codes, found = host.view(torch.uint8), device.cpu().view(torch.uint8)
        assert (codes != found).nonzero().tolist() == []


def test_quantize_heads_that_are_far_apart() -> None:
    """Heads are the rows of a tensor of more than 2^31 elements."""
    by_head = torch.empty(5, 2**29 + 64, dtype=torch.bfloat16, device=DEVICE)
    x = by_head[:, : 3 * 192].view(5, 3, 192).transpose(0, 1)
    assert 4 * x.stride(1) > 2**31
    x.copy_(normal(3, 5, 192))
    for far, near in zip(openmla.quantize(x), openmla.quantize(x.contiguous()), strict=True):
        assert torch.equal(far.view(torch.uint8), near.view(torch.uint8))
