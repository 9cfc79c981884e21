"""Launches of the Hopper test kernels."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from launches.launch import Launch, descriptor, randn, shared_layout, unwritten
from toys import hopper_dense as dense_kernels
from toys import hopper_features as features
from toys import hopper_handover as handover


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal, bottom-right aligned, float64; a row that sees nothing gives 0 and -inf."""
    scores = (q.double() @ k.double().T) * scale
    rows = torch.arange(len(q))[:, None] + len(k) - len(q)
    scores = scores.masked_fill(torch.arange(len(k))[None] > rows, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v.double(), lse


def hopper_dense(
    q_lens: list[int], k_lens: list[int], heads: int, seed: int = 0, grid: int = 2
) -> Launch:
    def cumulative(lens: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)

    total_q, total_k = sum(q_lens), sum(k_lens)
    q, k = randn(total_q, heads * 192, seed=seed), randn(total_k, heads * 192, seed=seed + 1)
    v = randn(total_k, heads * 128, seed=seed + 2)
    o, lse = unwritten(total_q, heads * 128, dtype=torch.bfloat16), unwritten(heads, total_q)
    cu_q, cu_k = cumulative(q_lens), cumulative(k_lens)
    row_tiles = -(-max(q_lens) // 128)
    tiles, scale = row_tiles * heads * len(q_lens), 192**-0.5

    def check() -> None:
        for b, h in itertools.product(range(len(q_lens)), range(heads)):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            wide, narrow = slice(192 * h, 192 * h + 192), slice(128 * h, 128 * h + 128)
            out, sums = attention(q[rows, wide], k[keys, wide], v[keys, narrow], scale)
            torch.testing.assert_close(o[rows, narrow].double(), out, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[h, rows].double(), sums, atol=1e-4, rtol=1e-5)

    descs = (descriptor(q, [64, 128]), descriptor(q, [64, 64]))
    descs += (descriptor(k, [64, 128]), descriptor(k, [64, 64]), descriptor(v, [64, 128]))
    sizes = (heads, row_tiles, tiles, total_q, scale * 1.4426950408889634)
    return Launch(
        dense_kernels,
        "dense",
        "sm90",
        (grid,),
        (*descs, o, lse, cu_q, cu_k, *sizes),
        check,
        {"BN": 64, "ST": 2},
        ("o_ptr", "lse_ptr"),
    )


def tma_copy(row: int = 64, column: int = 0) -> Launch:
    """A tile that hangs over the edge of a [100, 64] tensor."""
    src, dst = randn(100, 64, seed=1), torch.zeros(100, 64, dtype=torch.bfloat16)

    def check() -> None:
        assert torch.equal(dst[row:], src[row:])
        assert not dst[:row].any()

    descs = (descriptor(src, [64, 64]), descriptor(dst, [64, 64]))
    return Launch(features, "tma_copy", "sm90", (1,), (*descs, row, column), check)


def wgmma(dtype: torch.dtype, from_registers: bool) -> Launch:
    size = dtype.itemsize
    depth = 128 // size
    a, b = (randn(64, depth, seed=s).to(dtype) for s in (1, 2))
    out = unwritten(64, 64)

    near = 2e-2 if size == 1 else 1e-3  # sums of FP8 products keep 13 binary places

    def check() -> None:
        torch.testing.assert_close(out, a.float() @ b.float().T, atol=near, rtol=1e-5)

    constexprs = {
        "BYTES": 2 * 64 * depth * size,
        "FROM_REGISTERS": from_registers,
        "K_WIDTH": 4 // size,
        "DEPTH": 32 // size,
    }
    args = (descriptor(a, [64, depth]), descriptor(b, [64, depth]), out)
    return Launch(features, "wgmma", "sm90", (1,), args, check, constexprs, ("o_ptr",))


def gather_cp_async() -> Launch:
    kv, out = randn(50, 64, seed=1), unwritten(64, 64)
    index = torch.randint(-5, 60, (64,), generator=torch.Generator().manual_seed(2)).int()

    def check() -> None:
        valid = (index >= 0) & (index < 50)
        rows = kv.float()[torch.where(valid, index, 0).long()] * valid[:, None]
        torch.testing.assert_close(out, rows @ rows.T, atol=1e-3, rtol=1e-5)

    return Launch(
        features,
        "gather_cp_async",
        "sm90",
        (1,),
        (kv, index, out, 50),
        check,
        {"LAYOUT": shared_layout(16)},
        ("o_ptr",),
    )


def grouped_cp_async(blocks: int = 5) -> Launch:
    src, out = randn(blocks * 32, 64, seed=1), unwritten(32, 64)

    def check() -> None:
        total = src.float().view(blocks, 32, 64).sum(0)
        torch.testing.assert_close(out, total, atol=1e-5, rtol=1e-6)

    args = (src, out, blocks)
    return Launch(features, "grouped_cp_async", "sm90", (1,), args, check, {}, ("o_ptr",))


def ping_pong(rounds: int = 4) -> Launch:
    out = torch.zeros(128, dtype=torch.int32)

    def check() -> None:
        expected = torch.arange(128) * rounds + sum(range(rounds))
        assert torch.equal(out, expected.int())

    return Launch(features, "ping_pong", "sm90", (1,), (out, rounds), check, {}, ("o_ptr",))


def pipeline(blocks: int = 5) -> Launch:
    src, out = randn(blocks * 64, 64, seed=1), unwritten(64, 64)

    def check() -> None:
        total = src.float().view(blocks, 64, 64).sum(0)
        torch.testing.assert_close(out, total, atol=1e-5, rtol=1e-6)

    args = (descriptor(src, [64, 64]), out, blocks)
    return Launch(features, "pipeline", "sm90", (1,), args, check, {}, ("o_ptr",))


def publish() -> Launch:
    dst = unwritten(64, 64, dtype=torch.bfloat16)

    def check() -> None:
        expected = torch.arange(64)[:, None] * 2 + torch.arange(64)[None]
        assert torch.equal(dst, expected.bfloat16())

    return Launch(
        features, "publish", "sm90", (1,), (descriptor(dst, [64, 64]),), check, {}, ("dst",)
    )


def counter(tiles: int = 11) -> Launch:
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(tiles, dtype=torch.int32)

    def check() -> None:
        wide = torch.arange(tiles, dtype=torch.int64) * 1431655765 + 7
        assert torch.equal(out, ((wide + 2**31) % 2**32 - 2**31).int())

    return Launch(features, "counter", "sm90", (3,), (count, out, tiles), check, {}, ("o_ptr",))


def in_turn(rounds: int = 5) -> Launch:
    out = torch.zeros(128, dtype=torch.int32)

    def check() -> None:
        steps = sum(range(rounds))
        expected = torch.arange(128) * (rounds + steps) + steps
        assert torch.equal(out, expected.int())

    return Launch(handover, "in_turn", "sm90", (1,), (out, rounds), check, {}, ("o_ptr",))


def trusted_copies() -> Launch:
    src, out = randn(64, 64, seed=1), unwritten(64, 64)

    def check() -> None:
        box = torch.arange(64.0)[:, None] - torch.arange(64.0)[None]
        torch.testing.assert_close(out, src.float() @ box.T, atol=1e-2, rtol=1e-5)

    layout = {"LAYOUT": shared_layout(16)}
    return Launch(handover, "trusted_copies", "sm90", (1,), (src, out), check, layout, ("o_ptr",))


def reused_operand() -> Launch:
    src, out = randn(64, 64, seed=1), unwritten(64, 64)

    def check() -> None:
        x = (src.float() @ src.float().T).bfloat16().float()
        torch.testing.assert_close(out, x @ x.T, atol=1e-1, rtol=1e-4)

    args = (descriptor(src, [64, 64]), out)
    return Launch(handover, "reused_operand", "sm90", (1,), args, check, {}, ("o_ptr",))


def two_notices() -> Launch:
    src, out = randn(64, 64, seed=1), unwritten(64, 64)

    def check() -> None:
        assert torch.equal(out, src.float() + torch.arange(64.0))

    args = (descriptor(src, [64, 64]), out)
    return Launch(handover, "two_notices", "sm90", (1,), args, check, {}, ("o_ptr",))


CASES: dict[str, Any] = {
    "hopper_dense": partial(hopper_dense, [70, 33, 5], [70, 130, 2], 1),
    "tma_copy": tma_copy,
    "wgmma_bf16": partial(wgmma, torch.bfloat16, False),
    "wgmma_bf16_registers": partial(wgmma, torch.bfloat16, True),
    "wgmma_fp16": partial(wgmma, torch.float16, False),
    "wgmma_fp8": partial(wgmma, torch.float8_e4m3fn, False),
    "gather_cp_async": gather_cp_async,
    "grouped_cp_async": grouped_cp_async,
    "ping_pong": ping_pong,
    "pipeline": pipeline,
    "publish": publish,
    "counter": counter,
    "in_turn": in_turn,
    "trusted_copies": trusted_copies,
    "reused_operand": reused_operand,
    "two_notices": two_notices,
}
