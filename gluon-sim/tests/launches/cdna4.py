"""Launches of the CDNA4 test kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from launches.launch import Launch, randn, softmax_attention, unwritten
from toys import cdna4_attention as attention_kernels
from toys import cdna4_features as features


def lds_matmul(padded: bool) -> Launch:
    p, v, out = randn(128, 64, seed=1), randn(64, 128, seed=2), unwritten(128, 128)

    def check() -> None:
        torch.testing.assert_close(out, p.float() @ v.float(), atol=1e-3, rtol=1e-5)

    layout = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
    if padded:
        layout = gl.PaddedSharedLayout.with_identity_for([[512, 16]], [64, 128], [1, 0])
    return Launch(
        features,
        "lds_matmul",
        "gfx950",
        (1,),
        (p, v, out),
        check,
        {"SHARED": layout},
        ("o_ptr",),
    )


def scaled(a_scale: int, b_scale: int) -> Launch:
    a = randn(128, 128, seed=1).to(torch.float8_e4m3fn)
    b = randn(128, 64, seed=2).to(torch.float8_e4m3fn)
    out = unwritten(128, 64)

    def check() -> None:
        factor = 2.0 ** (a_scale + b_scale - 254)
        torch.testing.assert_close(out, a.float() @ b.float() * factor, atol=1e-3, rtol=1e-5)

    constexprs = {"A_SCALE": a_scale, "B_SCALE": b_scale}
    return Launch(features, "scaled", "gfx950", (1,), (a, b, out), check, constexprs, ("o_ptr",))


def attention(keys: int = 230, tiles: int = 1) -> Launch:
    q, out = randn(128 * tiles, 128, seed=1), unwritten(128 * tiles, 128, dtype=torch.bfloat16)
    k, v = randn(keys, 128, seed=2), randn(keys, 128, seed=3)
    scale = 128**-0.5

    def check() -> None:
        expected = softmax_attention(q, k, v, scale)
        torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)

    return Launch(
        attention_kernels,
        "attention",
        "gfx950",
        (tiles,),
        (q, k, v, out, -(-keys // 64), keys, scale * 1.4426950408889634),
        check,
        {"SHARED": gl.SwizzledSharedLayout(8, 1, 16, [1, 0])},
        ("o_ptr",),
    )


CASES: dict[str, Any] = {
    "cdna4_attention": attention,
    "cdna4_mfma": partial(lds_matmul, False),
    "cdna4_mfma_padded": partial(lds_matmul, True),
    "cdna4_scaled": partial(scaled, 126, 129),
    "cdna4_unscaled": partial(scaled, 127, 127),
}
