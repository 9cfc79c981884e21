"""Results turned back by the angle of the query's position: what turns, by what, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import openmla
from openmla import InvalidArgument, Listed, Problem, TurnBack, Unsupported, reference
from openmla.kernels.launch import launch
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import Verdict, compare
from openmla.lab.testing.sources import SourcesCase, checked, new_results, operands
from openmla.operands import AttendOperands
from openmla.planning import plan
from openmla.planning.registry import FAMILIES

CASE = SourcesCase(kinds=("span", "list"), pages=(64, 2), turned=64, seed=1)
CASES = {
    "span and list": CASE,
    "two lists": replace(CASE, kinds=("list", "list"), turned=2),
    "one list": replace(CASE, kinds=("list",), turned=512, sink=False),
    "one span": replace(CASE, kinds=("span",), heads=1, turned=128, seed=2),
    "bf16": replace(CASE, formats=("bf16", "fp8_584"), turned=30, lengths=False, seed=4),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_deaf_to_poison(name: str) -> None:
    found = checked(CASES[name], "cpu", "cpu", deep=True)
    assert found.status == "right" and found.poisoned, found.message


TOKENS, HEADS, WIDTH, TURNED = 6, 3, 16, 6


def a_call(**options: Any) -> dict[str, Any]:
    """Queries, one list of rows of which one query sees none, and angles for five positions."""
    lists = calls.numbers(TOKENS, 5, seed=2).mul(7).int().abs() % 12
    lists[4] = -1
    angles = calls.numbers(5, TURNED // 2, seed=3)
    given = {
        "q": calls.numbers(TOKENS, HEADS, WIDTH, seed=1),
        "sources": [Listed(calls.numbers(12, WIDTH, seed=4), lists)],
        "scale": 0.3,
        "d_v": 12,
        "turn_back": TurnBack(
            torch.cat([angles.cos(), angles.sin()], 1), torch.tensor([4, 0, 2, 2, 1, 3])
        ),
    }
    return given | options


def plain(given: dict[str, Any]) -> Tensor:
    out = openmla.mla_attend(**{**given, "turn_back": None})
    assert isinstance(out, Tensor)
    return out


def spelled_out(out: Tensor, turn: TurnBack) -> Tensor:
    """The definition once more, number by number, in fp32."""
    turned, half = out.clone(), turn.columns // 2
    for token, position in enumerate(turn.positions.tolist()):
        if not 0 <= position < turn.table.shape[0]:
            continue
        for i in range(half):
            a_at = out.shape[2] - turn.columns + 2 * i
            cos, sin = turn.table[position, i], turn.table[position, half + i]
            a, b = out[token, :, a_at], out[token, :, a_at + 1]
            turned[token, :, a_at] = a * cos + b * sin
            turned[token, :, a_at + 1] = b * cos - a * sin
    return turned


def test_the_last_columns_turn_by_the_position_of_the_query() -> None:
    given = a_call()
    out = openmla.mla_attend(**given)
    assert torch.equal(out, spelled_out(plain(given), given["turn_back"]))


def test_lse_is_untouched() -> None:
    given = a_call()
    _, lse = openmla.mla_attend(**given, return_lse=True)
    _, before = openmla.mla_attend(**{**given, "turn_back": None}, return_lse=True)
    assert torch.equal(lse, before)


@pytest.mark.parametrize("strange", [-1, 5, -(2**31), 2**31 - 1])
def test_a_position_outside_the_table_turns_nothing(strange: int) -> None:
    given = a_call()
    turn = given["turn_back"]
    positions = turn.positions.int()
    positions[2] = strange
    out = openmla.mla_attend(**{**given, "turn_back": replace(turn, positions=positions)})
    assert torch.equal(out[2], plain(given)[2]) and not torch.equal(out[3], plain(given)[3])


def test_a_table_without_lines_turns_nothing() -> None:
    given = a_call(turn_back=TurnBack(torch.empty(0, TURNED), torch.zeros(TOKENS).long()))
    assert torch.equal(openmla.mla_attend(**given), plain(given))


def test_a_query_without_keys_stays_plus_zero() -> None:
    given = a_call()
    table = -given["turn_back"].table.abs()
    for values in (table, torch.full_like(table, torch.nan)):
        out = openmla.mla_attend(**{**given, "turn_back": TurnBack(values, torch.ones(6).int())})
        assert not bool(out[4].view(torch.int32).any())


def test_sums_are_turned_before_they_are_rounded() -> None:
    """bf16 results are fp32 sums turned and rounded once, to the bit."""
    given = a_call(q=calls.numbers(TOKENS, HEADS, WIDTH, seed=1).bfloat16())
    source = given["sources"][0]
    given["sources"] = [replace(source, rows=source.rows.bfloat16())]
    sums = torch.empty(TOKENS, HEADS, 12)
    openmla.mla_attend(**{**given, "turn_back": None, "out": sums})
    out = openmla.mla_attend(**given)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, spelled_out(sums, given["turn_back"]).bfloat16())
    rounded_before = spelled_out(sums.bfloat16().float(), given["turn_back"]).bfloat16()
    assert not torch.equal(out, rounded_before)


def test_bits_of_a_row_are_its_own() -> None:
    given = a_call()
    whole, turn, listed = openmla.mla_attend(**given), given["turn_back"], given["sources"][0]
    for token in range(TOKENS):
        one = slice(token, token + 1)
        alone = {
            "q": given["q"][one],
            "sources": [replace(listed, indices=listed.indices[one])],
            "turn_back": replace(turn, positions=turn.positions[one]),
        }
        assert torch.equal(openmla.mla_attend(**{**given, **alone}), whole[one])


def test_torch_compile_traces_it_whole() -> None:
    given = a_call()

    def attend(table: Tensor, positions: Tensor) -> Tensor:
        out = openmla.mla_attend(**{**given, "turn_back": TurnBack(table, positions)})
        assert isinstance(out, Tensor)
        return out

    turn = given["turn_back"]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(turn.table, turn.positions), attend(turn.table, turn.positions))


# What the acceptance rule must see.


def result_of(case: SourcesCase) -> tuple[AttendOperands, Outcome]:
    op = operands(case)
    results = new_results(op)
    launch(plan(op.problem(results), "cpu"), op, results)
    return op, Outcome(results.out, results.lse)


def judged(op: AttendOperands, out: Tensor) -> Verdict:
    return compare(Outcome(out, None), reference.of(op), columns=512)


def turned_by(out: Tensor, cos: Tensor, sin: Tensor, columns: slice, halves: bool) -> Tensor:
    """out with some columns turned by minus an angle for each query; pairs are neighbors, or the
    two halves of the columns."""
    result = out.double()
    some = result[..., columns]
    half = some.shape[-1] // 2
    if halves:
        a, b = some[..., :half].clone(), some[..., half:].clone()
    else:
        a, b = some[..., ::2].clone(), some[..., 1::2].clone()
    pairs = a * cos + b * sin, b * cos - a * sin
    some.copy_(torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2))
    return result.to(out.dtype)


LAST = slice(512 - 64, 512)
DEFECTS = {
    "not turned": None,
    "the sign of the angle": lambda out, cos, sin: turned_by(out, cos, -sin, LAST, False),
    "halves for neighbors": lambda out, cos, sin: turned_by(out, cos, sin, LAST, True),
    "the position of a neighbor": lambda out, cos, sin: turned_by(
        out, cos.roll(1, 0), sin.roll(1, 0), LAST, False
    ),
    "the first columns": lambda out, cos, sin: turned_by(out, cos, sin, slice(0, 64), False),
    "one pair too early": lambda out, cos, sin: turned_by(
        out, cos, sin, slice(512 - 66, 512 - 2), False
    ),
    "turned twice": lambda out, cos, sin: turned_by(
        turned_by(out, cos, sin, LAST, False), cos, sin, LAST, False
    ),
    "cosines for sines": lambda out, cos, sin: turned_by(out, sin, cos, LAST, False),
    "sines that are too large": lambda out, cos, sin: turned_by(out, cos, sin * 1.05, LAST, False),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_the_rule_rejects(name: str) -> None:
    """Many queries of many rows each, all turned."""
    case = SourcesCase(kinds=("list",), first=(60,) * 3, turned=64, heads=16, seed=5)
    op = operands(case)
    _, before = result_of(replace(case, turned=0))
    turn = op.turn_back
    assert turn is not None
    cos, sin = (x[:, None].double() for x in turn.cos_sin(slice(0, case.tokens)))
    right = turned_by(before.out, cos, sin, LAST, False)
    assert judged(op, right).ok, judged(op, right).report()
    change = DEFECTS[name]
    wrong = before.out if change is None else change(before.out, cos, sin)
    assert not judged(op, wrong).ok


def test_the_rule_takes_what_cancels() -> None:
    """Rows turned by the angle of the query: every second turned column is a difference of equal
    numbers, and errors of both remain."""
    cos, sin = torch.tensor([[0.6, 0.28]]), torch.tensor([[0.8, 0.96]])
    rows = torch.zeros(4, 16)
    rows[:, 12::2], rows[:, 13::2] = cos, sin
    turn = TurnBack(torch.cat([cos, sin], 1), torch.zeros(1).int())
    given = a_call(
        q=calls.numbers(1, 2, 16, seed=6), sources=[Listed(rows, torch.arange(4)[None].int())]
    )
    given |= {"turn_back": turn, "d_v": 16}
    out = openmla.mla_attend(**given)
    op = AttendOperands(
        given["q"], tuple(given["sources"]), 16, openmla.operands.Weights(0.3), turn
    )
    verdict = compare(Outcome(out, None), reference.of(op), columns=16)
    assert verdict.ok, verdict.report()


# What is refused.


@pytest.mark.parametrize(
    ("table", "positions", "named"),
    [
        (torch.zeros(5, 6).double(), torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(5, 5), torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(5, 0), torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(5, 14), torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(6, 5).T, torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(5), torch.zeros(6).long(), "turn_back.table"),
        (None, torch.zeros(6).long(), "turn_back.table"),
        (torch.zeros(5, 6), torch.zeros(5).long(), "turn_back.positions"),
        (torch.zeros(5, 6), torch.zeros(6), "turn_back.positions"),
        (torch.zeros(5, 6), torch.zeros(6, 1).int(), "turn_back.positions"),
        (torch.zeros(5, 6), None, "turn_back.positions"),
    ],
)
def test_wrong_arguments_are_named(table: Any, positions: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named.replace(".", r"\.")):
        openmla.mla_attend(**a_call(turn_back=TurnBack(table, positions)))


@pytest.mark.parametrize("value", [5, (torch.zeros(5, 6), torch.zeros(6).int()), "back"])
def test_what_is_no_turn_back_is_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument, match="turn_back"):
        openmla.mla_attend(**a_call(turn_back=value))


def test_gradients_of_a_turned_call_are_refused() -> None:
    given = a_call()
    given["q"].requires_grad_()
    with pytest.raises((InvalidArgument, Unsupported), match="q"):
        openmla.mla_attend(**given)


def test_an_output_in_the_memory_of_the_table_is_refused() -> None:
    memory = torch.zeros(TOKENS * HEADS * 12)
    table = memory[: 5 * TURNED].view(5, TURNED)
    turn = TurnBack(table, torch.zeros(TOKENS).int())
    with pytest.raises(InvalidArgument, match=r"turn_back\.table"):
        openmla.mla_attend(**a_call(turn_back=turn, out=memory.view(TOKENS, HEADS, 12)))


SPARSE = Problem("sparse", 64, 512, 0, 512, topk=512, total_q=4, total_k=4096, turned_back=64)


@pytest.mark.parametrize(
    "changed",
    [
        {"turned_back": 3},
        {"turned_back": -2},
        {"turned_back": 514},
        {"has_k_scale": True},
        {"form": "latent", "topk": 0},
    ],
)
def test_no_such_problem(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        replace(SPARSE, **changed)


def test_a_plan_says_so() -> None:
    assert "64 columns turned back" in str(SPARSE)
    assert "64 columns turned back" in plan(SPARSE, "cpu").explain()


def test_no_kernel_serves_it_untold() -> None:
    """What is not declared is refused: kernels of one list among them."""
    for family in FAMILIES:
        for kernel in family.of_form("sparse"):
            if not kernel.serves.mentions("turned_back"):
                assert kernel.serves.why_not(SPARSE), (family.name, kernel.name)
