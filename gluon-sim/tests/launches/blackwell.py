"""Launches of the Blackwell test kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from launches.launch import Launch, descriptor, randn, shared_layout, softmax_attention, unwritten
from toys import blackwell_attention as attention_kernels
from toys import blackwell_features as features
from toys import blackwell_pair as pair_kernels
from toys.compat import (
    PAIR_COPIES,
    PAIR_PRODUCTS,
    cluster_barrier_layout,
    cluster_barrier_shape,
    pair_tmem_layout,
    tmem_reg_layout,
)

ACC = TensorMemoryLayout([128, 128], col_stride=1)


def blackwell_pair(blocks: int = 3, seed: int = 0) -> Launch:
    a, b = randn(256, blocks * 64, seed=seed), randn(blocks * 64, 128, seed=seed + 1)
    out = unwritten(256, 128)

    def check() -> None:
        torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-5)

    return Launch(
        pair_kernels,
        "pair_matmul",
        "sm100",
        (1,),
        (
            descriptor(a, [256, 64], shared_layout(16, cga_layout=[[1, 0]])),
            descriptor(b, [64, 128], shared_layout(16, cga_layout=[[0, 1]])),
            out,
            blocks,
        ),
        check,
        {**pair_constexprs(), "num_ctas": 2},
        ("o_ptr",),
        compiles=PAIR_PRODUCTS,
    )


def pair_constexprs() -> dict[str, Any]:
    acc = pair_tmem_layout(128, 128)
    return {
        "ACC": acc,
        "REGS": tmem_reg_layout(gl.float32, [256, 128], acc, 4),
        "LOADED": mbarrier.MBarrierLayout(cga_layout=[[0]]),
        "DONE": cluster_barrier_layout(),
        "DONE_SHAPE": cluster_barrier_shape(2),
    }


def pair_copy() -> Launch:
    out = unwritten(256, 32)

    def check() -> None:
        assert torch.equal(out, torch.arange(256 * 32).view(256, 32).float())

    layout = pair_tmem_layout(128, 32)
    constexprs = {
        "BOX": shared_layout(32, cga_layout=[[1, 0]]),
        "T": layout,
        "DONE": cluster_barrier_layout(),
        "DONE_SHAPE": cluster_barrier_shape(1),
        "num_ctas": 2,
    }
    return Launch(
        pair_kernels,
        "pair_copy",
        "sm100",
        (1,),
        (out,),
        check,
        constexprs,
        ("o_ptr",),
        compiles=PAIR_COPIES,  # older compilers copy for one CTA only
    )


def multiply(dtype: torch.dtype) -> Launch:
    depth = 128 // dtype.itemsize
    a, b = (randn(128, depth, seed=s).to(dtype) for s in (1, 2))
    out = unwritten(128, 128)

    def check() -> None:
        torch.testing.assert_close(out, a.float() @ b.float().T, atol=1e-3, rtol=1e-5)

    constexprs = {
        "BYTES": 2 * 128 * 128,
        "ACC": ACC,
        "REGS": tmem_reg_layout(gl.float32, [128, 128], ACC, 4),
    }
    args = (descriptor(a, [128, depth]), descriptor(b, [128, depth]), out)
    return Launch(features, "multiply", "sm100", (1,), args, check, constexprs, ("o_ptr",))


def from_tmem() -> Launch:
    v, out = randn(128, 128, seed=1), unwritten(128, 64)

    def check() -> None:
        index = torch.arange(128)
        p = (index[:, None] + index[None]).bfloat16().float()
        torch.testing.assert_close(out, (p @ v.float())[:, 64:], atol=1e-2, rtol=1e-5)

    packed = TensorMemoryLayout([128, 128], col_stride=1)
    constexprs = {
        "S": ACC,
        "P": packed,
        "P_REGS": tmem_reg_layout(gl.bfloat16, [128, 128], packed, 4),
        "HALF_REGS": tmem_reg_layout(
            gl.float32, [128, 64], TensorMemoryLayout([128, 64], col_stride=1), 4
        ),
    }
    args = (descriptor(v, [128, 128]), out)
    return Launch(features, "from_tmem", "sm100", (1,), args, check, constexprs, ("o_ptr",))


def copy() -> Launch:
    out = unwritten(128, 32)

    def check() -> None:
        assert torch.equal(out, torch.arange(128 * 32).view(128, 32).float())

    layout = TensorMemoryLayout([128, 32], col_stride=1)
    constexprs = {
        "BOX": shared_layout(32),
        "T": layout,
        "REGS": tmem_reg_layout(gl.float32, [128, 32], layout, 4),
    }
    return Launch(features, "copy", "sm100", (1,), (out,), check, constexprs, ("o_ptr",))


def scaled(a_scale: int = 125, b_scale: int = 130) -> Launch:
    a, b = (randn(128, 128, seed=s).to(torch.float8_e4m3fn) for s in (1, 2))
    out = unwritten(128, 128)

    def check() -> None:
        factor = 2.0 ** (a_scale + b_scale - 254)
        torch.testing.assert_close(out, a.float() @ b.float().T * factor, atol=1e-3, rtol=1e-5)

    scales = TensorMemoryScalesLayout()
    constexprs = {
        "A_SCALE": a_scale,
        "B_SCALE": b_scale,
        "ACC": ACC,
        "REGS": tmem_reg_layout(gl.float32, [128, 128], ACC, 4),
        "SCALES": scales,
        "SCALE_REGS": tmem_reg_layout(gl.uint8, [128, 4], scales, 4),
    }
    args = (descriptor(a, [128, 128]), descriptor(b, [128, 128]), out)
    return Launch(features, "scaled", "sm100", (1,), args, check, constexprs, ("o_ptr",))


def gather4() -> Launch:
    src, dst = randn(40, 64, seed=1), unwritten(32, 64, dtype=torch.bfloat16)
    index = torch.randint(-3, 45, (32,), generator=torch.Generator().manual_seed(2)).int()

    def check() -> None:
        valid = (index >= 0) & (index < 40)
        rows = src[torch.where(valid, index, 0).long()] * valid[:, None]
        assert torch.equal(dst, rows.flip(0))

    layout = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0]))
    args = (descriptor(src, [1, 64]), descriptor(dst, [1, 64]), index)
    return Launch(features, "gather4", "sm100", (1,), args, check, {"INDEX": layout}, ("dst",))


def attention(keys: int = 300, tiles: int = 1) -> Launch:
    q, out = randn(128 * tiles, 64, seed=1), unwritten(128 * tiles, 64, dtype=torch.bfloat16)
    k, v = randn(keys, 64, seed=2), randn(keys, 64, seed=3)
    scale = 64**-0.5

    def check() -> None:
        expected = softmax_attention(q, k, v, scale)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)

    narrow = TensorMemoryLayout([128, 64], col_stride=1)
    constexprs = {
        "ST": 2,
        "S": ACC,
        "P": ACC,
        "OUT": narrow,
        "S_REGS": tmem_reg_layout(gl.float32, [128, 128], ACC, 4),
        "P_REGS": tmem_reg_layout(gl.bfloat16, [128, 128], ACC, 4),
        "O_REGS": tmem_reg_layout(gl.float32, [128, 64], narrow, 4),
    }
    descs = tuple(descriptor(t, [128, 64]) for t in (q, k, v))
    sizes = (-(-keys // 128), keys, scale * 1.4426950408889634)
    return Launch(
        attention_kernels,
        "attention",
        "sm100",
        (tiles,),
        (*descs, out, *sizes),
        check,
        constexprs,
        ("o_ptr",),
    )


CASES: dict[str, Any] = {
    "blackwell_attention": attention,
    "blackwell_pair": blackwell_pair,
    "blackwell_pair_copy": pair_copy,
    "tcgen05_bf16": partial(multiply, torch.bfloat16),
    "tcgen05_fp8": partial(multiply, torch.float8_e4m3fn),
    "tcgen05_from_tmem": from_tmem,
    "tcgen05_copy": copy,
    "tcgen05_scaled": scaled,
    "gather4": gather4,
}
