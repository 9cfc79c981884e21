"""PTX texts by themselves: what they compute, and what is refused."""

import numpy as np
import pytest
import torch

from gluon_sim import Kind, Unsupported, register_asm, simulate
from gluon_sim.language import ptx
from gluon_sim.language.asm import accumulator_registers, registers_of
from gluon_sim.values.layouts import DistributedLinearLayout, NVMMADistributedLayout
from toys import assembly


def run(text: str, constraints: str = "=r,r,r") -> tuple[torch.Tensor, torch.Tensor, set[Kind]]:
    x = torch.randint(-(2**31), 2**31, (2, 128), generator=torch.Generator().manual_seed(1)).int()
    out = torch.zeros(128, dtype=torch.int32)
    kwargs = {"TEXT": text, "CONSTRAINTS": constraints}
    report = simulate(assembly.two_operands, 1, (x, out), kwargs, outputs=("o_ptr",))
    return x, out, set(report.kinds())


def test_halves_of_a_register():
    text = "{ .reg .b16 a, b, c, d; mov.b32 {a, b}, $1; mov.b32 {c, d}, $2; mov.b32 $0, {b, c}; }"
    x, out, kinds = run(text)
    assert not kinds
    wanted = (x[0].long() >> 16 & 0xFFFF) | (x[1].long() & 0xFFFF) << 16
    assert torch.equal(out, ((wanted + 2**31) % 2**32 - 2**31).int())


def test_a_guard_keeps_what_was_there():
    text = "{ .reg .pred p; mov.b32 $0, $1; setp.lt.f32 p, $1, $2; @!p mov.b32 $0, $2; }"
    x, out, kinds = run(text)
    assert not kinds
    a, b = x.view(torch.float32)
    assert torch.equal(out, torch.where(a < b, x[0], x[1]))


def test_signed_numbers_are_compared():
    text = "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.f32 $0, $1, $2, p; }"
    x, out, kinds = run(text)
    assert not kinds and torch.equal(out, torch.minimum(x[0], x[1]))


def test_comparisons_are_joined():
    text = (
        "{ .reg .pred p; setp.lt.s32 p, $1, $2; setp.ge.or.s32 p, $1, 0, p; "
        "selp.f32 $0, 0f00000000, $1, p; }"
    )
    x, out, kinds = run(text)
    assert not kinds
    assert torch.equal(out, torch.where((x[0] < x[1]) | (x[0] >= 0), 0, x[0]))


def test_two_floats_become_two_bytes_the_first_the_high_one():
    text = "{ .reg .b16 a; cvt.rn.satfinite.e4m3x2.f32 a, $1, $2; mov.b32 $0, {a, a}; }"
    x, out, kinds = run(text)
    assert not kinds
    high, low = (
        v.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).int()
        for v in x.view(torch.float32)
    )
    assert torch.equal(out & 0xFFFF, high << 8 | low)
    assert len(set((out & 0xFF).tolist())) > 10  # not all of them saturate


def test_arithmetic_of_floats():
    text = (
        "{ .reg .f32 a; .reg .pred p; max.f32 a, $1, $2; neg.f32 a, a; add.f32 a, a, $2; "
        "setp.gt.f32 p, $1, $2; @p neg.f32 a, a; ex2.approx.ftz.f32 $0, a; }"
    )
    x, out, kinds = run(text)
    numbers = ~x.view(torch.float32).isnan().any(0)
    a, b = x.view(torch.float32)[:, numbers]
    wanted = torch.exp2(torch.where(a > b, a - b, torch.zeros_like(a)))
    assert not kinds and torch.allclose(out.view(torch.float32)[numbers], wanted)


def test_lanes_exchange_values():
    value = np.arange(64, dtype=np.uint32).reshape(2, 32)
    threads = ptx.Threads(value.shape, True, {"$1": value})
    threads.run(ptx.parse("shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"))
    assert np.array_equal(threads.result("$0"), value ^ 2)


def test_bytes_of_two_words_are_picked():
    x, out, kinds = run("prmt.b32 $0, $1, $2, 0x7250;")
    assert not kinds
    a, b = x.contiguous().view(torch.uint8).view(2, -1, 4)
    assert torch.equal(
        out.view(torch.uint8).view(-1, 4), torch.stack([a[:, 0], b[:, 1], a[:, 2], b[:, 3]], 1)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("or.b32 $0, $1, $2;", lambda x: x[0] | x[1]),
        ("shl.b32 $0, $1, 4;", lambda x: x[0] << 4),
        ("shl.b32 $0, $1, 33;", lambda x: x[0] * 0),
        ("shr.u32 $0, $1, 16;", lambda x: (x[0] >> 16) & 0xFFFF),
        ("shr.u32 $0, $1, 32;", lambda x: x[0] * 0),
    ],
)
def test_bits_are_joined_and_moved(text: str, expected):
    x, out, kinds = run(text)
    assert not kinds
    assert torch.equal(out, expected(x))


def test_a_bit_selects():
    text = (
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $1, 8; setp.ne.b32 p, t, 0; "
        "selp.f32 $0, $2, 0fFF800000, p; }"
    )
    x, out, kinds = run(text)
    assert not kinds
    minus_inf = torch.full((128,), -torch.inf).view(torch.int32)
    assert torch.equal(out, torch.where((x[0] & 8) != 0, x[1], minus_inf))


@pytest.mark.parametrize(
    "text",
    [
        "mov.b32 $1, $2;",  # the output is never written
        "{ .reg .b32 t; mov.b32 $0, t; }",
        "mov.b32 $0, $1 $2;",
        "{ .reg .pred p; setp.lt.f32 p, $1, $2; @p mov.b32 $0, $1; }",
        "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, a; }",
        "{ .reg .pred p; mov.b32 $0, $1; setp.lt.f32 p, $1, $2; @p bra.uni END; END: }",
    ],
)
def test_an_error_of_the_text_is_a_finding(text: str):
    assert run(text)[2] == {Kind.ERROR}


@pytest.mark.parametrize("constraints", ["=h,r,r", "=r,r", "=r,l,r", "r,=r,r"])
def test_constraints_must_fit(constraints: str):
    assert run("mov.b32 $0, $1;", constraints)[2] == {Kind.ERROR}


@pytest.mark.parametrize(
    "text",
    [
        "mul.rz.f32 $0, $1, $2;",
        "ld.global.b32 $0, [$1];",
        "AGAIN: mov.b32 $0, $1; bra.uni AGAIN;",
        "{ .reg .pred p; setp.neu.f32 p, $1, $2; vote.sync.any.pred p, p, -1; mov.b32 $0, $1; }",
    ],
)
def test_what_is_not_known_is_refused(text: str):
    with pytest.raises(Unsupported):
        run(text)


def test_a_registered_text_gets_arrays():
    register_asm(r"larger\.s32 \$0, \$1, \$2;", lambda match, args: np.maximum(*args))
    x, out, kinds = run("larger.s32 $0, $1, $2;")
    assert not kinds and torch.equal(out, x.amax(0))


def test_registers_of_an_accumulator_cover_it_once():
    layout = NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    rows, columns = accumulator_registers(layout, [64, 128])
    assert rows.shape == (4, 32, 64)
    assert len(np.unique(rows * 128 + columns)) == 64 * 128
    thread = [(int(r), int(c)) for r, c in zip(rows[1, 5, :6], columns[1, 5, :6], strict=True)]
    assert thread == [(17, 2), (17, 3), (25, 2), (25, 3), (17, 10), (17, 11)]


def test_registers_of_a_linear_layout():
    """Every second register of an accumulator, its pairs of columns as [words, 4]."""
    bases = (
        [[8, 0, 0], [0, 1, 0], [0, 2, 0]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    )
    layout = DistributedLinearLayout(*bases, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4])
    rows, words, threads = registers_of(layout, [64, 4, 4])
    like = NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    wanted = [x[:, :, ::2] for x in accumulator_registers(like, [64, 32])]
    assert np.array_equal(rows, wanted[0]) and np.array_equal(words * 8 + threads * 2, wanted[1])
