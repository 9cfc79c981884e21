"""Races in PTX: found whatever the order was, and not found where something orders the accesses."""
# ruff: noqa: E501  (programs read best unbroken)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled.probes import PROBES, Faulty
from compiled.texts import ptx, run_ptx
from gluon_sim.compiled import SCHEDULES, Kind, Schedule

START = """ld.param.b64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
mov.b32 %r5, global_smem; shl.b32 %r4, %r1, 2; add.s32 %r6, %r5, %r4; xor.b32 %r7, %r4, 128; add.s32 %r7, %r5, %r7;
setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32;"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r5+512], 32; bar.sync 0;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r5+512];"
WAIT = "W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r5+512], 0; @!%p3 bra W;"
STORE, LOAD = "st.shared.b32 [%r6], %r1;", "ld.shared.b32 %r2, [%r7]; st.global.b32 [%rd3], %r2;"
COPY = "cp.async.ca.shared.global [%r6], [%rd3], 4; cp.async.commit_group;"


def kinds(body: str, schedule: Schedule) -> frozenset[Kind]:
    """Two warps; every one has the other's words at %r7."""
    out = torch.arange(64, dtype=torch.int32)
    return run_ptx(ptx(f"{START} {body}", threads=64), out, schedule=schedule).kinds()


ORDERED = {
    "a barrier": f"{STORE} bar.sync 0; {LOAD}",
    "an mbarrier": f"{INIT} @!%p2 bra B; {STORE} {ARRIVE} bra E; B: {WAIT} {LOAD} E:",
    "what was read before": f"{STORE} bar.sync 0; {LOAD} bar.sync 0; st.shared.b32 [%r6], %r2;",
    "a wait for copies": f"{COPY} cp.async.wait_group 0; bar.sync 0; {LOAD}",
    "the same value": f"st.shared.b32 [%r5], 7; st.shared.b32 [%r5], 7; bar.sync 0; {LOAD}".replace(
        "%r7", "%r5"
    ),
}
UNORDERED = {
    "no barrier": f"{STORE} {LOAD}",
    "no wait": f"{INIT} @!%p2 bra B; {STORE} {ARRIVE} bra E; B: {LOAD} E:",
    "no barrier after the read": f"{STORE} bar.sync 0; {LOAD} st.shared.b32 [%r6], %r2;",
    "no wait for copies": f"{COPY} bar.sync 0; {LOAD}",
    "different values": "st.shared.b32 [%r5], %r1; bar.sync 0;",
    "mbarrier.init not ordered": INIT.replace("bar.sync 0;", "")
    + f"@%p2 bra E; {WAIT} E: @%p2 {ARRIVE}",
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_no_race(name: str, schedule: Schedule):
    assert kinds(ORDERED[name], schedule) == frozenset()


@pytest.mark.parametrize("schedule", SCHEDULES[:2], ids=str)
@pytest.mark.parametrize("name", UNORDERED)
def test_what_is_not_ordered_is_found(name: str, schedule: Schedule):
    found = kinds(UNORDERED[name], schedule)
    assert found and found <= {Kind.RACE, Kind.UNINITIALIZED}


def product_with(fence: str) -> frozenset[Kind]:
    """A wgmma whose operands four warps stored, behind another fence."""
    probe = PROBES["bf16 swizzle 128 along along"]
    text = probe.text.replace("fence.proxy.async.shared::cta;", fence)
    try:
        replace(probe, text=text).run()
    except Faulty as faulty:
        return faulty.args[0].kinds()
    return frozenset()


def test_a_fence_publishes_what_its_warp_has_heard_of():
    first = "setp.lt.u32 %p2, %r1, 32; @%p2 fence.proxy.async.shared::cta;"
    assert product_with("") == {Kind.FENCE}
    assert product_with(first) == {Kind.FENCE}  # the stores of three warps are not published
    assert product_with(f"bar.sync 0; {first}") == frozenset()
