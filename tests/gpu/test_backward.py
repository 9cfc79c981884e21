"""Gradients on a GPU: accepted by the rule, repeatable, the same in graphs and when compiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import openmla
from gpu.on_device import DEVICE, normal, offsets, on_gpu
from openmla.kernels.portable.sparse_backward import plan as sparse_plan
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import GradientCase, build_gradients, random_gradient_case
from openmla.lab.testing.memory import BACKGROUNDS, Memory
from openmla.lab.testing.row_gradients import (
    build_row_gradients,
    judge_rows_twice,
    random_row_gradient_case,
)

pytestmark = on_gpu
REPEATS = int(os.environ.get("OPENMLA_GPU_REPEATS", "1000"))
V3 = Case("dense", 4, 128, 64, 128, q_lens=(300, 41, 1), k_lens=(300, 90, 1))


def usable(case: GradientCase) -> GradientCase:
    """The case in bf16, with widths that have kernels."""
    widths = {n: min(getattr(case.case, n), 256) for n in ("d_nope", "d_rope", "d_v")}
    return replace(case, case=replace(case.case, dtype="bf16", **widths))


@pytest.mark.parametrize("seed", range(100))
def test_the_rule_accepts_random_cases(seed: int) -> None:
    built = build_gradients(usable(random_gradient_case(seed)), Memory(DEVICE))
    found = built.run()
    for verdict in judge_twice(built, found.gradients, found.saved):
        assert verdict.ok, f"{built.case}\n{verdict.report()}"


@pytest.mark.parametrize("sink", ["none", "normal", "mixed"])
@pytest.mark.parametrize("key_mask", ["none", "half"])
@pytest.mark.parametrize("d_lse", [False, True])
def test_model_widths(sink: str, key_mask: str, d_lse: bool) -> None:
    case = replace(V3, sink=sink, key_mask=key_mask)
    built = build_gradients(GradientCase(case, d_lse=d_lse), Memory(DEVICE))
    found = built.run()
    for verdict in judge_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_is_not_addressed_reaches_no_gradient(seed: int) -> None:
    case = usable(random_gradient_case(500 + seed))
    case = replace(case, case=replace(case.case, spare=3, layout="strided"))
    clean: dict[str, Tensor] = {}
    for background in BACKGROUNDS:
        found = build_gradients(case, Memory(DEVICE, background)).run().gradients
        clean = clean or found
        assert all(torch.equal(found[name], clean[name]) for name in clean), background


class Step(NamedTuple):
    """A dense call and its backward pass."""

    rows: tuple[Tensor, ...]
    """q, k_nope, k_rope and v"""
    cu: Tensor
    sink: Tensor | None = None
    key_mask: Tensor | None = None
    of_lse: bool = False
    """Whether a gradient of lse comes back too."""

    def gradients(self) -> tuple[Tensor, ...]:
        """Gradients of all rows, then that of the sink."""
        given = [x.detach().requires_grad_() for x in self.rows]
        sink = None if self.sink is None else self.sink.detach().requires_grad_()
        out, lse = openmla.mla_prefill(
            *given,
            cu_seqlens_q=self.cu,
            sink=sink,
            key_mask=self.key_mask,
            return_lse=True,
        )
        loss = out.float().square().sum() + (lse.sum() if self.of_lse else 0.0)
        return torch.autograd.grad(loss, given if sink is None else [*given, sink])

    def of_requests(self, *spans: slice) -> Step:
        """These requests alone, one after another."""
        key_mask = None if self.key_mask is None else pick(self.key_mask, spans)
        rows = tuple(pick(x, spans) for x in self.rows)
        cu = offsets(*(span.stop - span.start for span in spans))
        return self._replace(rows=rows, cu=cu, key_mask=key_mask)


class ListStep(NamedTuple):
    """A call over lists and its backward pass, by Hopper's own kernels."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    sink: Tensor | None = None
    of_lse: bool = False

    def gradients(self) -> tuple[Tensor, ...]:
        """Gradients of q, of the rows, then that of the sink."""
        given = [x.detach().requires_grad_() for x in (self.q, self.kv, self.sink) if x is not None]
        out, lse = openmla.mla_prefill_sparse(
            given[0],
            given[1],
            self.indices,
            scale=0.05,
            sink=None if self.sink is None else given[2],
            return_lse=True,
            backend="hopper",
        )
        loss = out.float().square().sum() + (lse.sum() if self.of_lse else 0.0)
        return torch.autograd.grad(loss, given)


def pick(x: Tensor, spans: Sequence[slice]) -> Tensor:
    return torch.cat([x[span] for span in spans])


LENS = (500, 120, 380)
SPANS = (slice(0, 500), slice(500, 620), slice(620, 1000))
VARIANTS = (
    "plain",
    "sink",
    "gradient of lse",
    "sink, gradient of lse",
    "key mask",
    "key mask, sink",
    "key mask, gradient of lse",
)
LIST_VARIANTS = ("lists", "lists, sink", "lists, gradient of lse")


def step(variant: str = "plain") -> Step:
    """A step of 8 heads whose rows, sink and mask are drawn."""
    tokens, words = sum(LENS), -(-max(LENS) // 128) * 4
    torch.manual_seed(len(variant))
    rows = (
        normal(tokens, 8, 192),
        normal(tokens, 8, 128),
        normal(tokens, 64),
        normal(tokens, 8, 128),
    )
    mask = torch.randint(-(2**31), 2**31, (tokens, words), device=DEVICE).int()
    return Step(
        rows,
        offsets(*LENS),
        normal(8).float() if "sink" in variant else None,
        mask if "mask" in variant else None,
        "lse" in variant,
    )


def list_step(variant: str = "lists") -> ListStep:
    """150 queries of 64 heads, each with 256 of 700 rows."""
    torch.manual_seed(len(variant))
    indices = torch.randint(-1, 700, (150, 256), device=DEVICE, dtype=torch.int32)
    sink = normal(64).float() if "sink" in variant else None
    return ListStep(normal(150, 64, 576), normal(700, 576), indices, sink, "lse" in variant)


def any_step(variant: str) -> Step | ListStep:
    return list_step(variant) if variant in LIST_VARIANTS else step(variant)


def equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    """Bit for bit, signs of zeros too."""
    integer = {2: torch.int16, 4: torch.int32}
    pairs = zip(got, want, strict=True)
    return all(torch.equal(*(x.view(integer[x.element_size()]) for x in p)) for p in pairs)


@pytest.mark.parametrize("variant", (*VARIANTS, *LIST_VARIANTS))
def test_repeats_and_streams_have_equal_bits(variant: str) -> None:
    of = any_step(variant)
    first = of.gradients()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(0, REPEATS, 2):
        found = []
        for stream in streams:  # side by side
            with torch.cuda.stream(stream):
                found.append(of.gradients())
        torch.cuda.synchronize()
        assert all(equal(again, first) for again in found), i


@pytest.mark.parametrize("variant", (*VARIANTS, *LIST_VARIANTS))
def test_a_captured_step_replays(variant: str) -> None:
    of = any_step(variant)
    want = of.gradients()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        of.gradients()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = of.gradients()
    for i in range(REPEATS // 10):
        graph.replay()
        torch.cuda.synchronize()
        assert equal(got, want), i


@pytest.mark.parametrize("variant", VARIANTS)
def test_permuted_requests_have_permuted_gradients(variant: str) -> None:
    """All but d_sink, which is a sum over all of them."""
    of, order = step(variant), [SPANS[i] for i in (2, 0, 1)]
    first, got = of.gradients(), of.of_requests(*order).gradients()
    assert equal(got[:4], [pick(x, order) for x in first[:4]])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_request_has_the_gradients_that_it_has_alone(variant: str) -> None:
    of = step(variant)
    first = of.gradients()
    for span in SPANS:
        assert equal(of.of_requests(span).gradients()[:4], [x[span] for x in first[:4]])


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_neighbors_change_no_gradient(variant: str) -> None:
    of = step(variant)
    first = of.gradients()
    for x in of.rows:
        x[SPANS[0]], x[SPANS[2]] = x[SPANS[0]].flip(0) * 3, -x[SPANS[2]]
    got = of.gradients()
    assert equal([x[SPANS[1]] for x in got[:4]], [x[SPANS[1]] for x in first[:4]])


def test_forward_bits_are_those_without_gradients() -> None:
    tensors, cu = step().rows, offsets(*LENS)
    out, lse = openmla.mla_prefill(*tensors, cu_seqlens_q=cu, return_lse=True)
    tracked = [x.detach().requires_grad_() for x in tensors]
    got, got_lse = openmla.mla_prefill(*tracked, cu_seqlens_q=cu, return_lse=True)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    assert torch.equal(out, openmla.mla_prefill(*tensors, cu_seqlens_q=cu))


def test_a_compiled_step_has_the_same_gradients() -> None:
    of = step()
    torch._dynamo.reset()
    compiled: Any = torch.compile(openmla.mla_prefill, fullgraph=True)
    given = [x.detach().requires_grad_() for x in of.rows]
    out = compiled(*given, cu_seqlens_q=offsets(*LENS))
    got = torch.autograd.grad(out.float().square().sum(), given)
    assert equal(got, of.gradients())


LISTS = Case("sparse", 16, 512, 64, 512, q_lens=(60,), k_lens=(700,), topk=200, scale=0.05)


@pytest.mark.parametrize("rope", ["shared", "per_head"])
@pytest.mark.parametrize("extra", ["none", "sink", "gradient of lse"])
@pytest.mark.parametrize("causal", [False, True])
def test_wide_columns_of_hoppers_own(rope: str, extra: str, causal: bool) -> None:
    lens = {"q_lens": (300, 41, 1, 129), "k_lens": (300, 90, 1, 700)}
    case = replace(V3, d_nope=192, d_v=256, rope=rope, causal=causal, spare=3, **lens)
    case = replace(case, sink="mixed" if extra == "sink" else "none")
    built = build_gradients(
        GradientCase(case, d_lse=extra == "gradient of lse"), Memory(DEVICE, "nan")
    )
    found = built.run("hopper")
    for verdict in judge_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


@pytest.mark.parametrize("key_mask", ["half", "few"])
@pytest.mark.parametrize("extra", ["none", "sink", "gradient of lse"])
@pytest.mark.parametrize("causal", [False, True])
def test_key_masks_of_hoppers_own(key_mask: str, extra: str, causal: bool) -> None:
    lens = {"q_lens": (300, 41, 1, 129), "k_lens": (300, 90, 1, 700)}
    case = replace(V3, key_mask=key_mask, sink="mixed" if extra == "sink" else "none", **lens)
    case = replace(case, causal=causal, spare=3)
    built = build_gradients(
        GradientCase(case, d_lse=extra == "gradient of lse"), Memory(DEVICE, "nan")
    )
    found = built.run("hopper")
    for verdict in judge_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("sink", ["none", "normal"])
@pytest.mark.parametrize("kind", ["mixed", "duplicates"])
def test_lists_of_model_widths(heads: int, sink: str, kind: str) -> None:
    case = replace(LISTS, heads=heads, sink=sink, index_kind=kind, topk_lengths="ragged")
    built = build_row_gradients(GradientCase(case, d_lse=kind == "mixed"), Memory(DEVICE))
    found = built.run()
    for verdict in judge_rows_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_accepts_random_lists(seed: int) -> None:
    case = random_row_gradient_case(seed)
    widths = {"d_nope": 64, "d_rope": 16, "d_v": 64}
    case = replace(case, case=replace(case.case, dtype="bf16", **widths))
    built = build_row_gradients(case, Memory(DEVICE))
    found = built.run()
    for verdict in judge_rows_twice(built, found.gradients, found.saved):
        assert verdict.ok, f"{built.case}\n{verdict.report()}"


def test_lists_have_equal_bits_however_often_and_in_whatever_workspace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, kv = normal(50, 16, 576), normal(400, 576)
    indices = torch.randint(-1, 400, (50, 128), device=DEVICE, dtype=torch.int32)

    def row_step() -> tuple[Tensor, ...]:
        given = q.detach().requires_grad_(), kv.detach().requires_grad_()
        out = openmla.mla_prefill_sparse(*given, indices, scale=0.05)
        return torch.autograd.grad(out.float().square().sum(), given)

    first = row_step()
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(row_step(), first, strict=True))
    monkeypatch.setattr(sparse_plan, "PART_CAP", 7 * 128 * 576 * 4)  # bytes: of 7 queries
    assert all(torch.equal(a, b) for a, b in zip(row_step(), first, strict=True))


@pytest.mark.parametrize("heads", [5, 64, 65, 128])
@pytest.mark.parametrize("extra", ["none", "sink", "gradient of lse"])
@pytest.mark.parametrize("kind", ["mixed", "duplicates"])
def test_lists_of_hoppers_own(heads: int, extra: str, kind: str) -> None:
    sink = "normal" if extra == "sink" else "none"
    case = replace(LISTS, heads=heads, sink=sink, index_kind=kind, topk_lengths="ragged")
    d_lse = extra == "gradient of lse"
    built = build_row_gradients(GradientCase(case, d_lse=d_lse), Memory(DEVICE, "nan"))
    found = built.run("hopper")
    for verdict in judge_rows_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


def test_queries_elsewhere_have_their_gradients_over_lists() -> None:
    of = list_step()
    order = torch.randperm(150, device=DEVICE)
    moved = of._replace(q=of.q[order], indices=of.indices[order])
    assert equal(moved.gradients()[:1], [of.gradients()[0][order]])
