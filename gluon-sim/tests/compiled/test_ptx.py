"""PTX instructions, one at a time, and the faults that the interpreter finds."""
# ruff: noqa: E501  (a line of the table is a program, which reads best unbroken)

from __future__ import annotations

import math

import pytest
import torch

from compiled.texts import ptx, run_ptx
from gluon_sim.compiled import SCHEDULES, Kind, Report, Schedule, UnknownInstruction

START = "ld.param.b64 %rd1, [k_param_0]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;"
BARRIER = (
    "setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [global_smem], 1; bar.sync 0;"
)
LATE, EARLY = Schedule("late"), Schedule("early")


def lanes(body: str, sm: int = 90) -> list[int]:
    """What lanes have in %r2 after a body; %r1 is their number."""
    out = torch.zeros(32, dtype=torch.int32)
    run_ptx(ptx(f"{START} {body} st.global.b32 [%rd3], %r2;", sm), out).raise_if_bad()
    return out.tolist()


def faults(body: str, threads: int = 32, schedule: Schedule = LATE) -> Report:
    out = torch.zeros(threads, dtype=torch.int32)
    return run_ptx(ptx(f"{START} {body}", threads=threads), out, schedule=schedule)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r2, %r1, -5;", lambda i: i - 5),
        ("mad.lo.s32 %r2, %r1, 3, 7;", lambda i: 3 * i + 7),
        ("sub.s32 %r3, %r1, 9; shr.s32 %r2, %r3, 1;", lambda i: (i - 9) >> 1),
        ("shl.b32 %r2, %r1, 40;", lambda i: 0),
        ("sub.s32 %r3, %r1, 9; div.s32 %r2, %r3, 4;", lambda i: int((i - 9) / 4)),
        ("sub.s32 %r3, %r1, 9; rem.s32 %r2, %r3, 4;", lambda i: int(math.fmod(i - 9, 4))),
        ("sub.s32 %r3, %r1, 9; min.relu.s32 %r2, %r3, 4;", lambda i: max(min(i - 9, 4), 0)),
        (
            "cvt.u16.u32 %rs1, %r1; mul.hi.u16 %rs2, %rs1, 21846; cvt.u32.u16 %r2, %rs2;",
            lambda i: i // 3,
        ),
        ("lop3.b32 %r2, %r1, 7, 1, 0x6a;", lambda i: (i & 7) ^ 1),
        ("bfe.u32 %r2, %r1, 1, 3;", lambda i: (i >> 1) & 7),
        ("shl.b32 %r3, %r1, 27; bfe.s32 %r2, %r3, 28, 4;", lambda i: ((i >> 1 & 15) ^ 8) - 8),
        ("bfi.b32 %r2, %r1, 0, 4, 2;", lambda i: (i & 3) << 4),
        ("prmt.b32 %r2, %r1, 0x11223344, 0x0006;", lambda i: i << 8 | i << 16 | i << 24 | 0x22),
        ("popc.b32 %r2, %r1;", lambda i: i.bit_count()),
        ("shfl.sync.bfly.b32 %r2, %r1, 5, 31, -1;", lambda i: i ^ 5),
        ("shfl.sync.up.b32 %r2, %r1, 1, 0, -1;", lambda i: max(i - 1, 0)),
        ("shfl.sync.idx.b32 %r2, %r1, 3, 31, -1;", lambda i: 3),
        ("redux.sync.add.s32 %r2, %r1, -1;", lambda i: 496),
        ("setp.lt.u32 %p1, %r1, 3; vote.sync.ballot.b32 %r2, %p1, -1;", lambda i: 7),
        ("setp.gt.s32 %p1, %r1, 4; selp.b32 %r2, 1, 2, %p1;", lambda i: 1 if i > 4 else 2),
        ("mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1};", lambda i: i << 16),
        ("{ .reg .b32 t<2>; add.s32 t1, %r1, 1; mov.b32 %r2, t1; }", lambda i: i + 1),
        (
            "{ .reg .b32 t; .reg .b32 t<2>; mov.b32 t, %r1; mov.b32 t0, 9; mov.b32 %r2, t; }",
            lambda i: i,
        ),
    ],
)
def test_integers(body, expected):
    assert lanes(body) == [expected(i) for i in range(32)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("cvt.rn.f32.u32 %r2, %r1;", lambda x: x),
        (
            "cvt.rn.f32.u32 %r3, %r1; mul.f32 %r3, %r3, 0fBF000000; cvt.rpi.f32.f32 %r2, %r3;",
            lambda x: float(math.ceil(-x / 2)),
        ),
        ("cvt.rpi.f32.f32 %r2, 0f00000001;", lambda x: 1.0),
        ("cvt.rpi.ftz.f32.f32 %r2, 0f00000001;", lambda x: 0.0),
        ("cvt.rn.f32.u32 %r3, %r1; ex2.approx.f32 %r2, %r3;", lambda x: 2.0**x),
        ("cvt.rn.f32.u32 %r3, %r1; mul.f32 %r3, %r3, %r3; sqrt.approx.f32 %r2, %r3;", lambda x: x),
        (
            "cvt.rn.f32.u32 %r3, %r1; fma.rn.f32 %r2, %r3, 0f3F000000, 0f3F800000;",
            lambda x: x / 2 + 1,
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.bf16.f32 %rs1, %r3; mov.b16 %rs2, 0x3FC0; fma.rn.f32.bf16 %r2, %rs1, %rs2, %r3;",
            lambda x: 2.5 * x,
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.f16.f32 %rs1, %r3; sub.rn.f32.f16 %r2, %rs1, 0f3F000000;",
            lambda x: x - 0.5,
        ),
        ("cvt.rn.f32.u32 %r3, %r1; max.f32 %r2, %r3, 0f41000000;", lambda x: max(x, 8)),
        ("cvt.rn.f32.u32 %r3, %r1; max.NaN.f32 %r2, %r3, 0f7FC00000;", lambda x: math.nan),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.bf16x2.f32 %r4, %r3, %r3; mov.b32 {%rs1, %rs2}, %r4; cvt.f32.bf16 %r2, %rs2;",
            lambda x: x,
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.f16.f32 %rs1, %r3; cvt.rn.bf16.f16 %rs2, %rs1; cvt.f32.bf16 %r2, %rs2;",
            lambda x: x,
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.satfinite.e4m3x2.f32 %rs1, 0f447A0000, %r3; cvt.rn.f16x2.e4m3x2 %r4, %rs1; "
            "mov.b32 {%rs1, %rs2}, %r4; cvt.f32.f16 %r2, %rs2;",
            lambda x: 448.0,
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; cvt.rn.bf16x2.f32 %r4, %r3, 0f3FC00000; "
            "mul.rn.bf16x2 %r4, %r4, 0x40494049; mov.b32 {%rs1, %rs2}, %r4; "
            "cvt.f32.bf16 %r3, %rs1; cvt.f32.bf16 %r2, %rs2; add.rn.f32 %r2, %r2, %r3;",
            lambda x: float(torch.tensor([x, 1.5]).bfloat16().mul(3.140625).float().sum()),
        ),
        (
            "cvt.rn.f32.u32 %r3, %r1; fma.rn.f32 %r3, %r3, 0f3D000000, 0f3F800000; "
            "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, 0f3F800000; cvt.rn.bf16x2.e4m3x2 %r4, %rs1; "
            "mov.b32 {%rs1, %rs2}, %r4; cvt.f32.bf16 %r2, %rs2;",
            lambda x: float(torch.tensor(1 + x / 32).to(torch.float8_e4m3fn)),
        ),
    ],
)
def test_floats(body, expected):
    found = torch.tensor(lanes(body), dtype=torch.int32).view(torch.float32)
    wanted = torch.tensor([expected(float(i)) for i in range(32)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_lanes_that_part_meet_again():
    body = """setp.lt.u32 %p1, %r1, 10; mov.b32 %r2, 0; @%p1 bra LOW; add.s32 %r2, %r2, 100; bra END;
    LOW: add.s32 %r2, %r2, 1; END: add.s32 %r2, %r2, %r1; shfl.sync.bfly.b32 %r3, %r2, 31, 31, -1;"""
    assert lanes(body) == [(1 if i < 10 else 100) + i for i in range(32)]


def test_a_loop_with_a_table():
    body = "and.b32 %r3, 5, 1; brx.idx %r3, $T; $T: .branchtargets A, B; A: mov.b32 %r2, 1; bra C; B: mov.b32 %r2, 2; C:"
    assert lanes(body) == [2] * 32


def test_matrices_of_eight_by_eight():
    body = """shl.b32 %r4, %r1, 2; mov.b32 %r5, global_smem; add.s32 %r6, %r5, %r4; st.shared.b32 [%r6], %r1;
    and.b32 %r7, %r1, 7; shl.b32 %r7, %r7, 4; add.s32 %r8, %r5, %r7;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%r8];"""
    assert lanes(body) == list(range(32))


def test_faults_name_the_line_of_the_source():
    report = faults("\n.loc 1 42 3\nld.global.b32 %r2, [%rd3+4096];\n")
    (finding,) = report.findings
    assert finding.kind is Kind.BOUNDS and "argument_0+4096" in finding.message
    assert finding.where.file == "/kernels/toy.py" and finding.where.source_line == 42
    assert "toy.py:42: ld.global.b32" in str(report)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("ld.shared.b32 %r2, [global_smem+4096];", Kind.BOUNDS),
        ("ld.shared.b32 %r2, [global_smem+2];", Kind.ALIGNMENT),
        ("ld.global.b64 %rd4, [%rd3];", Kind.ALIGNMENT),
        ("mbarrier.arrive.shared::cta.b64 _, [global_smem];", Kind.UNINITIALIZED),
        (f"{BARRIER} mbarrier.arrive.shared::cta.b64 _, [global_smem], 2;", Kind.BARRIER),
        (
            f"{BARRIER} W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [global_smem], 0; @!%p2 bra W;",
            Kind.DEADLOCK,
        ),
        ("bar.sync 1, 96;", Kind.DEADLOCK),
        ("setp.lt.u32 %p1, %r1, 3; @%p1 bar.sync 0;", Kind.DIVERGENCE),
        ("setmaxnreg.inc.sync.aligned.u32 240; setmaxnreg.inc.sync.aligned.u32 100;", Kind.BARRIER),
    ],
)
def test_faults(body, kind):
    assert faults(body).kinds() == {kind}


def test_an_input_may_not_be_written():
    x, out = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    report = run_ptx(ptx(f"{START} st.global.b32 [%rd3], %r1;", parameters=2), x, out)
    assert report.kinds() == {Kind.READ_ONLY} and not x.any()


def test_two_counts_at_one_barrier():
    body = "setp.lt.u32 %p1, %r1, 32; @%p1 bra A; bar.sync 1, 64; bra E; A: bar.sync 1, 96; E:"
    assert faults(body, threads=64).kinds() == {Kind.BARRIER}


def test_a_phase_that_turns_twice_is_missed():
    """Warp 1 waits for phase 0 to end, which it does twice before warp 1 looks again."""
    turn = "mbarrier.arrive.shared::cta.b64 _, [global_smem];"
    body = f"""{BARRIER} setp.lt.u32 %p2, %r1, 32; @%p2 bra A;
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [global_smem], 0; @!%p3 bra W; bra E;
    A: @%p1 {turn} @%p1 {turn} E:"""
    assert faults(body, threads=64, schedule=Schedule("late", "forward")).kinds() == {Kind.PHASE}
    assert faults(body, threads=64, schedule=Schedule("late", "reverse")).kinds() == {Kind.DEADLOCK}


def test_copies_arrive_when_they_are_waited_for():
    copy = "mov.b32 %r5, global_smem; shl.b32 %r4, %r1, 2; add.s32 %r6, %r5, %r4; cp.async.ca.shared.global [%r6], [%rd3], 4, {}; cp.async.commit_group;"
    body = START + copy + "{} ld.shared.b32 %r2, [%r6]; st.global.b32 [%rd3], %r2;"
    for schedule in SCHEDULES:
        out = torch.arange(32, dtype=torch.int32)
        run_ptx(
            ptx(body.format("4", "cp.async.wait_group 0;")), out, schedule=schedule
        ).raise_if_bad()
        assert out.tolist() == list(range(32))
    out = torch.arange(32, dtype=torch.int32)
    run_ptx(ptx(body.format("0", "cp.async.wait_group 0;")), out).raise_if_bad()
    assert out.tolist() == [0] * 32  # no byte was read, so zeros arrive
    assert run_ptx(ptx(body.format("4", "")), out, schedule=LATE).kinds() == {Kind.RACE}


def test_an_arrival_waits_for_copies():
    body = f"""{START} setp.eq.u32 %p1, %r1, 0; @%p1 mbarrier.init.shared::cta.b64 [global_smem], 32; bar.sync 0;
    mov.b32 %r5, global_smem; shl.b32 %r4, %r1, 2; add.s32 %r6, %r5, %r4;
    cp.async.ca.shared.global [%r6+128], [%rd3], 4; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [global_smem];
    W: mbarrier.try_wait.parity.shared::cta.b64 %p3, [global_smem], 0; @!%p3 bra W;
    ld.shared.b32 %r2, [%r6+128]; add.s32 %r2, %r2, 1; st.global.b32 [%rd3], %r2;"""
    for schedule in SCHEDULES:
        out = torch.arange(32, dtype=torch.int32)
        run_ptx(ptx(body), out, schedule=schedule).raise_if_bad()
        assert out.tolist() == list(range(1, 33))


@pytest.mark.parametrize(
    "body",
    [
        "frobnicate.b32 %r1, %r2;",
        "add.sat.s32 %r1, %r2, 3;",
        "cvt.rn.f16.f64 %rs1, %rd1;",
        "fma.rn.bf16 %rs1, %rs1, %rs2, %rs2;",
    ],
)
def test_unknown_instructions_are_named(body):
    with pytest.raises(UnknownInstruction, match=body.split()[0]):
        faults(body)
