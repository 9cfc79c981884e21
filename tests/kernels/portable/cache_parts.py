"""Parts of interpreted.py about rows: append and gather of a cache, `quantize`, e4m3 rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.far_memory import FarMemory
from openmla.cache import LatentCache
from openmla.formats import FORMATS, WRITERS
from openmla.kernels.cpu import quantize as cpu_quantize
from openmla.kernels.portable import cache_ops
from openmla.kernels.portable import quantize as portable_quantize


def cache(first: int, number: int) -> Iterator[list[str]]:
    """append and gather have the bits of the CPU path, in every format."""
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        for format in FORMATS:
            widths = FORMATS[format].widths or ((512, 64), (40, 8), (24, 0))
            latent, rope = widths[seed % len(widths)]
            x = torch.randn(9, latent + rope) * torch.logspace(-9, 4, 9)[:, None]
            x[2], x[3, :6] = 0, torch.tensor([1e-9, 1e-3, 0.0, -0.0, 448.0, 449.0])
            x[4, 5] = torch.nan if seed % 2 else torch.inf
            x[5] *= 1e-36  # a scale of amax/448 would not be a normal number
            x = x.to((torch.float32, torch.bfloat16, torch.float16)[seed // 3 % 3])
            slots = torch.randperm(21)[:9]
            pools = [
                LatentCache.allocate(
                    num_pages=3, page_size=7, latent=latent, rope=rope, format=format
                )
                for _ in range(2)
            ]
            parts = (x[:, :latent], x[:, latent:])
            writer = WRITERS[seed % len(WRITERS)]
            pools[0].append(*parts, slots, writer=writer)
            # Two tokens more, whose slots lie outside the pool: they leave no trace.
            more = [torch.cat([part, part[:2]]) for part in parts]
            every = torch.cat([slots, torch.tensor([-1, 21])])
            cache_ops.append(pools[1], *more, every, writer)
            yield _different_pools(format, *pools, slots)


def _different_pools(
    format: str, host: LatentCache, device: LatentCache, slots: torch.Tensor
) -> list[str]:
    problems = []
    if not torch.equal(host.gather(slots).nan_to_num(7), device.gather(slots).nan_to_num(7)):
        problems.append(f"{format}: append differs")
    scales = [torch.ones(1) if c.scales is None else c.scales for c in (host, device)]
    if not torch.equal(*(x.view(torch.uint8) for x in scales)):
        problems.append(f"{format}: scales differ")
    listed = torch.cat([slots, torch.tensor([-1, host.rows])])  # the last two are outside the pool
    rows = torch.full((listed.shape[0], host.width), torch.nan, dtype=torch.bfloat16)
    cache_ops.gather(host, listed, rows)
    if not torch.equal(host.gather(slots).nan_to_num(7), rows[:-2].nan_to_num(7)):
        problems.append(f"{format}: gather differs")
    if rows[-2:].any():
        problems.append(f"{format}: rows outside the pool are not zeros")
    whole, filling = cache_ops.dequantized(host)
    filling.run()
    every = host.gather(torch.arange(host.rows))
    if not torch.equal(every.nan_to_num(7), whole.data.view_as(every).nan_to_num(7)):
        problems.append(f"{format}: not all rows are dequantized")
    return problems


def quantize(first: int, number: int) -> Iterator[list[str]]:
    """Rows with one scale per token have the bits that the CPU gives them."""
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        heads, width, columns = ((3, 24, 0), (1, 192, 64), (8, 40, 5))[seed % 3]
        x, rope = torch.randn(6, heads, 2 * width), torch.randn(6, 2 * columns)
        x *= 2.0 ** torch.randint(-130, 100, (6, 1, 1))
        x[1], rope[1], x[2, 0, 3], x[3, 0, 2] = 0, 0, torch.nan, torch.inf
        x[..., width:], rope[:, columns:] = torch.inf, torch.inf  # rows are not contiguous
        dtype = (torch.float32, torch.bfloat16, torch.float16)[seed // 3 % 3]
        x, rope = x.to(dtype)[..., :width], rope.to(dtype)[:, :columns]
        parts = [x, rope] if columns else [x]
        made = []
        for run in (cpu_quantize.quantize, portable_quantize.quantize):
            outs = [torch.empty(p.shape, dtype=torch.float8_e4m3fn) for p in parts]
            scale = torch.full((6,), torch.nan)
            run(x, rope if columns else None, outs, scale)
            made.append([*(out.view(torch.uint8) for out in outs), scale])
        same = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
        yield [] if same else [f"quantize differs: seed {seed}, {heads} x {width} + {columns}"]


def far_heads(first: int, number: int) -> Iterator[list[str]]:
    """Heads more than 2^31 elements apart. A 32-bit offset ends the process, or reads others."""
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        near = torch.randn(3, 5 + seed, 24).bfloat16()
        far = FarMemory(1).new(near.shape, near.dtype)
        far.copy_(near)
        made = []
        for x in (near, far):
            outs, scale = [torch.empty(x.shape, dtype=torch.float8_e4m3fn)], torch.empty(3)
            portable_quantize.quantize(x, None, outs, scale)
            made.append((outs[0].view(torch.uint8), scale))
        same = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
        yield [] if same else [f"quantize differs: seed {seed}"]


def far_pages(first: int, number: int) -> Iterator[list[str]]:
    """Pages past element 2^31 of a pool, named by numbers of 32 bits."""
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        slots = torch.randperm(10).int()
        x = torch.randn(10, 32).bfloat16()
        pool = LatentCache(FarMemory(0).new((5, 2, 32), torch.bfloat16), None, 24, 8, "bf16")
        cache_ops.append(pool, x[:, :24], x[:, 24:], slots)
        rows = torch.full_like(x, torch.nan)
        cache_ops.gather(pool, slots, rows)
        stored = torch.equal(pool.data[slots // 2, slots % 2], x)
        yield [] if stored and torch.equal(rows, x) else [f"far pages differ: seed {seed}"]


def e4m3(first: int, number: int) -> Iterator[list[str]]:
    """Every fp32 near an e4m3 number or a tie rounds as torch rounds it."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    points = torch.cat([codes, ties])
    up, down = (torch.nextafter(points, torch.full_like(points, x)) for x in (1e9, -1e9))
    values = torch.cat([points, up, down, -points, -up, -down, torch.tensor([1e-30, 2.0**-10])])
    values = values.clamp(-448, 448)
    pool = LatentCache.allocate(num_pages=1, page_size=1, latent=2048, rope=0, format="fp8_token")
    row = torch.zeros(1, 2048)
    row[0, : values.numel()], row[0, -1] = values, 448.0
    cache_ops.append(pool, row, None, torch.tensor([0]))
    want = row.to(torch.float8_e4m3fn).view(torch.uint8)
    wrong = (pool.data[0].view(torch.uint8) != want).sum()
    yield [f"{int(wrong)} codes differ"] if int(wrong) else []


PARTS: dict[str, Callable[[int, int], Iterator[list[str]]]] = {
    "cache": cache,
    "e4m3": e4m3,
    "quantize": quantize,
    "far heads": far_heads,
    "far pages": far_pages,
}
