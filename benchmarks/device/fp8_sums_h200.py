"""What a Hopper GPU keeps of sums of FP8 products: its bits beside those of the simulator's model.

    PYTHONPATH=src:gluon-sim/src python benchmarks/device/fp8_sums_h200.py

Products [64, K] x [K, 64] of numbers chosen to tell models apart: one large and one small term at
every distance, many small ones, terms that cancel, accumulators of all sizes, random ones. Prints
every product that has another bit than gluon_sim/values/fp8_sums.py gives it, and a count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from gluon_sim.values.fp8_sums import add_products
from openmla.kernels.gluon.compat import thread_barrier

Array = NDArray[np.float32]
Product = tuple[str, Array, Array, Array]
N, BITS = 64, 13


@gluon.jit
def product_kernel(a_ptr, b_ptr, c_ptr, out_ptr, K: gl.constexpr, N: gl.constexpr):  # type: ignore[no-untyped-def]
    """out [64, N] = c + a [64, K] b [N, K]^T, in one chain of wgmma."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    SL: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, K), element_bitwidth=8, rank=2
    )
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    a = gl.allocate_shared_memory(gl.float8e4nv, [64, K], SL)
    b = gl.allocate_shared_memory(gl.float8e4nv, [N, K], SL)
    column = gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
    a.store(gl.load(a_ptr + gl.arange(0, 64, gl.SliceLayout(1, L))[:, None] * K + column))
    b.store(gl.load(b_ptr + gl.arange(0, N, gl.SliceLayout(1, L))[:, None] * K + column))
    fence_async_shared()
    thread_barrier()
    row = gl.arange(0, 64, gl.SliceLayout(1, ML))[:, None]
    here = row * N + gl.arange(0, N, gl.SliceLayout(0, ML))[None, :]
    sums = warpgroup_mma(a, b.permute((1, 0)), gl.load(c_ptr + here))
    gl.store(out_ptr + here, sums)


def e4m3(x: Array) -> Array:
    """The nearest e4m3 numbers."""
    rounded: Array = (
        torch.from_numpy(x).float().clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    )
    return rounded


def on_gpu(a: Array, b: Array, c: Array) -> Array:
    """c + a b^T on the tensor cores."""
    left, right = (torch.from_numpy(x).to(torch.float8_e4m3fn).cuda() for x in (a, b))
    before = torch.from_numpy(c).cuda()
    out = torch.empty_like(before)
    product_kernel[(1,)](left, right, before, out, a.shape[1], N, num_warps=4)
    made: Array = out.cpu().numpy()
    return made


def small(K: int, place: int) -> tuple[Array, Array]:
    """Terms of all sizes and of both signs at one place."""
    a, b = np.zeros((64, K), np.float32), np.zeros((N, K), np.float32)
    r, j = np.arange(64), np.arange(N)
    a[:, place] = (1 + r % 8 / 8) * 2.0 ** -(r // 8 % 6)
    b[:, place] = 2.0 ** -(j // 4 % 9) * np.where(j // 2 % 2, -1, 1)
    return a, b


def products() -> Iterator[Product]:
    """Name, a, b and what is added to."""
    rng = np.random.default_rng(0)
    nothing = np.zeros((64, N), np.float32)
    sign = np.where(np.arange(N) % 2, -1.0, 1.0).astype(np.float32)
    for K in (32, 64, 128):
        for place in (1, 7, 8, 15, 16, 31, K - 1):
            a, b = small(K, place)
            a[:, 0], b[:, 0] = 1, sign
            yield f"pair {K} {place}", a, b, nothing
    anything = rng.standard_normal((64, N)).astype(np.float32)
    a, b = small(32, 3)
    yield "acc", a, b, np.ones((64, 1), np.float32) * sign
    yield "acc bits", np.zeros_like(a), np.zeros_like(b), anything
    yield "acc bits small", a, b, anything
    yield "acc bits large", e4m3(a * 64), e4m3(b * 64), anything
    for K in (32, 64):
        a, b = np.ones((64, K), np.float32), np.ones((N, K), np.float32)
        a[:, 1:] = small(K, 1)[0][:, 1:2]
        b[:] = 2.0 ** -(np.arange(N) % 9)[:, None]
        a[:, 0], b[:, 0] = 16, np.where(np.arange(N) < 32, 16, 1)
        yield f"many {K}", a, b, nothing
        for place in (1, 3, 4, 7, 8, 15, 16, 31, K - 1):
            x, y = a.copy(), b.copy()
            x[:, place], y[:, place] = 16, -y[:, 0]
            yield f"cancel {K} {place}", x, y, nothing
    for K in (32, 64, 128):
        for spread in (0, 2, 6):
            a, b = (
                e4m3(rng.standard_normal((n, K)) * 2.0 ** rng.integers(-spread, spread + 1, (n, K)))
                for n in (64, N)
            )
            before = rng.standard_normal((64, N)) * 2.0 ** rng.integers(-8, 9, (64, N))
            yield f"random {K} {spread}", a, b, nothing
            yield f"random {K} {spread} acc", a, b, before.astype(np.float32)
            yield f"positive {K} {spread}", np.abs(a), np.abs(b), nothing


def main() -> None:
    total = different = 0
    for name, a, b, c in products():
        total += 1
        wrong = int((on_gpu(a, b, c) != add_products(a, b.T, c, BITS)).sum())
        different += wrong > 0
        if wrong:
            print(f"{name}: {wrong} of {c.size} sums differ")
    print(f"{total - different} of {total} products have the bits of {BITS} places")


if __name__ == "__main__":
    main()
