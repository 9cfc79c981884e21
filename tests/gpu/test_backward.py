"""Gradients on a GPU: accepted by the rule, repeatable, the same in graphs and when compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
REPEATS = 1000
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


def step(*tensors: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
    """Gradients of one call, for all of its tensors."""
    given = [x.detach().requires_grad_() for x in tensors]
    out = openmla.mla_prefill(*given, cu_seqlens_q=cu)
    return torch.autograd.grad(out.float().square().sum(), given)


def prompts(tokens: int = 1000) -> tuple[Tensor, ...]:
    return (
        normal(tokens, 8, 192),
        normal(tokens, 8, 128),
        normal(tokens, 64),
        normal(tokens, 8, 128),
    )


def test_repeats_and_streams_have_equal_bits() -> None:
    tensors, cu = prompts(), offsets(700, 300)
    first = step(*tensors, cu=cu)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(REPEATS):
        with torch.cuda.stream(streams[i % 2]):
            again = step(*tensors, cu=cu)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), i


def test_a_request_has_the_gradients_that_it_has_alone() -> None:
    tensors = prompts()
    together = step(*tensors, cu=offsets(700, 300))
    alone = step(*(x[700:] for x in tensors), cu=offsets(300))
    assert all(torch.equal(x[700:], y) for x, y in zip(together, alone, strict=True))


def test_permuted_requests_have_permuted_gradients() -> None:
    tensors = prompts()
    spans = [slice(0, 500), slice(500, 620), slice(620, 1000)]
    first = step(*tensors, cu=offsets(500, 120, 380))
    moved = [torch.cat([x[spans[i]] for i in (2, 0, 1)]) for x in tensors]
    got = step(*moved, cu=offsets(380, 500, 120))
    want = [torch.cat([x[spans[i]] for i in (2, 0, 1)]) for x in first]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_forward_bits_are_those_without_gradients() -> None:
    tensors, cu = prompts(), offsets(700, 300)
    out, lse = openmla.mla_prefill(*tensors, cu_seqlens_q=cu, return_lse=True)
    tracked = [x.detach().requires_grad_() for x in tensors]
    got, got_lse = openmla.mla_prefill(*tracked, cu_seqlens_q=cu, return_lse=True)
    assert torch.equal(got, out) and torch.equal(got_lse, lse)
    assert torch.equal(out, openmla.mla_prefill(*tensors, cu_seqlens_q=cu))


def test_a_captured_step_replays() -> None:
    tensors, cu = prompts(), offsets(700, 300)
    want = step(*tensors, cu=cu)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(*tensors, cu=cu)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = step(*tensors, cu=cu)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_a_compiled_step_has_the_same_gradients() -> None:
    tensors, cu = prompts(), offsets(700, 300)
    want = step(*tensors, cu=cu)
    torch._dynamo.reset()
    compiled: Any = torch.compile(openmla.mla_prefill, fullgraph=True)
    given = [x.detach().requires_grad_() for x in tensors]
    out = compiled(*given, cu_seqlens_q=cu)
    got = torch.autograd.grad(out.float().square().sum(), given)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


LISTS = Case("sparse", 16, 512, 64, 512, q_lens=(60,), k_lens=(700,), topk=200, scale=0.05)


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


def row_step(q: Tensor, kv: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    """Gradients of one sparse call by Hopper's own kernels."""
    given = q.detach().requires_grad_(), kv.detach().requires_grad_()
    out = openmla.mla_prefill_sparse(*given, indices, scale=0.05, backend="hopper")
    return torch.autograd.grad(out.float().square().sum(), given)


def many_lists() -> tuple[Tensor, Tensor, Tensor]:
    indices = torch.randint(-1, 700, (150, 256), device=DEVICE, dtype=torch.int32)
    return normal(150, 64, 576), normal(700, 576), indices


def test_hoppers_lists_have_equal_bits_on_two_streams_and_for_queries_elsewhere() -> None:
    q, kv, indices = many_lists()
    first = row_step(q, kv, indices)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(REPEATS):
        with torch.cuda.stream(streams[i % 2]):
            again = row_step(q, kv, indices)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), i
    order = torch.randperm(150, device=DEVICE)
    moved = row_step(q[order], kv, indices[order])
    assert torch.equal(moved[0], first[0][order])


def test_a_captured_step_over_lists_replays() -> None:
    tensors = many_lists()
    want = row_step(*tensors)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        row_step(*tensors)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = row_step(*tensors)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
