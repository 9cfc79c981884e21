"""What a run shows about speed: counted by hand, and seen by a trace."""
# ruff: noqa: E501  (programs read best unbroken)

from __future__ import annotations

from types import SimpleNamespace

import torch

from compiled.texts import gfx950, ptx
from gluon_sim.compiled import EQUAL, execute, parse
from gluon_sim.compiled.core.report import Location
from gluon_sim.compiled.core.trace import Trace

LOOP = """
ld.param.b64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
mov.b32 %r5, global_smem; shl.b32 %r4, %r1, 2; add.s32 %r6, %r5, %r4; mov.b32 %r7, 0;
setp.ge.u32 %p2, %r1, 32; @%p2 bra END;
.loc 1 9 0 // toy.py:9:0 @[ toy.py:20:3 ]
AGAIN: cp.async.ca.shared.global [%r6], [%rd3], 4; cp.async.commit_group;
add.s32 %r7, %r7, 1; add.s32 %r8, %r7, 0; add.s32 %r8, %r7, 0; add.s32 %r8, %r7, 0; bar.sync 1, 32;
cp.async.wait_group 0; setp.lt.u32 %p1, %r7, 5; @%p1 bra AGAIN;
END: st.global.b32 [%rd3], %r7;
"""
MFMA = "v_mfma_f32_16x16x32_bf16 v[8:11], v[4:7], v[4:7], 0\n"


def test_a_loop_of_one_warp_of_two():
    out = torch.arange(64, dtype=torch.int32)
    metadata = SimpleNamespace(shared=1024, num_ctas=1, tensordesc_meta=[])
    compiled = SimpleNamespace(asm={"ptx": ptx(LOOP, threads=64)}, metadata=metadata)
    report = execute(compiled, 1, {"out": out}, schedule=EQUAL, trace=True)
    report.raise_if_bad()
    (loop,) = report.trace.loops(parse(compiled))
    assert loop.warps == (0,) and loop.where == "toy.py:9 < toy.py:20"
    assert (loop.iterations, loop.barriers, loop.waits) == (5, 1, 1)
    assert loop.instructions * 5 == 49  # the last branch back is not taken
    (slack,) = report.trace.slack_of_lines()
    assert slack.products == (0,) * 5 and slack.copy == slack.wait == loop.where


def test_products_of_a_wave_between_a_load_and_its_wait():
    body = (
        "v_mov_b32 v4, 0\nv_mov_b32 v5, 0\nv_mov_b32 v6, 0\nv_mov_b32 v7, 0\nv_mov_b32 v1, 0\n"
        f"{MFMA}.loc 1 11 0\nglobal_load_dword v2, v1, s[2:3]\n.loc 1 12 0\n{2 * MFMA}"
        f".loc 1 13 0\ns_waitcnt vmcnt(0)\n{MFMA}"
    )
    compiled = SimpleNamespace(
        asm={"amdgcn": gfx950(body)}, metadata=SimpleNamespace(shared=1024, num_warps=1)
    )
    x = torch.zeros(64, dtype=torch.int32)
    report = execute(compiled, 1, {"x": x}, schedule=EQUAL, trace=True)
    report.raise_if_bad()
    (slack,) = report.trace.slack_of_lines()
    assert slack.products == (2,) and slack.typical == 2
    assert (slack.copy, slack.wait) == ("toy.py:11", "toy.py:13")


def test_only_the_first_wait_for_a_copy_counts():
    trace, here = Trace(), Location("copy", 1, "toy.py", 3)
    trace.copy("a", here, products=4)
    trace.copy("a", here, products=6)  # the same phase: its oldest copy is waited for
    trace.wait("b", here, products=7)
    trace.wait("a", here, products=9)
    trace.wait("a", here, products=30)
    assert [one.products for one in trace.slack] == [5]
    assert str(trace.slack_of_lines()[0]) == "toy.py:3 -> toy.py:3: 5 products (5 to 5)"
