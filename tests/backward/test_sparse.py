"""Gradients of `mla_prefill_sparse`: the definition, the rule, and calls as users make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from backward.sparse_defects import DEFECTS, SHOWCASES, differentiate
from formula import same_bits
from openmla import LatentCache, Unsupported
from openmla.backward import sparse_reference
from openmla.backward.problem import BackwardProblem
from openmla.backward.sparse_operands import by_row
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.memory import BACKGROUNDS, Memory
from openmla.lab.testing.row_gradients import (
    build_row_gradients,
    judge_rows_twice,
    random_row_gradient_case,
)
from openmla.operands import Results, SparseOperands, Weights
from unstable_sorts import unstable_sorts

INDICES = torch.tensor([[0, 1, 2, 2], [3, 99, 1, 1], [-1, -1, -1, -1], [5, 6, 7, 8]]).int()
LENGTHS = torch.tensor([4, 4, 4, 2]).int()


def call(dtype: torch.dtype = torch.float32, **changed: Any) -> dict[str, Any]:
    """Four queries over nine rows: a duplicate, entries that do not count, an empty list."""
    generator = torch.Generator().manual_seed(0)
    made = {
        "q": torch.randn(4, 3, 24, generator=generator).to(dtype).requires_grad_(),
        "kv": torch.randn(9, 24, generator=generator).to(dtype).requires_grad_(),
        "indices": INDICES,
        "topk_lengths": LENGTHS,
        "sink": torch.randn(3, generator=generator).requires_grad_(),
        "scale": 0.3,
        "d_v": 16,
    }
    return {**made, **changed}


def eager(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, differentiated by autograd; -inf where no row is seen."""
    q, kv = given["q"].double(), given["kv"].double()
    outs, lses = [], []
    for t in range(len(q)):
        keys = [i for i in INDICES[t, : LENGTHS[t]].tolist() if 0 <= i < len(kv)]
        k = kv[keys]
        s = given["scale"] * (q[t] @ k.T)
        lse = torch.logsumexp(s, -1)
        total = lse if given["sink"] is None else torch.logaddexp(lse, given["sink"].double())
        outs.append(torch.exp(s - total[:, None]) @ k[:, :16])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def gradients(given: dict[str, Any], function: Any = openmla.mla_prefill_sparse) -> list[Tensor]:
    """Gradients of sums of squares of out and lse, where it is finite."""
    wanted = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    out, lse = function(**given, return_lse=True)
    loss = out.float().square().sum() + torch.where(lse.isinf(), 0.0, lse).square().sum()
    return list(torch.autograd.grad(loss, wanted))


# Right


@pytest.mark.parametrize("with_sink", [True, False])
def test_the_definition_is_what_autograd_finds(with_sink: bool) -> None:
    given = call(**({} if with_sink else {"sink": None}))
    leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    d_out = torch.randn(4, 3, 16, generator=generator).double()
    d_lse = torch.randn(4, 3, generator=generator).double()
    out, lse = eager(given)
    seen = torch.tensor([0, 1, 3])
    loss = (out * d_out)[seen].sum() + (lse * d_lse)[seen].sum()
    expected = torch.autograd.grad(loss, leaves)
    op = SparseOperands(
        given["q"].detach().double(),
        given["kv"].detach().double(),
        *(INDICES, LENGTHS, 16),
        Weights(0.3, None if given["sink"] is None else given["sink"].detach().double()),
    )
    found = sparse_reference.backward(op, d_out, d_lse)
    for got, want in zip(found, expected, strict=False):
        assert torch.allclose(got, want.double(), atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_as_autograd(backend: str) -> None:
    given = call()
    want = torch.autograd.grad(_loss(*eager(given)), [given["q"], given["kv"], given["sink"]])
    got = gradients({**given, "backend": backend})
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=2e-5)
    d_q, d_kv, _ = got
    for nobody in (d_q[2], d_kv[[4, 7, 8]]):  # an empty list; rows past a length, or not named
        assert not nobody.any() and not torch.signbit(nobody).any()


def _loss(out: Tensor, lse: Tensor) -> Tensor:
    seen = torch.tensor([0, 1, 3])
    return out[seen].square().sum() + lse[seen].square().sum()


@pytest.mark.parametrize(
    "first", [0, 8, *(pytest.param(n, marks=pytest.mark.long) for n in (16, 60))]
)
def test_the_rule_accepts_them_on_random_cases(first: int) -> None:
    for seed in range(first, first + 8):
        built = build_row_gradients(random_row_gradient_case(seed))
        found = built.run()
        both = judge_rows_twice(built, found.gradients, found.saved)
        assert [f"{built.case}\n{v.report()}" for v in both if not v.ok] == []


def test_random_cases_have_every_option() -> None:
    cases = [random_row_gradient_case(seed) for seed in range(200)]
    assert {c.case.dtype for c in cases} == {"bf16", "fp16", "fp32"}
    assert {c.d_lse for c in cases} == {True, False}
    assert {c.case.sink for c in cases} == {"none", "normal", "low", "high", "mixed"}
    assert {c.case.topk_lengths for c in cases} == {"none", "full", "ragged", "wild"}
    assert {c.case.index_kind for c in cases} >= {"distinct", "duplicates", "mixed", "invalid"}


# The rule has teeth


@pytest.mark.parametrize("name", SHOWCASES)
def test_a_plain_backward_pass_is_accepted(name: str) -> None:
    for seed in (1, 2):
        case = SHOWCASES[name]
        built = build_row_gradients(replace(case, case=replace(case.case, seed=seed)))
        saved = built.run().saved
        both = judge_rows_twice(built, differentiate(built, saved), saved)
        assert [v.report() for v in both if not v.ok] == []


@pytest.mark.parametrize("mistake", DEFECTS)
def test_every_defect_is_rejected(mistake: str) -> None:
    for name in DEFECTS[mistake]:
        case = SHOWCASES[name]
        built = build_row_gradients(replace(case, case=replace(case.case, seed=1)))
        saved = built.run().saved
        both = judge_rows_twice(built, differentiate(built, saved, mistake), saved)
        assert not all(v.ok for v in both), name


# Bits


def test_out_and_lse_have_the_bits_of_a_call_without_gradients() -> None:
    given = call(torch.bfloat16)
    plain = {k: x.detach() if isinstance(x, Tensor) else x for k, x in given.items()}
    for got, want in zip(
        openmla.mla_prefill_sparse(**given, return_lse=True),
        openmla.mla_prefill_sparse(**plain, return_lse=True),
        strict=True,
    ):
        assert same_bits(got.detach(), want)
    assert same_bits(
        openmla.mla_prefill_sparse(**given).detach(), openmla.mla_prefill_sparse(**plain)
    )


def test_entries_of_a_row_are_in_the_order_of_the_queries() -> None:
    """In which kernels add them, so that sums have the same bits every time."""
    given = call()
    op = SparseOperands(
        *(given[n].detach() for n in ("q", "kv", "indices", "topk_lengths")), 16, Weights(0.3, None)
    )
    with unstable_sorts():
        order, starts = (x.tolist() for x in by_row(op, 0, 4))
    entries = [order[a:b] for a, b in pairwise(starts)]
    assert entries == [[0], [1, 6, 7], [2, 3], [4], [], [12], [13], [], []]


def test_queries_of_others_change_no_bit() -> None:
    """Two requests whose rows are apart: gradients of one are those it has alone."""
    given = call(torch.bfloat16, sink=None)
    d_q, d_kv = gradients(given)
    more = {
        "q": torch.cat([given["q"].detach(), torch.randn(2, 3, 24).bfloat16()]).requires_grad_(),
        "kv": torch.cat([given["kv"].detach(), torch.randn(5, 24).bfloat16()]).requires_grad_(),
        "indices": torch.cat([INDICES, torch.tensor([[9, 10, 9, 13], [12, -1, 9, 9]]).int()]),
        "topk_lengths": torch.cat([LENGTHS, torch.tensor([4, 4]).int()]),
    }
    # Index 99 names no row, with 9 rows or with 14.
    q_too, kv_too = gradients({**given, **more})
    assert same_bits(q_too[:4], d_q) and same_bits(kv_too[:9], d_kv)


def test_memory_that_is_not_addressed_reaches_no_gradient() -> None:
    case = replace(random_row_gradient_case(5), d_lse=True)
    case = replace(case, case=replace(case.case, spare=3, layout="strided", topk=20))
    runs = [build_row_gradients(case, Memory(background=b)).run().gradients for b in BACKGROUNDS]
    for found in runs[1:]:
        assert all(same_bits(found[name], runs[0][name]) for name in found)


def test_what_is_asked_for_changes_no_bit() -> None:
    every = gradients(call(torch.bfloat16))
    for i, name in enumerate(("q", "kv", "sink")):
        given = call(torch.bfloat16)
        for other in {"q", "kv", "sink"} - {name}:
            given[other] = given[other].detach()
        assert same_bits(gradients(given)[0], every[i])


# Refused


def test_calls_without_a_backward_pass_are_refused() -> None:
    for changed, reason in (
        ({"q_scale": torch.ones(4)}, "q_scale is given"),
        ({"k_scale": torch.ones(9)}, "k_scale is given"),
        ({"out": torch.empty(4, 3, 16)}, "out is given"),
        ({"return_max_logits": True}, "max_logits"),
    ):
        with pytest.raises(Unsupported, match=reason):
            openmla.mla_prefill_sparse(**call(), **changed)
    with pytest.raises(Unsupported, match="hopper"):
        openmla.mla_prefill_sparse(**call(), backend="hopper")
    cache = LatentCache.allocate(num_pages=2, page_size=8, latent=16, rope=8)
    with pytest.raises(Unsupported, match="kv is a LatentCache"):
        openmla.mla_prefill_sparse(**call(torch.bfloat16, kv=cache))


def test_a_second_derivative_is_refused() -> None:
    given = call()
    out = openmla.mla_prefill_sparse(**given)
    (d_q,) = torch.autograd.grad(out.sum(), given["q"], create_graph=True)
    with pytest.raises(Unsupported, match="second derivative"):
        d_q.sum().backward()


def test_two_sources_are_refused() -> None:
    problem = SparseOperands(
        torch.zeros(1, 1, 16), torch.zeros(2, 16), INDICES[:1], None, 16, Weights(1.0)
    ).problem(Results(torch.zeros(1, 1, 16)))
    spans = replace(problem, span=True, topk=0, page_size=4, table_keys=8)
    with pytest.raises(Unsupported, match="page_size 4: not served"):
        openmla.plan(BackwardProblem.of(spans), "cpu")
    with pytest.raises(Unsupported, match="fp16"):
        fp16 = replace(problem, q_dtype="fp16", kv_dtype="fp16")
        openmla.plan(BackwardProblem.of(fp16), "h200")
    bf16 = replace(problem, q_dtype="bf16", kv_dtype="bf16")
    assert openmla.plan(BackwardProblem.of(bf16), "h200").kernel_name == "sparse_backward"


# torch


def test_operators_are_well_formed() -> None:
    given = call()
    arguments = (
        *(given[n] for n in ("q", "kv", "indices", "topk_lengths", "sink")),
        0.3,
        16,
        "auto",
        True,
    )
    found = torch.library.opcheck(torch.ops.openmla.sparse_train.default, arguments)
    assert set(found.values()) == {"SUCCESS"}
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    out, lse = torch.ops.openmla.sparse_train(*plain)
    backward = torch.ops.openmla.sparse_backward.default
    handed = (torch.ones_like(out), torch.ones_like(lse), out, lse, [True] * 3, *plain)
    assert set(torch.library.opcheck(backward, handed).values()) == {"SUCCESS"}


@pytest.fixture
def compiling() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_call_has_the_same_gradients(compiling: None) -> None:
    compiled = torch.compile(openmla.mla_prefill_sparse, fullgraph=True, backend="aot_eager")
    given = call(torch.bfloat16)
    for got, want in zip(gradients(given, compiled), gradients(given), strict=True):
        assert same_bits(got, want)


def test_no_query_and_no_row() -> None:
    empty = call(q=torch.zeros(0, 3, 24).requires_grad_(), indices=INDICES[:0], topk_lengths=None)
    d_q, d_kv, d_sink = gradients(empty)
    assert d_q.shape == (0, 3, 24) and not d_kv.any() and not d_sink.any()
    none = call(kv=torch.zeros(0, 24).requires_grad_())
    assert not gradients(none)[0].any()


def test_cases_have_a_name() -> None:
    assert "sparse" in str(GradientCase(SHOWCASES["lse"].case, d_lse=True))
