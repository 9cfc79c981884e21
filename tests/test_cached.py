"""What is taken for a call that was made before, and what is not."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cached_calls import CALLS, HOPPER, dense, latent, sparse
from kernels.noted import Noted, note_launches
from openmla import InvalidArgument, Unsupported, cached, dispatch, ops
from openmla.indexer import ops as index_ops
from openmla.kernels import prepared
from openmla.kernels.hopper.latent import launch as latent_launch

OPERATORS = {
    **ops.FORMS,
    "index_scores": index_ops._index_scores,
    "select_topk": index_ops._select_topk,
    "index_topk": index_ops._index_topk,
}
NAMES = {name: tuple(inspect.signature(taken).parameters) for name, taken in OPERATORS.items()}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return note_launches(monkeypatch)


def operator_arguments(call: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[str, tuple[Any, ...]]:
    """What a public call gives to its operator."""
    given: list[tuple[str, tuple[Any, ...]]] = []
    with monkeypatch.context() as patch:
        remember = lambda name, names, args, plan, made: given.append((name, args))  # noqa: E731
        patch.setattr(cached, "remember", remember)
        call()
    return given[0]


def changed(x: Any) -> Iterator[Any]:
    """Values that differ from x in one fact each."""
    if x is None:
        yield torch.zeros(3)
    elif isinstance(x, Tensor):
        yield x.to(torch.float64)
        yield torch._neg_view(x)
        yield torch.empty_like(x, device="meta")
        yield torch.zeros(x.shape[0] + 1, *x.shape[1:], dtype=x.dtype)
        yield torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype)
        wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
        yield wide[..., ::2]
        count = -(-16 // x.element_size()) if x.element_size() > 1 else 8
        yield torch.zeros(x.numel() + count, dtype=x.dtype)[1:][: x.numel()].view(x.shape)
    else:
        yield from ([not x] if isinstance(x, bool) else [x + type(x)(1)] if x != "" else ["bf16"])
        yield float(x) if isinstance(x, int) else None


@pytest.mark.parametrize(
    "name",
    [
        "dense",
        "dense, rope from pages",
        "latent, fp8 blocks",
        "sparse, everything",
        "scores",
        "scores, windows",
        "select, everything",
        "index_topk",
    ],
)
def test_every_argument_of_an_operator_is_in_the_key(
    name: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, _ = CALLS[name]
    form, args = operator_arguments(make(**options), monkeypatch)
    assert len(NAMES[form]) == len(args)
    key = cached._key(form, args, [])
    assert key is not None
    for i, x in enumerate(args):
        for other in changed(x):
            assert cached._key(form, (*args[:i], other, *args[i + 1 :]), []) != key, NAMES[form][i]


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_one_key_have_one_problem(
    name: str, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that sets a problem apart is in the key."""
    make, options, _ = CALLS[name]
    calls = [make(**options) for _ in range(2)]
    (form, args), (_, others) = (operator_arguments(call, monkeypatch) for call in calls)
    assert cached._key(form, args, []) == cached._key(form, others, [])
    planned: list[Any] = []
    plan_for = dispatch.plan_for

    def noted_plan(problem: Any, *rest: Any) -> Any:
        planned.append(problem)
        return plan_for(problem, *rest)

    monkeypatch.setattr(dispatch, "plan_for", noted_plan)
    for call in calls:
        cached.forget()
        noted.take(call)
    half = len(planned) // 2
    assert half and planned[:half] == planned[half:]


def test_offsets_that_are_the_same_tensor_are_in_the_key(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with as many keys as queries are never split."""
    form, args = operator_arguments(dense(k_len=100, equal=True), monkeypatch)
    place = NAMES[form].index("cu_seqlens_k")
    other = (*args[:place], args[place].clone(), *args[place + 1 :])
    assert cached._key(form, args, []) != cached._key(form, other, [])
    without = [cached._key_without_counts(form, x) for x in (args, other)]
    assert without[0] != without[1] or without == [None, None]


class Functions(TorchFunctionMode):
    """Notes which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Notes which operators are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def goes_the_long_way(noted: Noted, call: Any) -> bool:
    """Whether a call that is known is planned again."""
    launched = noted.take(call)[1]
    return bool(launched.long) and not launched.cached


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (torch.cuda, "current_device", lambda: 1),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (prepared, "hooked", lambda: True),
        (torch.compiler, "is_compiling", lambda: True),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_other_circumstances_go_the_long_way(
    place: Any, name: str, value: Any, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = dense()
    call()
    assert not goes_the_long_way(noted, call)
    monkeypatch.setattr(place, name, value)
    if name == "is_compiling":
        assert not cached.any_kept()
    else:
        assert goes_the_long_way(noted, call)


@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_a_mode_sees_the_operator(mode: Any, noted: Noted) -> None:
    call = sparse()
    call()
    assert not goes_the_long_way(noted, call)
    with mode() as seeing:
        call()
    assert any("openmla" in function and "sparse" in function for function in seeing.seen)


def test_a_parameter_is_not_plain(noted: Noted) -> None:
    call = sparse()
    call()
    q = torch.nn.Parameter(call.args[0].clone(), requires_grad=False)
    assert goes_the_long_way(noted, lambda: call.func(q, *call.args[1:], **call.keywords))


def test_gradients_are_refused_as_ever(noted: Noted) -> None:
    call = latent(**HOPPER)
    call()
    q = call.args[0].clone().requires_grad_()
    with pytest.raises(Unsupported, match="gradient"):
        call.func(q, *call.args[1:], **call.keywords)
    with torch.no_grad():
        assert not goes_the_long_way(noted, lambda: call.func(q, *call.args[1:], **call.keywords))


@pytest.mark.parametrize("make", [dense, latent, sparse])
def test_a_negative_view_is_resolved_on_a_repeated_call(make: Any, noted: Noted) -> None:
    """Its memory holds the negatives: a kernel may see a copy of it, never its own address."""
    call = make(**HOPPER)
    call()
    q = call.args[0].clone()

    def addresses(q: Tensor) -> set[Any]:
        launched = noted.take(lambda: call.func(q, *call.args[1:], **call.keywords))[1]
        return set(flat_addresses(launched))

    assert q.data_ptr() in addresses(q)
    view = torch._neg_view(q)
    assert view.data_ptr() == q.data_ptr() not in addresses(view)


def flat_addresses(launched: Noted) -> Iterator[Any]:
    """Where the arguments of launches lie, descriptors included."""
    for _, flat in (*launched.long, *launched.cached):
        for x in flat:
            described = x[1] if isinstance(x, tuple) else x
            yield described.data_ptr() if isinstance(described, Tensor) else described


@pytest.mark.parametrize("make", [dense, latent, sparse])
def test_tangents_are_refused_on_a_repeated_call(make: Any, noted: Noted) -> None:
    call = make(**HOPPER)
    call()
    assert not goes_the_long_way(noted, call)
    q = call.args[0]
    given = lambda q: call.func(q, *call.args[1:], **call.keywords)  # noqa: E731
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(Unsupported, match="q has a tangent"):
            given(dual)
    with pytest.raises(Unsupported, match="q has a tangent"):
        torch.func.jvp(given, (q,), (torch.ones_like(q),))
    assert not goes_the_long_way(noted, call)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (dense, {"causal": 1}),
        (dense, {"return_lse": 0}),
        (dense, {"return_lse": None}),
        (dense, {"out": True}),
        (dense, {"scale": float("nan")}),
        (dense, {"sink": [0.0]}),
        (dense, {"cu_seqlens_q": torch.zeros(2, 1).to_sparse()}),
        (latent, {"d_v": 512.0}),
        (latent, {"range_keys": 0}),
        (latent, {"range_keys": 512.0}),
        (latent, {"range_keys": True}),
        (latent, {"scale": True}),
        (sparse, {"topk_lengths": 3}),
        (sparse, {"return_max_logits": 0}),
        (sparse, {"backend": b"hopper"}),
    ],
)
def test_a_wrong_argument_is_refused_as_ever(
    make: Any, wrong: dict[str, Any], noted: Noted
) -> None:
    call = make(**HOPPER)
    call()
    with pytest.raises(InvalidArgument):
        call(**wrong)
    assert not noted.cached


@pytest.mark.parametrize(
    "name", ["dense", "latent", "sparse, fp8 in the kernel", "portable latent"]
)
def test_out_in_the_memory_of_an_input_is_refused_as_ever(name: str, noted: Noted) -> None:
    make, options, _ = CALLS[name]
    call = make(**options)
    (out, *_), _ = noted.take(call)
    call(out=out)
    assert not goes_the_long_way(noted, lambda: call(out=out))
    joint = torch.zeros(call.args[0].numel() + out.numel(), dtype=out.dtype)
    q = joint[: call.args[0].numel()].view(call.args[0].shape)
    for start, ok in ((q.numel(), True), (q.numel() - 8, False), (0, False)):
        inside = joint[start:][: out.numel()].view(out.shape)

        def again(q: Tensor = q, inside: Tensor = inside) -> Any:
            return call.func(q, *call.args[1:], **call.keywords, out=inside)

        with nullcontext() if ok else pytest.raises(InvalidArgument, match="overlap"):
            assert not goes_the_long_way(noted, again)


@pytest.mark.parametrize("name", ["dense", "latent", "sparse, fp8 in the kernel"])
def test_autograd_sees_that_a_given_out_is_written(name: str, noted: Noted) -> None:
    """Launches write by address, which torch does not see; noted ones write nothing at all."""
    make, options, _ = CALLS[name]
    call = make(**options)
    (out, *_), _ = noted.take(call)
    for long_way in (True, False):
        if long_way:
            cached._launches.clear()
            cached._templates.clear()
        factor = torch.ones((), requires_grad=True)
        saved = (factor * out).sum()
        assert goes_the_long_way(noted, lambda: call(out=out)) == long_way
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()


def test_a_slice_that_begins_elsewhere_is_another_call(noted: Noted) -> None:
    """Kernels are compiled for pointers at multiples of 16 bytes, or not."""
    call, lengths = sparse(), torch.zeros(12, dtype=torch.int32)
    call(topk_lengths=lengths[:9])
    for _ in range(2):
        noted.take(lambda: call(topk_lengths=lengths[1:10]))
    assert noted.cached
    cached.forget()
    moved = torch.zeros(call.args[0].numel() + 4, dtype=torch.bfloat16)[4:]
    q = moved.view(call.args[0].shape)
    call()
    assert goes_the_long_way(noted, lambda: call.func(q, *call.args[1:], **call.keywords))


def test_what_must_be_copied_is_never_kept(noted: Noted) -> None:
    call, pages = sparse(), latent(**HOPPER)
    lists = torch.zeros(9, 260, dtype=torch.int32)[:, ::2]
    lengths = torch.zeros(18, dtype=torch.int32)[::2]
    q = torch.zeros(70, 130, 576, dtype=torch.bfloat16)[:, :128]
    for again in (
        lambda: call.func(*call.args[:2], lists, **call.keywords),
        lambda: call(topk_lengths=lengths),
        lambda: pages.func(q, *pages.args[1:], **pages.keywords),
    ):
        for _ in range(2):
            assert goes_the_long_way(noted, again)


def test_an_output_that_is_made_has_the_type_of_queries(noted: Noted) -> None:
    """Whatever type the call before it was given."""
    call = dense(backend="portable")
    wide = torch.empty(100, 16, 128)
    narrow = wide.bfloat16()
    for out, dtype in ((wide, torch.float32), (None, torch.bfloat16), (narrow, torch.bfloat16)):
        assert goes_the_long_way(noted, lambda out=out: call(out=out)) == (out is not narrow)
        assert call(out=out).dtype == dtype
        assert not goes_the_long_way(noted, lambda out=out: call(out=out))


def test_the_operator_itself_is_cached(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.compile calls it."""
    call = dense(return_lse=True)
    _, args = operator_arguments(call, monkeypatch)
    call()
    assert not goes_the_long_way(noted, lambda: torch.ops.openmla.dense(*args) or ())


def test_a_cache_that_is_full_begins_anew(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached, "MOST_KEPT", 4)
    for heads in (1, 2, 3, 4, 5):
        sparse(heads=heads)()
        assert not goes_the_long_way(noted, sparse(heads=heads))
    assert len(cached._launches) <= 4


def test_an_argument_without_a_source_is_never_kept(
    noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: x for name, x in latent_launch.SOURCES.items() if name != "indices_ptr"}
    monkeypatch.setattr(latent_launch, "SOURCES", known)
    call = sparse()
    call()
    assert goes_the_long_way(noted, call)
