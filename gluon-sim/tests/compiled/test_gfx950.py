"""gfx950 instructions, one at a time, and the faults that the interpreter finds."""
# ruff: noqa: E501  (a line of the table is a program, which reads best unbroken)

from __future__ import annotations

import pytest
import torch

from compiled.texts import gfx950, run_gfx950
from gluon_sim.compiled import SCHEDULES, Kind, Schedule, UnknownInstruction

STORE = "v_lshlrev_b32_e32 v1, 2, v0\nglobal_store_dword v1, v2, s[2:3]"
COPY = "v_lshlrev_b32_e32 v1, 2, v0\ns_mov_b32 m0, 0\nglobal_load_lds_dword v1, s[2:3]"
READ = "ds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[2:3]"
LATE = Schedule("late")


def lanes(body: str, waves: int = 1) -> list[int]:
    """What lanes have in v2 after a body; v0 is their number."""
    out = torch.zeros(64 * waves, dtype=torch.int32)
    run_gfx950(gfx950(f"{body}\n{STORE}"), out, waves=waves).raise_if_bad()
    return out.tolist()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v_add_u32_e32 v2, 5, v0", lambda i: i + 5),
        ("v_sub_u32_e32 v3, v0, v0\nv_subrev_u32_e32 v2, 9, v0", lambda i: i - 9),
        ("v_subrev_u32_e32 v3, 9, v0\nv_ashrrev_i32_e32 v2, 1, v3", lambda i: (i - 9) >> 1),
        ("v_bfe_u32 v2, v0, 1, 3", lambda i: (i >> 1) & 7),
        ("v_bfe_i32 v2, v0, 1, 3", lambda i: ((i >> 1 & 7) ^ 4) - 4),
        ("s_movk_i32 s40, 0xd\n s_bfe_i32 s40, s40, 0x30001\n v_mov_b32_e32 v2, s40", lambda i: -2),
        ("v_bitop3_b32 v2, v0, 7, 1 bitop3:0x6a", lambda i: (i & 7) ^ 1),
        ("v_bfrev_b32_e32 v3, v0\nv_bfrev_b32_e32 v2, v3", lambda i: i),
        ("s_mov_b32 s4, 0x04050607\nv_perm_b32 v2, v0, 0, s4", lambda i: i << 24),
        (
            "v_mov_b32_e32 v3, 1\nv_mad_u64_u32 v[4:5], s[4:5], v0, 3, 0\nv_mov_b32_e32 v2, v4",
            lambda i: 3 * i,
        ),
        (
            "v_cmp_gt_u32_e32 vcc, 7, v0\nv_cndmask_b32_e64 v2, 1, 2, vcc",
            lambda i: 2 if i < 7 else 1,
        ),
        (
            "s_movk_i32 s4, 0x10\ns_add_u32 s4, s4, 3\ns_lshl_b32 s4, s4, 1\nv_mov_b32_e32 v2, s4",
            lambda i: 38,
        ),
        ("v_add_u32_e32 v3, 7, v0\nv_readfirstlane_b32 s4, v3\nv_mov_b32_e32 v2, s4", lambda i: 7),
        ("v_readlane_b32 s4, v0, 9\nv_mov_b32_e32 v2, s4", lambda i: 9),
        (
            "v_mov_b32_e32 v2, 3\ns_movk_i32 s4, 0x28\nv_writelane_b32 v2, s4, 5",
            lambda i: 40 if i == 5 else 3,
        ),
        (
            "s_movk_i32 s4, 0x28\nv_writelane_b32 v3, s4, 5\nv_readlane_b32 s5, v3, 5\n"
            "v_mov_b32_e32 v2, s5",
            lambda i: 40,
        ),
        (
            "v_add_u32_dpp v2, v0, v0 row_shr:4 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i + (i - 4 if i % 16 >= 4 else 0),
        ),
        (
            "v_mov_b32_e32 v2, 7\nv_mov_b32_dpp v2, v0 row_bcast:15 row_mask:0xa bank_mask:0xf bound_ctrl:1",
            lambda i: i // 16 * 16 - 1 if i // 16 % 2 else 7,
        ),
        (
            "v_mov_b32_dpp v2, v0 row_bcast:31 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: 31 if i > 31 else 0,
        ),
        (
            "v_mov_b32_e32 v4, v0\nv_mov_b32_e32 v5, -1\ns_mov_b64 s[4:5], 7\n"
            "v_cmp_gt_i64_e32 vcc, s[4:5], v[4:5]\nv_cndmask_b32_e64 v2, 0, 1, vcc",
            lambda i: 1,  # a negative number
        ),
        (
            "v_mov_b32_dpp v2, v0 row_half_mirror row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i // 8 * 8 + 7 - i % 8,
        ),
        (
            "v_mov_b32_dpp v2, v0 row_ror:3 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i // 16 * 16 + (i - 3) % 16,
        ),
        (
            "v_add_u32_dpp v2, v0, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i + (i ^ 1),
        ),
        (
            "v_add_f32_dpp v2, v0, v0 quad_perm:[3,2,1,0] row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i + (i ^ 3),  # of denormals, which add as their bits do
        ),
        (
            "v_add_co_u32_e32 v3, vcc, -5, v0\nv_mov_b32_e32 v4, 1\n"
            "v_cndmask_b32_e32 v2, v3, v4, vcc",
            lambda i: 1 if i >= 5 else i - 5,
        ),
        (
            "v_lshlrev_b32_e32 v1, 2, v0\nv_add_u32_e32 v4, 1, v0\n"
            "ds_write2st64_b32 v1, v0, v4 offset1:1\ns_waitcnt lgkmcnt(0)\nds_read_b32 v2, v1 offset:256\ns_waitcnt lgkmcnt(0)",
            lambda i: i + 1,
        ),
        (
            "v_subrev_u32_e32 v3, 9, v0\ns_mov_b32 s4, 0x40000000\nv_mul_hi_i32 v2, v3, s4",
            lambda i: (i - 9) >> 2,
        ),
        (
            "v_lshlrev_b32_e32 v3, 16, v0\nv_cmp_gt_u32_e32 vcc, 7, v0\nv_mov_b32_e32 v4, 5\n"
            "v_cndmask_b32_sdwa v2, v4, v3, vcc dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_1",
            lambda i: i if i < 7 else 5,
        ),
        (
            "v_lshlrev_b32_e32 v1, 2, v0\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\nv_and_b32_e32 v1, 0x7c, v1\n"
            "ds_read2_b32 v[2:3], v1 offset1:8\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v2, v3",
            lambda i: i % 32 + 8,
        ),
        (
            "v_mov_b32_e32 v2, 4\nv_mov_b32_e32 v3, 5\nscratch_store_dwordx2 off, v[2:3], off offset:8\nscratch_store_dword off, v0, off offset:12\n"
            "scratch_load_dword v2, off, off offset:12\ns_waitcnt vmcnt(0)",
            lambda i: i,
        ),
        (
            "v_mov_b32_e32 v2, v0\nv_mov_b32_e32 v3, v0\nv_permlane32_swap_b32 v2, v3",
            lambda i: i % 32,
        ),
        (
            "v_mov_b32_e32 v2, v0\nv_mov_b32_e32 v3, v0\nv_permlane16_swap_b32 v2, v3",
            lambda i: i & ~16,
        ),
        (
            "v_mov_b32_e32 v3, 9\nv_mov_b32_e32 v1, 1\nscratch_store_dwordx2 off, v[0:1], off offset:8\nscratch_store_dword off, v3, off offset:12\n"
            "scratch_load_dwordx2 v[4:5], off, off offset:8\ns_waitcnt vmcnt(0)\nv_add_u32_e32 v2, v4, v5",
            lambda i: i + 9,
        ),
        (
            "v_mov_b32_e32 v2, 3\nv_cmp_gt_u32_e32 vcc, 5, v0\ns_and_saveexec_b64 s[4:5], vcc\nv_mov_b32_e32 v2, 4\n"
            "s_mov_b64 exec, s[4:5]",
            lambda i: 4 if i < 5 else 3,
        ),
        ("v_med3_i32 v2, v0, 7, 40", lambda i: min(max(i, 7), 40)),
        ("v_mov_b32_e32 v3, -3\nv_med3_i32 v2, v3, v0, 5", lambda i: min(i, 5)),
        ("v_subrev_u32_e32 v3, 9, v0\nv_min3_i32 v2, v3, v0, 5", lambda i: min(i - 9, 5)),
        ("v_subrev_u32_e32 v3, 9, v0\nv_max3_i32 v2, v3, 7, 40", lambda i: max(i - 9, 40)),
        ("v_sub_u32_e64 v2, v0, 5 clamp", lambda i: max(i - 5, 0)),
        (
            "v_subrev_u32_e32 v3, 9, v0\nv_add_u32_e64 v2, v3, 5 clamp",
            lambda i: i - 4 if i > 8 else -1 if i > 3 else i - 4,
        ),
        ("v_bcnt_u32_b32 v2, v0, 3", lambda i: i.bit_count() + 3),
        ("v_mbcnt_lo_u32_b32 v3, -1, 0\nv_mbcnt_hi_u32_b32 v2, -1, v3", lambda i: i),
        (
            "v_mbcnt_lo_u32_b32 v3, 5, 0\nv_mbcnt_hi_u32_b32 v2, 3, v3",
            lambda i: (i > 0) + (i > 2) + (i > 32) + (i > 33),
        ),
        (
            "v_mov_b32_e32 v3, -1\nv_add_co_u32_e32 v4, vcc, v3, v0\nv_mov_b32_e32 v5, 0\nv_addc_co_u32_e32 v2, vcc, 7, v5, vcc",
            lambda i: 7 + (i > 0),
        ),
        (
            "v_mov_b32_e32 v5, 0\nv_sub_co_u32_e64 v3, s[4:5], v0, 9\nv_subb_co_u32_e64 v2, s[4:5], v5, 0, s[4:5]",
            lambda i: -1 if i < 9 else 0,
        ),
        (
            "v_mov_b32_dpp v2, v0 row_shr:2 row_mask:0xf bank_mask:0xf bound_ctrl:1",
            lambda i: i - 2 if i % 16 > 1 else 0,
        ),
        (
            "v_mov_b32_e32 v2, 7\nv_mov_b32_dpp v2, v0 row_shr:2 row_mask:0xf bank_mask:0xf",
            lambda i: i - 2 if i % 16 > 1 else 7,
        ),
        (
            "v_mov_b32_e32 v2, 7\nv_mov_b32_dpp v2, v0 wave_shl:1 row_mask:0xf bank_mask:0xf",
            lambda i: i + 1 if i < 63 else 7,
        ),
        (
            "v_mov_b32_e32 v2, v0\nv_add_u32_dpp v2, v2, v2 row_shr:4 row_mask:0xf bank_mask:0xe",
            lambda i: 2 * i - 4 if i % 16 > 3 else i,
        ),
        (
            "v_lshlrev_b32_e32 v3, 2, v0\nv_add_u32_e32 v3, 4, v3\nds_permute_b32 v2, v3, v0\ns_waitcnt lgkmcnt(0)",
            lambda i: (i - 1) % 64,
        ),
        (
            "v_mov_b32_e32 v3, 20\nds_permute_b32 v2, v3, v0\ns_waitcnt lgkmcnt(0)",
            lambda i: 63 if i == 5 else 0,
        ),
        (
            "v_mov_b32_e32 v1, 1\nv_mov_b32_e32 v4, 9\nv_mov_b32_e32 v5, 1\nv_cmp_eq_u64_e32 vcc, v[0:1], v[4:5]\nv_cndmask_b32_e64 v2, 0, 1, vcc",
            lambda i: int(i == 9),
        ),
        (
            "v_subrev_u32_e32 v4, 9, v0\nv_ashrrev_i32_e32 v5, 31, v4\nv_mov_b32_e32 v6, 3\nv_mov_b32_e32 v7, 0\nv_cmp_lt_i64_e32 vcc, v[4:5], v[6:7]\nv_cndmask_b32_e64 v2, 0, 1, vcc",
            lambda i: int(i - 9 < 3),
        ),
        (
            "v_lshlrev_b32_e32 v3, 8, v0\nv_mov_b32_e32 v4, 9\nv_cmp_gt_u32_sdwa vcc, v3, v4 src0_sel:BYTE_1 src1_sel:DWORD\nv_cndmask_b32_e64 v2, 0, 1, vcc",
            lambda i: int(i > 9),
        ),
        (
            "s_brev_b32 s4, 3\ns_bitset0_b32 s4, 31\ns_bitset1_b32 s4, 0\nv_mov_b32_e32 v2, s4",
            lambda i: 0x40000001,
        ),
        (
            "s_movk_i32 s4, 5\ns_bitcmp1_b32 s4, 2\ns_cselect_b32 s5, 7, 8\nv_mov_b32_e32 v2, s5",
            lambda i: 7,
        ),
        (
            "s_movk_i32 s4, 5\ns_bitcmp0_b32 s4, 2\ns_cselect_b32 s5, 7, 8\nv_mov_b32_e32 v2, s5",
            lambda i: 8,
        ),
        ("v_cmp_gt_u32_e32 vcc, 7, v0\ns_bcnt1_i32_b64 s4, vcc\nv_mov_b32_e32 v2, s4", lambda i: 7),
        (
            "v_subrev_u32_e32 v3, 9, v0\nv_cvt_f32_i32_e32 v3, v3\nv_mul_f32_e32 v3, 0.5, v3\nv_cvt_i32_f32_e32 v2, v3",
            lambda i: int((i - 9) / 2),
        ),
    ],
)
def test_integers(body, expected):
    assert lanes(body) == [expected(i) for i in range(64)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("v_cvt_f32_u32_e32 v2, v0", lambda x: x),
        ("v_cvt_f32_u32_e32 v3, v0\nv_fma_f32 v2, -v3, 0.5, |v3|", lambda x: x / 2),
        ("v_cvt_f32_u32_e32 v3, v0\nv_exp_f32_e32 v2, v3", lambda x: 2.0**x),
        ("v_cvt_f32_u32_e32 v3, v0\nv_mul_f32_e32 v3, v3, v3\nv_sqrt_f32_e32 v2, v3", lambda x: x),
        ("v_cvt_f32_u32_e32 v3, v0\nv_max3_f32 v2, v3, 1.0, 4.0", lambda x: max(x, 4)),
        (
            "v_cvt_f32_u32_e32 v4, v0\nv_mov_b32_e32 v5, 1.0\nv_pk_add_f32 v[6:7], v[4:5], v[4:5] op_sel:[0,1]\nv_mov_b32_e32 v2, v6",
            lambda x: x + 1,
        ),
    ],
)
def test_floats(body, expected):
    found = torch.tensor(lanes(body), dtype=torch.int32).view(torch.float32)
    wanted = torch.tensor([expected(float(i)) for i in range(64)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("size", [16, 32])
def test_a_product_with_the_identity_transposes(size):
    """Lane l holds row l % size of A and of B: with B the identity, D is A as it is."""
    depth = 512 // size
    words, results = depth // (64 // size) // 2, size * size // 64
    body = "\n".join(f"v_mov_b32_e32 v{10 + i}, 1.0" for i in range(2 * words))
    body = body.replace("1.0", "0x3f803f80")  # two ones in bf16
    first, last = 10 + 2 * words, 10 + 2 * words + results - 1
    body += f"\nv_mfma_f32_{size}x{size}x{depth}_bf16 v[{first}:{last}], v[10:{9 + words}], v[{10 + words}:{9 + 2 * words}], 0"
    found = torch.tensor(lanes(f"{body}\nv_mov_b32_e32 v2, v{last}"), dtype=torch.int32)
    assert found.view(torch.float32).tolist() == [float(depth)] * 64


def test_reads_that_transpose():
    """Rows of 16 lanes x 4 elements come out as columns."""
    body = """v_lshlrev_b32_e32 v3, 3, v0
    v_lshlrev_b32_e32 v4, 2, v0\nv_add_u32_e32 v5, 1, v4\nv_lshl_or_b32 v6, v5, 16, v4
    v_add_u32_e32 v7, 2, v4\nv_add_u32_e32 v8, 3, v4\nv_lshl_or_b32 v7, v8, 16, v7
    ds_write_b64 v3, v[6:7]\ns_waitcnt lgkmcnt(0)\nds_read_b64_tr_b16 v[10:11], v3\ns_waitcnt lgkmcnt(0)
    v_mov_b32_e32 v2, v10"""
    first = [value & 0xFFFF for value in lanes(body)]
    # Lane i gets element i % 4 of lane i // 4, which holds the numbers 4 * lane + element.
    assert first[:16] == list(range(16)) and first[16:32] == [64 + i for i in range(16)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_copies_to_lds(schedule):
    out = torch.arange(64, dtype=torch.int32)
    run_gfx950(gfx950(f"{COPY}\ns_waitcnt vmcnt(0)\n{READ}"), out, schedule=schedule).raise_if_bad()
    assert out.tolist() == list(range(64))


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (f"{COPY}\n{READ}\ns_waitcnt vmcnt(0)", {Kind.IN_FLIGHT, Kind.UNINITIALIZED}),
        (COPY, {Kind.AT_EXIT}),
        ("v_mov_b32_e32 v1, 0\n" + READ, {Kind.UNINITIALIZED}),
        ("v_mov_b32_e32 v1, 0x2000\n" + READ, {Kind.BOUNDS}),
        ("v_mov_b32_e32 v1, 2\n" + READ, {Kind.ALIGNMENT}),
        ("v_add_u32_e32 v2, 1, v7\n" + STORE, {Kind.UNINITIALIZED}),
        ("global_load_dword v2, v0, s[2:3]\n" + STORE, {Kind.ALIGNMENT}),
        (
            "v_lshlrev_b32_e32 v1, 2, v0\nglobal_load_dword v2, v1, s[2:3]\n" + STORE,
            {Kind.UNINITIALIZED},
        ),
        ("v_lshlrev_b32_e32 v1, 8, v0\nglobal_store_dword v1, v0, s[2:3]", {Kind.BOUNDS}),
    ],
)
def test_faults(body, kinds):
    out = torch.zeros(64, dtype=torch.int32)
    report = run_gfx950(gfx950(body), out, schedule=LATE)
    assert report.kinds() == kinds
    assert all(
        f.where.file == "/kernels/toy.py" and f.where.source_line == 7 for f in report.findings
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_write_to_lds_takes_its_data_when_it_is_issued(schedule):
    body = """v_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v2, v0\nds_write_b32 v1, v2\nv_mov_b32_e32 v2, 0
    s_waitcnt lgkmcnt(0)"""
    out = torch.zeros(64, dtype=torch.int32)
    run_gfx950(gfx950(f"{body}\n{READ}"), out, schedule=schedule).raise_if_bad()
    assert out.tolist() == list(range(64))


HANDOVER = """v_lshlrev_b32_e32 v1, 2, v0\nds_write_b32 v1, v0\ns_waitcnt lgkmcnt(0)\n{}
v_xor_b32_e32 v3, 0x100, v1\nds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)\nglobal_store_dword v1, v2, s[2:3]"""


def test_atomics_of_lanes_and_waves_add_up():
    body = (
        "v_lshlrev_b32_e64 v3, v0, 1\nv_and_b32_e32 v1, 0x40, v0\nglobal_atomic_or v1, v3, s[2:3]"
    )
    out = torch.zeros(32, dtype=torch.int32)
    run_gfx950(
        gfx950(f"{body}\nv_mov_b32_e32 v3, 1\nglobal_atomic_add v1, v3, s[2:3] offset:4"),
        out,
        waves=2,
    ).raise_if_bad()
    assert out[[0, 1, 16, 17]].tolist() == [-1, 64, -1, 64]


def test_waves_meet_at_a_barrier():
    for schedule in SCHEDULES:
        out = torch.zeros(128, dtype=torch.int32)
        text = gfx950(HANDOVER.format("s_barrier"))
        run_gfx950(text, out, waves=2, schedule=schedule).raise_if_bad()
        assert out.tolist() == [i ^ 64 for i in range(128)]


def test_a_missing_barrier_is_a_race():
    text = gfx950(HANDOVER.format(""))
    kinds = [
        run_gfx950(text, torch.zeros(128, dtype=torch.int32), waves=2, schedule=s).kinds()
        for s in SCHEDULES
    ]
    assert all(Kind.RACE in found for found in kinds)


EVERY_WAVE_WRITES = """v_and_b32_e32 v3, 63, v0\nv_lshlrev_b32_e32 v1, 2, v3\nds_write_b32 v1, {}
s_barrier\nds_read_b32 v2, v1\ns_waitcnt lgkmcnt(0)\nv_lshlrev_b32_e32 v4, 2, v0
global_store_dword v4, v2, s[2:3]"""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_wave_may_read_what_all_waves_wrote_alike(schedule):
    """Whether or not the writes of the others are done, it has its own."""
    out = torch.zeros(128, dtype=torch.int32)
    text = gfx950(EVERY_WAVE_WRITES.format("v3"))
    run_gfx950(text, out, waves=2, schedule=schedule).raise_if_bad()
    assert out.tolist() == [i % 64 for i in range(128)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "text",
    [
        EVERY_WAVE_WRITES.format("v0"),  # other values than the other wave
        HANDOVER.replace("s_waitcnt lgkmcnt(0)\n{}", "s_barrier"),  # what the other wave wrote
        EVERY_WAVE_WRITES.format("v3")
        .replace("ds_read_b32 v2, v1", "")
        .replace("ds_write", "ds_read_b32 v2, v1\nds_write"),  # before its own write
    ],
    ids=["other values", "the other's", "too early"],
)
def test_a_write_that_nobody_waited_for_is_a_race(text, schedule):
    out = torch.zeros(128, dtype=torch.int32)
    kinds = run_gfx950(gfx950(text), out, waves=2, schedule=schedule).kinds()
    assert Kind.RACE in kinds


@pytest.mark.parametrize(
    "body", ["v_frobnicate_b32 v1, v2", "v_add_f32 v1, v2, v3 clamp", "v_mov_b32 v1, x3"]
)
def test_unknown_instructions_are_named(body):
    with pytest.raises(UnknownInstruction, match=r"frobnicate|clamp|x3"):
        lanes(body)


def test_fp8_saturates_only_when_asked():
    body = "{}v_mov_b32_e32 v3, 0x447a0000\nv_mov_b32_e32 v2, 0\nv_cvt_scalef32_pk_fp8_f32 v2, v3, v3, 1.0"
    saturating = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    assert lanes(body.format(saturating)) == [0x7E7E] * 64
    assert lanes(body.format("")) == [0x7F7F] * 64


def test_a_store_of_the_upper_half_of_a_register():
    """Halves go to memory in the other order than they have in v2."""
    body = """v_lshlrev_b32_e32 v1, 2, v0\nv_mov_b32_e32 v3, 7\nv_lshl_or_b32 v2, v0, 16, v3
    global_store_short_d16_hi v1, v2, s[2:3]\nglobal_store_short v1, v2, s[2:3] offset:2"""
    out = torch.zeros(64, dtype=torch.int32)
    run_gfx950(gfx950(body), out).raise_if_bad()
    assert out.tolist() == [lane + (7 << 16) for lane in range(64)]
