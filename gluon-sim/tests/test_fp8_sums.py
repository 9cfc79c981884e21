"""Sums of FP8 products: the bits of an H200, and kernels that the simulator runs with them.

fp8_sums_h200.json holds 4 x 4 sums of 7 products that an H200 made on 2026-11-16: rows a and b of
e4m3 numbers, what was added to, and the result.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from gluon_sim import Limits, simulate
from gluon_sim.values import fp8_sums
from toys.compat import thread_barrier

RECORDED = json.loads(Path(__file__).with_name("fp8_sums_h200.json").read_text())


@pytest.mark.parametrize("name", RECORDED)
def test_the_bits_of_an_h200(name: str) -> None:
    a, b, c, out = (np.array(RECORDED[name][key], np.float32) for key in ("a", "b", "c", "out"))
    assert np.array_equal(fp8_sums.add_products(a, b.T, c, bits=13), out)


@pytest.mark.parametrize("bits", [12, 14, 20])
def test_other_widths_give_other_bits(bits: int) -> None:
    """The recorded sums tell 13 places from any other number."""
    for name in ("random 64 2 acc", "random 128 6", "positive 128 0"):
        a, b, c, out = (np.array(RECORDED[name][key], np.float32) for key in ("a", "b", "c", "out"))
        assert not np.array_equal(fp8_sums.add_products(a, b.T, c, bits=bits), out)


@gluon.jit
def product_kernel(a_ptr, b_ptr, out_ptr, K: gl.constexpr):
    """out [64, 64] = a [64, K] b [64, K]^T."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    SL: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    ML: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    row = gl.arange(0, 64, gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, K, gl.SliceLayout(0, L))[None, :]
    a = gl.allocate_shared_memory(gl.float8e4nv, [64, K], SL, gl.load(a_ptr + row * K + column))
    b = gl.allocate_shared_memory(gl.float8e4nv, [64, K], SL, gl.load(b_ptr + row * K + column))
    fence_async_shared()
    thread_barrier()
    sums = warpgroup_mma(a, b.permute((1, 0)), gl.zeros([64, 64], gl.float32, ML))
    r = gl.arange(0, 64, gl.SliceLayout(1, ML))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, ML))[None, :]
    gl.store(out_ptr + r * 64 + c, sums)


@pytest.mark.parametrize("bits", [0, 13])
def test_a_kernel_sums_as_the_chip_does(bits: int) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(64, 64).to(torch.float8_e4m3fn) for _ in range(2))
    out = torch.zeros(64, 64)
    report = simulate(
        product_kernel, 1, (a, b, out, 64), outputs=["out_ptr"], limits=Limits(fp8_bits=bits)
    )
    assert report.ok, report
    exact = (a.double() @ b.double().T).numpy()
    if bits:
        cut = fp8_sums.add_products(
            a.float().numpy(), b.float().numpy().T, np.zeros((64, 64), np.float32), bits
        )
        assert np.array_equal(out.numpy(), cut)
        assert 1e-4 < np.abs(out.numpy() - exact).max() < 2e-2
    else:
        assert np.abs(out.numpy() - exact).max() < 1e-4
