"""Gradients of `mla_prefill`, as users have them: right, repeatable, of the same forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import calls
import openmla
from backward.checkpointed import saving
from formula import cu_seqlens, same_bits
from openmla import Unsupported
from openmla.backward.operands import Gradients
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import (
    GradientCase,
    build_gradients,
    random_gradient_case,
)
from openmla.lab.testing.memory import BACKGROUNDS, Memory

NAMES = ("q", "k_nope", "k_rope", "v")


def leaves(call: dict[str, Any], *names: str) -> dict[str, Any]:
    """The call with tensors that require gradients, each a tensor of its own."""
    fresh = {n: call[n].detach().clone().requires_grad_() for n in names or NAMES}
    return {**call, **fresh}


def gradients(call: dict[str, Any], function: Any = openmla.mla_prefill) -> list[Tensor]:
    """Gradients of the sum of squares of out, for all tensors of the call that require them."""
    wanted = [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(function(**call).square().sum(), wanted))


# Right


@pytest.mark.parametrize("first", range(2000, 2040, 10))
def test_the_rule_accepts_them_on_random_cases(first: int) -> None:
    for seed in range(first, first + 10):
        built = build_gradients(random_gradient_case(seed))
        found = built.run()
        both = judge_twice(built, found.gradients, found.saved)
        assert [f"{built.case}\n{v.report()}" for v in both if not v.ok] == []


LONG = Case("dense", 3, 16, 8, 24, q_lens=(300, 40), k_lens=(600, 40), sink="normal")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_several_tiles_and_blocks(dtype: str, backend: str) -> None:
    built = build_gradients(GradientCase(replace(LONG, dtype=dtype), d_lse=True))
    found = built.run(backend)
    for verdict in judge_twice(built, found.gradients, found.saved):
        assert verdict.ok, verdict.report()


def test_lse_alone_has_gradients() -> None:
    call = leaves(calls.dense([5, 3]))
    _, lse = openmla.mla_prefill(**call, return_lse=True)
    d_q, d_v = torch.autograd.grad(lse.sum(), [call["q"], call["v"]])
    assert bool(d_q.any()) and not d_v.any()


def test_gradients_reach_what_tensors_are_views_of() -> None:
    """One projection of keys and values, whose gradient is both parts side by side."""
    kv = calls.numbers(8, 2, calls.D_NOPE + calls.D_V).requires_grad_()
    call = calls.dense([5, 3])
    call |= {"k_nope": kv[..., : calls.D_NOPE], "v": kv[..., calls.D_NOPE :]}
    (got,) = torch.autograd.grad(openmla.mla_prefill(**call).square().sum(), kv)
    apart = leaves({**call, "k_nope": call["k_nope"].detach(), "v": call["v"].detach()})
    found = dict(zip(NAMES, gradients(apart), strict=True))
    assert same_bits(got, torch.cat([found["k_nope"], found["v"]], dim=-1))


# The same forward pass, the same bits


@pytest.mark.parametrize("seed", range(3000, 3010))
def test_out_and_lse_have_the_bits_of_a_call_without_gradients(seed: int) -> None:
    built = build_gradients(random_gradient_case(seed))
    found = built.run()
    out, lse = openmla.mla_prefill(**built.built.arguments, return_lse=True)
    assert same_bits(found.out, out) and same_bits(found.lse, lse)
    assert same_bits(found.out, openmla.mla_prefill(**built.built.arguments))
    call = leaves(built.built.arguments, "q")
    assert same_bits(openmla.mla_prefill(**call).detach(), out)


def test_gradients_are_the_same_every_time() -> None:
    built = build_gradients(GradientCase(replace(LONG, dtype="bf16"), d_lse=True))
    first = built.run().gradients
    for _ in range(3):
        again = built.run().gradients
        assert all(same_bits(first[name], again[name]) for name in first)


def test_a_request_has_the_gradients_that_it_has_alone() -> None:
    lens, call = [130, 7, 300], leaves(calls.dense([130, 7, 300], [200, 7, 310]))
    keys = [200, 7, 310]
    together = gradients(call)
    for i in (0, 1, 2):
        q_rows = slice(sum(lens[:i]), sum(lens[: i + 1]))
        k_rows = slice(sum(keys[:i]), sum(keys[: i + 1]))
        rows = {"q": q_rows, "k_nope": k_rows, "k_rope": k_rows, "v": k_rows}
        alone = leaves({name: call[name].detach()[rows[name]] for name in NAMES})
        alone |= {"cu_seqlens_q": cu_seqlens(lens[i : i + 1])}
        alone |= {"cu_seqlens_k": cu_seqlens(keys[i : i + 1])}
        for name, got, want in zip(NAMES, together, gradients(alone), strict=True):
            assert same_bits(got[rows[name]], want), (name, i)


def test_what_is_asked_for_changes_no_bit() -> None:
    call = leaves(calls.dense([40, 9]))
    whole = dict(zip(NAMES, gradients(call), strict=True))
    for name in NAMES:
        (alone,) = gradients(leaves({n: x.detach() for n, x in call.items()}, name))
        assert same_bits(alone, whole[name])


@pytest.mark.parametrize("seed", range(4000, 4008))
def test_memory_that_is_not_addressed_reaches_no_gradient(seed: int) -> None:
    case = random_gradient_case(seed)
    case = replace(case, case=replace(case.case, spare=3, layout="strided"))
    clean: dict[str, Tensor] = {}
    for background in BACKGROUNDS:
        found = build_gradients(case, Memory(background=background)).run().gradients
        clean = clean or found
        assert all(same_bits(found[name], clean[name]) for name in clean), background


def test_keys_that_nobody_sees_get_plus_zero() -> None:
    call = {**calls.dense([2, 0, 1], [1, 4, 3]), "scale": -0.5}
    call["key_mask"] = torch.tensor([[0], [1], [0b100]], dtype=torch.int32)
    d_q, d_nope, d_rope, d_v = gradients(leaves(call))
    for got in (d_nope, d_rope, d_v):
        unseen = got[1:7]
        assert not unseen.any() and not torch.signbit(unseen).any() and bool(got[7].any())
    assert not d_q[0].any() and not torch.signbit(d_q[0]).any()


def test_no_token_at_all() -> None:
    call = leaves(calls.dense([0, 0]))
    assert [x.shape[0] for x in gradients(call)] == [0, 0, 0, 0]


# Refused


def test_a_second_derivative_is_refused() -> None:
    call = leaves(calls.dense())
    out = openmla.mla_prefill(**call)
    (d_q,) = torch.autograd.grad(out.square().sum(), call["q"], create_graph=True)
    with pytest.raises(Unsupported, match="a second derivative"):
        d_q.sum().backward()


def test_a_named_backend_without_a_backward_is_refused_before_the_forward() -> None:
    with pytest.raises(Unsupported, match="backend 'portable'"):
        openmla.mla_prefill(**leaves(calls.dense()), backend="portable")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("k_start", {"k_start": torch.tensor([0, 2], dtype=torch.int32)}),
        ("q_scale", {"q_scale": torch.ones(5)}),
        ("k_scale", {"k_scale": torch.ones(5)}),
        ("out", {"out": torch.empty(5, 2, 6)}),
    ],
)
def test_calls_without_a_backward_are_refused(name: str, changed: dict[str, Tensor]) -> None:
    with pytest.raises(Unsupported, match=f"^{name} is given"):
        openmla.mla_prefill(**leaves(calls.dense()), **changed)
    with torch.no_grad():
        openmla.mla_prefill(**leaves(calls.dense()), **changed)


def test_rope_of_a_cache_is_refused() -> None:
    call = calls.dense()
    rows = torch.cat([torch.zeros(5, calls.LATENT), call["k_rope"]], dim=1)
    call["k_rope"], call["block_table"] = calls.paged(rows, [2, 3], page_size=2)
    call["cache_lengths"] = torch.tensor([2, 3], dtype=torch.int32)
    with pytest.raises(Unsupported, match=r"^k_rope is a LatentCache"):
        openmla.mla_prefill(**leaves(call, "q"))


def test_fp8_is_refused_with_the_reason() -> None:
    call = calls.dense(dtype=torch.bfloat16)
    fp8 = {name: call[name].to(torch.float8_e4m3fn) for name in ("q", "k_nope", "k_rope")}
    with pytest.raises(Unsupported, match="q_dtype e4m3"):
        openmla.mla_prefill(**{**call, **fp8, "v": call["v"].requires_grad_()})


# torch


class Blocked(torch.autograd.Function):
    """Hands values on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The same numbers."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> None:
        """Nothing."""


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_where_no_gradient_comes_back_none_goes_on(form: str) -> None:
    run, call = (openmla.mla_prefill, calls.dense([5, 3]))
    if form == "sparse":
        run, call = openmla.mla_prefill_sparse, calls.sparse(4, 9)
    call["q"] = call["q"].requires_grad_()
    Blocked.apply(run(**call)).sum().backward()
    assert call["q"].grad is None


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_a_gradient_of_lse_is_never_refused_after_the_forward_pass(form: str) -> None:
    """Hopper's kernels have no sink beside a gradient of lse; whether one comes back is not known
    before, so kernels that have it take over."""
    from openmla.backward import ops
    from openmla.backward.problem import BackwardProblem
    from openmla.planning import target_by_name

    pytest.importorskip("triton")
    widths = (128, 64, 128) if form == "dense" else (512, 64, 512)
    named = dict(zip(("d_nope", "d_rope", "d_v"), widths, strict=True))
    plain = openmla.Problem(form=form, heads=64, total_q=8, total_k=8, causal=False, **named)
    sunk = replace(plain, has_sink=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ops, "device_target", lambda device: target_by_name("h200"))
        for problem, d_lse, expected in (
            (plain, True, "hopper"),
            (sunk, False, "hopper"),
            (sunk, True, "auto"),
        ):
            backward = BackwardProblem.of(problem, d_lse)
            assert ops.backend_of(backward, torch.device("cpu"), "hopper") == expected
        for refused in (replace(sunk, d_rope=16), replace(plain, q_dtype="fp16", kv_dtype="fp16")):
            with pytest.raises(Unsupported):
                ops.backend_of(BackwardProblem.of(refused, True), torch.device("cpu"), "hopper")


def train_arguments(**changed: Any) -> tuple[Any, ...]:
    call = {**calls.dense([3, 2], [4, 2]), "sink": torch.zeros(2), "key_mask": None, **changed}
    tensors = [call[n].requires_grad_() for n in NAMES]
    return (
        *tensors,
        call["cu_seqlens_q"],
        call["cu_seqlens_k"],
        call["sink"].requires_grad_(),
        call["key_mask"],
        0.3,
        True,
        0,
        "auto",
        True,
    )


def test_operators_are_well_formed() -> None:
    arguments = train_arguments()
    found = torch.library.opcheck(torch.ops.openmla.dense_train.default, arguments)
    assert set(found.values()) == {"SUCCESS"}
    plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    out, lse = torch.ops.openmla.dense_train(*plain)
    backward = torch.ops.openmla.dense_backward.default
    for d_lse in (None, torch.ones_like(lse)):
        given = (torch.ones_like(out), d_lse, out, lse, [True, True, True], *plain)
        assert set(torch.library.opcheck(backward, given).values()) == {"SUCCESS"}


@pytest.fixture
def compiling() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_call_has_the_same_gradients(backend: str, compiling: None) -> None:
    compiled = torch.compile(openmla.mla_prefill, fullgraph=True, dynamic=True, backend=backend)
    for lens in ([5, 3], [9, 4]):
        call = leaves(calls.dense(lens, dtype=torch.bfloat16))
        for got, want in zip(gradients(call, compiled), gradients(call), strict=True):
            assert same_bits(got, want)


def test_a_compiled_call_with_every_option_has_the_same_gradients(compiling: None) -> None:
    def both(**call: Any) -> Tensor:
        out, lse = openmla.mla_prefill(**call, return_lse=True)
        return torch.cat([out.flatten().float(), lse.flatten()])

    call = leaves(calls.dense([5, 3], [8, 3], dtype=torch.bfloat16))
    call |= {"sink": torch.zeros(2).requires_grad_(), "scale": -0.2}
    call["key_mask"] = torch.tensor([[255], [7], [1], [128], [3], [7], [2], [1]]).int()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(call, compiled), gradients(call, both), strict=True):
        assert same_bits(got, want)


class Counted:
    """Forward passes that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = 0
        from openmla.backward import ops

        kept = ops.require_backward

        def counting(*args: Any) -> None:
            self.forward += 1
            kept(*args)

        monkeypatch.setattr(ops, "require_backward", counting)


def test_full_checkpointing_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, call = Counted(monkeypatch), leaves(calls.dense([9, 4], dtype=torch.bfloat16))
    want = gradients(call)
    assert counted.forward == 1
    recomputed = lambda **given: checkpoint(  # noqa: E731
        partial(openmla.mla_prefill, **given), use_reentrant=False
    )
    got = gradients(call, recomputed)
    assert counted.forward == 3
    assert all(same_bits(x, y) for x, y in zip(got, want, strict=True))


def test_selective_checkpointing_runs_the_forward_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, call = Counted(monkeypatch), leaves(calls.dense([9, 4], dtype=torch.bfloat16))
    contexts = saving(torch.ops.openmla.dense_train.default)
    selective = lambda **given: checkpoint(  # noqa: E731
        lambda: openmla.mla_prefill(**given) * 1.0, use_reentrant=False, context_fn=contexts
    )
    got = gradients(call, selective)
    assert counted.forward == 1
    assert all(same_bits(x, y) for x, y in zip(got, gradients(call), strict=True))


def test_nothing_but_arguments_out_and_lse_is_saved() -> None:
    call = leaves(calls.dense([9, 4]))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = openmla.mla_prefill(**call)
    kept = {x.data_ptr() for x in saved}
    given = {x.data_ptr() for x in call.values() if isinstance(x, Tensor)}
    assert out.data_ptr() in kept and len(kept - given) == 2  # out and lse


def test_gradients_of_one_projection_lie_in_one_buffer() -> None:
    op = build_gradients(GradientCase(Case("dense", 2, 8, 4, 6))).operands
    found = Gradients.allocate(op)
    assert found.k_nope.data_ptr() == found.kv.data_ptr()
    assert found.v.data_ptr() == found.kv.data_ptr() + 8 * found.kv.element_size()
    assert found.kv.shape == (4, 2, 14) and found.kv.is_contiguous()
