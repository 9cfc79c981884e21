"""The loss that trains an indexer: right, repeatable, and refused where nobody computes it."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import openmla
from formula import same_bits
from openmla import InvalidArgument, Unsupported, plan
from openmla.indexer import loss_api, loss_problem
from openmla.indexer.loss_operands import LossOperands
from openmla.indexer.loss_problem import LossProblem
from openmla.indexer.loss_reference import index_loss
from openmla.lab.testing.index_loss import (
    LossCase,
    build_loss,
    faults,
    random_loss_case,
    run_loss,
)
from openmla.planning import Plan
from openmla.sequences import ragged_spans

LONG = LossCase((150, 9), (210, 9), heads=5, index_heads=9, sink=True, masked=True)


def test_examples() -> None:
    assert [doctest.testmod(module).failed for module in (loss_api, loss_problem)] == [0, 0]


# The definition


def formula(op: LossOperands, index: tuple[Tensor, ...]) -> Tensor:
    """The sum of loss * d_loss by torch's own functions, from its own softmax: float64."""
    attention, total = op.attention, torch.zeros((), dtype=torch.float64)
    for span in ragged_spans(attention.cu_seqlens_q, attention.cu_seqlens_k):
        rows = slice(span.q_start, span.q_start + span.q_len)
        keys = slice(span.k_start, span.k_start + span.k_len)
        q, k = attention.q[rows].double(), attention.k_nope[keys].double()
        if attention.k_rope is not None:
            rope = attention.k_rope[keys].double()
            rope = rope if rope.dim() == 3 else rope[:, None].expand(-1, q.shape[1], -1)
            k = torch.cat([k, rope], dim=-1)
        scores = attention.weights.scale * torch.einsum("thd,shd->hts", q, k)
        place = torch.arange(span.q_len)[:, None] + span.k_len - span.q_len
        column = torch.arange(span.k_len)
        seen = column <= place if attention.causal else torch.ones_like(scores[0]).bool()
        if attention.key_mask is not None:
            words = attention.key_mask[rows][:, column // 32]
            seen = seen & ((words >> (column % 32)) & 1).bool()
        scores = scores.masked_fill(~seen, -torch.inf)
        if attention.weights.sink is not None:
            sink = attention.weights.sink.double()[:, None, None].expand(-1, span.q_len, 1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1].sum(0)
        else:
            weights = scores.softmax(-1).sum(0)
        some = seen.any(-1)
        target = weights[some] / weights[some].sum(-1, keepdim=True)
        index_q, index_k, index_w = index[0][rows], index[1][keys], index[2][rows]
        z = torch.einsum("thd,sd->ths", index_q, index_k).relu()
        found = torch.einsum("th,ths->ts", index_w, z).masked_fill(~seen, -torch.inf)[some]
        share = found.log_softmax(-1).masked_fill(~seen[some], 0.0)
        loss = torch.xlogy(target, target).sum(-1) - (target * share).sum(-1)
        total = total + (loss * op.d_loss[rows].double()[some]).sum()
    return total


@pytest.mark.parametrize("seed", range(12))
def test_the_definition_is_what_autograd_makes_of_the_formula(seed: int) -> None:
    op = build_loss(replace(random_loss_case(seed), dtype=torch.float32))
    index = [x.double().requires_grad_() for x in (op.index_q, op.index_k, op.index_weights)]
    total = formula(op, tuple(index))
    expected = torch.autograd.grad(total, index, allow_unused=True) if total.requires_grad else ()
    exact = index_loss(op)
    assert abs((exact.loss * op.d_loss.double()).sum() - total.detach()) <= 1e-5
    for got, want in zip((exact.q, exact.k, exact.weights), expected, strict=False):
        # The lse that attention returned is fp32's.
        assert (got - want).abs().max() <= 1e-5 if want.numel() else True


def test_differences_of_the_loss_are_its_gradients() -> None:
    op = build_loss(LossCase((5,), (7,), heads=2, index_heads=2, width=4))
    exact = index_loss(op)
    step = 2.0**-10
    for name, gradient in (("index_q", exact.q), ("index_k", exact.k)):
        x = getattr(op, name).double()
        move = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        sides = [index_loss(replace(op, **{name: x + s * move})).loss for s in (step, -step)]
        slope = ((sides[0] - sides[1]) * op.d_loss.double()).sum() / (2 * step)
        assert abs(slope - (gradient * move).sum()) <= 1e-4 * abs(slope) + 1e-6


# Right


@pytest.mark.parametrize("first", range(0, 60, 15))
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_rule_accepts_random_cases(first: int, backend: str) -> None:
    for seed in range(first, first + 15):
        op = build_loss(random_loss_case(seed))
        assert faults(op, run_loss(op, backend)) == [], random_loss_case(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_tiles_and_groups(dtype: torch.dtype) -> None:
    op = build_loss(replace(LONG, dtype=dtype))
    assert faults(op, run_loss(op)) == []


def test_a_perfect_indexer_has_nothing_to_learn() -> None:
    """One head of attention, and scores that are its own, shifted: softmax forgets the shift."""
    op = build_loss(LossCase((9,), (9,), heads=1, index_heads=1, d_rope=0, width=17, scale=1.0))
    attention = op.attention
    ones = torch.ones(9, 1, 1)
    index_q = torch.cat([attention.q, 100 * ones], dim=-1)  # positive, so that relu is nothing
    index_k = torch.cat([attention.k_nope[:, 0], ones[:, 0]], dim=-1)
    got = run_loss(replace(op, index_q=index_q, index_k=index_k, index_weights=torch.ones(9, 1)))
    assert got["loss"].abs().max() <= 1e-4 and got["q"].abs().max() <= 1e-2


# The rule has teeth


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[..., dict[str, Tensor]]:
    def apply(op: LossOperands) -> dict[str, Tensor]:
        got = run_loss(op)
        return {**got, name: change(got[name].clone())}

    return apply


def rerun(**how: object) -> Callable[[LossOperands], dict[str, Tensor]]:
    """A loss of other operands, judged as if it were of these."""

    def apply(op: LossOperands) -> dict[str, Tensor]:
        new = {}
        for key, value in how.items():
            if key.startswith("attention_"):
                name = key.removeprefix("attention_")
                base = new.get("attention", op.attention)
                new["attention"] = replace(base, **{name: value(getattr(base, name))})
            else:
                new[key] = value(getattr(op, key))
        return run_loss(replace(op, **new))

    return apply


def without_head(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, -1] = 0
    return y


DEFECTS: dict[str, Callable[[LossOperands], dict[str, Tensor]]] = {
    "d_q 1 % too large": changed("q", lambda x: x * 1.01),
    "d_k 1 % too large": changed("k", lambda x: x * 1.01),
    "d_w 1 % too large": changed("weights", lambda x: x * 1.01),
    "loss 1 % too large": changed("loss", lambda x: x * 1.01),
    "d_q of the last head missing": changed("q", without_head),
    "d_w of the last head missing": changed("weights", without_head),
    "d_q of a neighbor": changed("q", lambda x: x.roll(1, 0)),
    "d_k of a neighbor": changed("k", lambda x: x.roll(1, 0)),
    "d_k with the wrong sign": changed("k", lambda x: -x),
    "gradients with the wrong sign": changed("q", lambda x: -x),
    "loss of a neighbor": changed("loss", lambda x: x.roll(1, 0)),
    "d_loss ignored": rerun(d_loss=torch.ones_like),
    "relu forgotten in weights": rerun(index_weights=lambda w: w.abs()),
    "weights of a neighbor": rerun(index_weights=lambda w: w.roll(1, 0)),
    "lse of a neighbor": rerun(lse=lambda x: x.roll(1, 0)),
    "lse of another head": rerun(lse=lambda x: x.roll(1, 1)),
    "sink forgotten": rerun(attention_weights=lambda w: replace(w, sink=None)),
    "scale twice": rerun(attention_weights=lambda w: replace(w, scale=w.scale**2)),
    "mask forgotten": rerun(attention_key_mask=lambda m: None),
    "mask of a neighbor": rerun(attention_key_mask=lambda m: m.roll(1, 0)),
    "causal forgotten": rerun(attention_causal=lambda c: False),
    "rope forgotten": rerun(attention_k_rope=torch.zeros_like),
    "one attention head only": rerun(
        attention_q=lambda q: torch.cat([q[:, :1]] * q.shape[1], dim=1)
    ),
    "keys of a neighbor": rerun(index_k=lambda k: k.roll(1, 0)),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects_are_rejected(name: str) -> None:
    op = build_loss(LossCase((40, 3), (50, 3), heads=3, index_heads=4, sink=True, masked=True))
    assert faults(op, DEFECTS[name](op)) != []
    assert faults(op, run_loss(op)) == []


# The same bits; nothing else is read


def test_the_same_bits_every_time() -> None:
    op = build_loss(LONG)
    first = run_loss(op)
    for _ in range(3):
        again = run_loss(op)
        assert all(same_bits(first[name], again[name]) for name in first)


def test_a_sequence_has_the_bits_that_it_has_alone() -> None:
    op = build_loss(LossCase((150, 70, 9), (210, 70, 12), heads=5, index_heads=9))
    together = run_loss(op)
    spans = ragged_spans(op.attention.cu_seqlens_q, op.attention.cu_seqlens_k)
    for span in list(spans):
        q = slice(span.q_start, span.q_start + span.q_len)
        k = slice(span.k_start, span.k_start + span.k_len)
        a = op.attention
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (span.q_len, span.k_len))
        rows = {"q": a.q[q], "k_nope": a.k_nope[k], "k_rope": a.k_rope[k], "v": a.v[k]}
        lone = replace(a, **rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        index = op.index_q[q], op.index_k[k], op.index_weights[q]
        alone = run_loss(LossOperands(*index, lone, op.lse[q], op.d_loss[q]))
        for name, rows_of in (("loss", q), ("q", q), ("weights", q), ("k", k)):
            assert same_bits(together[name][rows_of], alone[name]), name


@pytest.mark.parametrize("background", [torch.nan, torch.inf, -3.0])
@pytest.mark.parametrize("seed", range(6))
def test_memory_that_is_not_addressed_reaches_nothing(seed: int, background: float) -> None:
    case = random_loss_case(seed)
    clean = run_loss(build_loss(case))
    op = build_loss(case, spare=3, background=background)
    got = run_loss(op)
    for name, want in clean.items():
        rows = len(want)
        assert same_bits(got[name][:rows], want), name
        assert not got[name][rows:].any() and not torch.signbit(got[name][rows:]).any()


def test_rows_that_see_no_key_have_no_loss() -> None:
    op = build_loss(LossCase((4, 2), (2, 0), masked=False))
    got = run_loss(op)
    for name in ("loss", "q", "weights"):
        empty = torch.cat([got[name][:2], got[name][4:]])
        assert not empty.any() and not torch.signbit(empty).any()


# Operators


def test_it_compiles_into_one_graph() -> None:
    op = build_loss(LossCase((17,), (17,)))
    expected = run_loss(op)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(index_q: Tensor) -> Tensor:
        return openmla.indexer_loss(
            index_q,
            op.index_k,
            op.index_weights,
            op.attention.q,
            op.attention.k_nope,
            op.attention.k_rope,
            op.lse,
            cu_seqlens_q=op.attention.cu_seqlens_q,
            scale=0.2,
        )

    leaf = op.index_q.clone().requires_grad_()
    loss = compiled(leaf)
    (got,) = torch.autograd.grad(loss, leaf, op.d_loss)
    assert same_bits(got, expected["q"]) and same_bits(loss.detach(), expected["loss"])


@pytest.mark.parametrize("name", ["index_loss", "index_loss_backward"])
def test_torch_checks_the_operator(name: str) -> None:
    op = build_loss(LossCase((5, 3), (5, 3)))
    a = op.attention
    arguments = [op.index_q, op.index_k, op.index_weights, a.q, a.k_nope, a.k_rope, op.lse]
    arguments += [a.cu_seqlens_q, a.cu_seqlens_k, None, None, 0.2, True, "auto"]
    if name == "index_loss_backward":
        arguments = [op.d_loss, *arguments]
    operator = getattr(torch.ops.openmla, name).default
    torch.library.opcheck(operator, tuple(arguments), test_utils=("test_schema", "test_faketensor"))


def test_a_second_derivative_is_refused() -> None:
    op = build_loss(LossCase((5,), (5,)))
    a, leaf = op.attention, op.index_q.clone().requires_grad_()
    loss = openmla.indexer_loss(
        *(leaf, op.index_k, op.index_weights, a.q, a.k_nope, a.k_rope, op.lse),
        cu_seqlens_q=a.cu_seqlens_q,
    )
    (d_q,) = torch.autograd.grad(loss.sum(), leaf, create_graph=True)
    with pytest.raises(Unsupported, match="a second derivative"):
        d_q.sum().backward()


def test_attention_is_a_target_without_gradient() -> None:
    op = build_loss(LossCase((5,), (5,)))
    a, q = op.attention, op.attention.q.clone().requires_grad_()
    loss = openmla.indexer_loss(
        *(op.index_q, op.index_k, op.index_weights, q, a.k_nope, a.k_rope, op.lse),
        cu_seqlens_q=a.cu_seqlens_q,
    )
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("index_q", torch.zeros(5, 3, 31)),
        ("index_q", torch.zeros(5, 0, 32)),
        ("index_k", torch.zeros(4, 32)),
        ("index_weights", torch.zeros(5, 2)),
        ("lse", torch.zeros(5, 3)),
        ("cu_seqlens_k", torch.zeros(3, dtype=torch.int32)),
        ("cu_seqlens_q", torch.tensor([0, 6], dtype=torch.int32)),
        ("key_mask", torch.zeros(5, 0, dtype=torch.int32)),
        ("causal", 1),
    ],
)
def test_wrong_arguments(name: str, value: object) -> None:
    op = build_loss(LossCase((5,), (5,)))
    a = op.attention
    given = {"index_q": op.index_q, "index_k": op.index_k, "index_weights": op.index_weights}
    given |= {"q": a.q, "k_nope": a.k_nope, "k_rope": a.k_rope, "lse": op.lse}
    given |= {"cu_seqlens_q": a.cu_seqlens_q, name: value}
    with pytest.raises(InvalidArgument):
        openmla.indexer_loss(**given)  # type: ignore[arg-type]


def test_a_plan_says_what_would_run() -> None:
    dense = openmla.Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64)
    problem = LossProblem.of(dense, index_heads=64, index_dim=128, wants_gradients=True)
    found = plan(problem, "cpu")
    assert found.backend == "cpu" and "gradients of the loss of an indexer" in found.explain()
    assert Plan.from_json(found.to_json()) == found


def test_flops_are_those_of_all_products() -> None:
    """The indexer's scores once, and again for the gradients of its queries and of its keys."""
    dense = openmla.Problem(
        form="dense", heads=3, d_nope=16, d_rope=8, d_v=16, total_q=5, total_k=7
    )
    loss = LossProblem.of(dense, index_heads=4, index_dim=128)
    assert loss.flops == 2 * 5 * 7 * (3 * 24 + 4 * 128)
    assert replace(loss, wants_gradients=True).flops == 2 * 5 * 7 * (3 * 24 + 3 * 4 * 128)
