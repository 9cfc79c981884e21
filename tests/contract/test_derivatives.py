"""Derivatives that openmla does not compute are refused by the tensor's name, never ignored.

Each call, each of its tensors of real numbers: with a gradient to be computed (reverse mode), and
with a tangent (forward mode), given directly or by torch.func.jvp. The dense form alone has
gradients: tests/backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import calls
import openmla
from indexer import cases
from openmla import IndexCache, LatentCache, Unsupported
from openmla.backward.given import with_expanded_gradients
from openmla.compat.flash_attn import flash_attn_varlen_func
from openmla.compat.flash_mla import flash_mla_sparse_fwd

Arguments = dict[str, Any]
WEIGHTS = ("sink", "q_scale", "k_scale")


def weights(keys: int) -> Arguments:
    return {"sink": torch.zeros(2), "q_scale": torch.ones(5), "k_scale": torch.ones(keys)}


def outs(width: int) -> Arguments:
    return {"out": torch.empty(5, calls.HEADS, width)}


def dense() -> Arguments:
    return {**calls.dense(), **weights(5), **outs(calls.D_V)}


def latent() -> Arguments:
    call = calls.latent()
    return {**call, **weights(call["cache"].rows), **outs(calls.LATENT)}


def latent_scaled() -> Arguments:
    cache = LatentCache.allocate(num_pages=4, page_size=4, latent=8, rope=4, format="fp8_block32")
    return {**calls.latent(), "cache": cache, "q": calls.numbers(5, 2, 12, dtype=torch.bfloat16)}


def sparse() -> Arguments:
    return {**calls.sparse(), **weights(7), **outs(calls.LATENT)}


def sparse_cache() -> Arguments:
    cache = LatentCache.allocate(num_pages=2, page_size=4, latent=8, rope=4)
    return {**calls.sparse(), "kv": cache}


def scores() -> Arguments:
    q, head_weights = cases.queries(3, 8)
    keys = torch.zeros(6, 128).to(torch.float8_e4m3fn), torch.ones(6)
    return {"q": q, "keys": keys, "weights": head_weights, "out": torch.empty(3, 6)}


def topk() -> Arguments:
    call = cases.paged([2, 1], [5, 9])
    named = {"q": call.q, "keys": call.keys, "weights": call.weights}
    return {**named, "topk": 3, **call.options}


def append() -> Arguments:
    cache = LatentCache.allocate(num_pages=2, page_size=3, latent=8, rope=4)
    slots = torch.tensor([0, 4])
    return {
        "self": cache,
        "latent": torch.ones(2, 8),
        "rope": torch.ones(2, 4),
        "slot_mapping": slots,
    }


def append_keys() -> Arguments:
    cache = IndexCache.allocate(num_pages=2, page_size=4)
    return {"self": cache, "k": torch.ones(2, 128), "slot_mapping": torch.tensor([0, 4])}


def method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **arguments: function(arguments.pop("self"), **arguments)


# name -> (function, valid arguments, tensors of real numbers by the names that errors have)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments], tuple[str, ...]]] = {
    "mla_prefill": (openmla.mla_prefill, dense, ("q", "k_nope", "k_rope", "v", *WEIGHTS, "out")),
    "mla_prefill_latent": (openmla.mla_prefill_latent, latent, ("q", "cache", *WEIGHTS, "out")),
    "mla_prefill_latent, scales": (openmla.mla_prefill_latent, latent_scaled, ("cache.scales",)),
    "mla_prefill_sparse": (openmla.mla_prefill_sparse, sparse, ("q", "kv", *WEIGHTS, "out")),
    "mla_prefill_sparse, cache": (openmla.mla_prefill_sparse, sparse_cache, ("kv",)),
    "merge_states": (openmla.merge_states, calls.merge, ("out_a", "lse_a", "out_b", "lse_b")),
    "merge_many": (openmla.merge_many, calls.merge_many, ("outs", "lses")),
    "quantize": (
        openmla.quantize,
        lambda: {"x": torch.ones(2, 3, 4), "rope": torch.ones(2, 4)},
        ("x", "rope"),
    ),
    "indexer_scores": (openmla.indexer_scores, scores, ("weights", "keys[1]", "out")),
    "index_topk": (openmla.index_topk, topk, ("weights",)),
    "select_topk": (
        openmla.select_topk,
        lambda: {"scores": torch.ones(3, 8), "topk": 2},
        ("scores",),
    ),
    "LatentCache.append": (method(LatentCache.append), append, ("latent", "rope")),
    "IndexCache.append": (method(IndexCache.append), append_keys, ("k",)),
    "flash_mla_sparse_fwd": (flash_mla_sparse_fwd, calls.flash_mla, ("q", "kv")),
    "flash_attn_varlen_func": (flash_attn_varlen_func, calls.flash_attn, ("q", "k", "v")),
}
CASES = [(call, name) for call, (_, _, names) in CALLS.items() for name in names]
HAVE_GRADIENTS = [("mla_prefill", name) for name in ("q", "k_nope", "k_rope", "v", "sink")]
HAVE_GRADIENTS += [("mla_prefill_sparse", name) for name in ("q", "kv", "sink")]
SERVED = [*HAVE_GRADIENTS, *(("flash_attn_varlen_func", name) for name in ("q", "k", "v"))]
every_tensor = pytest.mark.parametrize(("call", "name"), CASES)


def tensor_of(arguments: Arguments, name: str) -> Tensor:
    """The tensor that an error calls so."""
    head, _, rest = name.replace("[", ".").partition(".")
    value = arguments[head]
    if isinstance(value, LatentCache):
        value = value.scales if rest else value.data
    elif isinstance(value, list | tuple):
        value = value[int(rest[:-1]) if rest else 0]
    assert isinstance(value, Tensor)
    return value


def with_tensor(arguments: Arguments, name: str, other: Tensor) -> Arguments:
    """The arguments with another tensor in its place."""
    head, _, rest = name.replace("[", ".").partition(".")
    value: Any = arguments[head]
    if isinstance(value, LatentCache):
        changed: Any = replace(value, **{rest or "data": other})
    elif isinstance(value, tuple):
        changed = (value[0], other)
    elif isinstance(value, list):
        changed = [other, *value[1:]]
    else:
        changed = other
    return {**arguments, head: changed}


def refused(word: str, name: str) -> Any:
    return pytest.raises(Unsupported, match=f"^{name.replace('[', '.').replace(']', '.')} .*{word}")


@pytest.mark.parametrize("call", CALLS)
def test_the_calls_are_valid(call: str) -> None:
    function, valid, _ = CALLS[call]
    function(**valid())
    with forward_ad.dual_level():  # a level alone changes nothing
        function(**valid())


@pytest.mark.parametrize(("call", "name"), [c for c in CASES if c not in SERVED])
def test_a_gradient_is_refused(call: str, name: str) -> None:
    function, valid, _ = CALLS[call]
    arguments = valid()
    tracked = tensor_of(arguments, name).clone().requires_grad_()
    with refused("requires a gradient", name):
        function(**with_tensor(arguments, name, tracked))


@pytest.mark.parametrize(("call", "name"), HAVE_GRADIENTS)
def test_a_gradient_beside_what_has_none_is_refused(call: str, name: str) -> None:
    """out is given there, and scales per token: of such a call there is no backward pass."""
    function, valid, _ = CALLS[call]
    arguments = valid()
    tracked = tensor_of(arguments, name).clone().requires_grad_()
    for missing in ("out", "q_scale", "k_scale"):
        with refused("is given", missing):
            function(**with_tensor(arguments, name, tracked))
        arguments[missing] = None
    assert function(**with_tensor(arguments, name, tracked)).requires_grad


@every_tensor
def test_a_tangent_is_refused(call: str, name: str) -> None:
    function, valid, _ = CALLS[call]
    arguments = valid()
    primal = tensor_of(arguments, name)
    with forward_ad.dual_level(), torch.no_grad():
        dual = forward_ad.make_dual(primal, torch.ones_like(primal))
        with refused("has a tangent", name):
            function(**with_tensor(arguments, name, dual))


@every_tensor
def test_jvp_is_refused(call: str, name: str) -> None:
    function, valid, _ = CALLS[call]
    arguments = valid()
    primal = tensor_of(arguments, name)

    def of_one(x: Tensor) -> Any:
        return function(**with_tensor(arguments, name, x))

    with refused("has a tangent", name):
        torch.func.jvp(of_one, (primal,), (torch.ones_like(primal),))


IN_TRANSFORMS = {
    "dense": (openmla.mla_prefill, calls.dense),
    "sparse": (openmla.mla_prefill_sparse, calls.sparse),
    "latent": (openmla.mla_prefill_latent, calls.latent),
}


@pytest.mark.parametrize("form", IN_TRANSFORMS)
def test_transforms_of_torch_func_are_refused(form: str) -> None:
    """Traced by torch.compile, gradients were zeros."""
    function, made = IN_TRANSFORMS[form]
    arguments = made()
    q = arguments.pop("q")

    def summed(x: Tensor) -> Any:
        return function(x, **arguments).sum()

    said = r"q requires|torch\.func\.grad"
    torch._dynamo.reset()
    compiled: Any = torch.compile(torch.func.grad(summed), backend="eager")
    for transform in (torch.func.grad(summed), lambda x: torch.func.vjp(summed, x), compiled):
        with pytest.raises(Unsupported, match=said):
            transform(q)
    with torch.no_grad():
        plain: Any = torch.compile(summed, backend="eager", fullgraph=True)
        assert torch.equal(plain(q), summed(q))


@every_tensor
def test_vmap_is_refused(call: str, name: str) -> None:
    function, valid, _ = CALLS[call]
    arguments = valid()
    given = tensor_of(arguments, name)

    def of_one(x: Tensor) -> Any:
        return function(**with_tensor(arguments, name, x))

    said = name.replace("[", ".").replace("]", ".").partition(".")[0]
    with pytest.raises(Unsupported, match=f"^({said}|data|scales).* is batched by torch.func.vmap"):
        torch.func.vmap(of_one)(torch.stack([given, given]))


def test_vmap_over_integers_is_refused() -> None:
    """Lists, lengths, offsets and slots are no numbers that derivatives have, and are batched."""
    for function, arguments, names in (
        (openmla.mla_prefill_sparse, calls.sparse(), ("indices",)),
        (openmla.mla_prefill, calls.dense(), ("cu_seqlens_q",)),
        (openmla.mla_prefill_latent, calls.latent(), ("block_table", "cache_lengths")),
        (method(LatentCache.append), append(), ("slot_mapping",)),
        (method(IndexCache.append), append_keys(), ("slot_mapping",)),
    ):
        for name in names:
            two = torch.stack([arguments[name]] * 2)
            with pytest.raises(Unsupported, match=f"^{name} is batched by torch.func.vmap"):
                torch.func.vmap(lambda x, f=function, a=arguments, n=name: f(**{**a, n: x}))(two)


@pytest.fixture
def x() -> Iterator[Tensor]:
    yield torch.arange(24.0).view(2, 3, 4)


def test_a_tangent_of_an_outer_transform_is_refused(x: Tensor) -> None:
    """torch.func shows the tangents of the innermost transform alone."""

    def outer(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return openmla.quantize(x)[1].sum() * y

        return torch.func.jvp(inner, (torch.ones(()),), (torch.ones(()),))[1]

    with refused("may have a tangent", "x"):
        torch.func.jvp(outer, (x,), (x,))


def test_a_constant_inside_jvp_is_served(x: Tensor) -> None:
    expected = openmla.quantize(x)[1]
    value, tangent = torch.func.jvp(
        lambda y: openmla.quantize(x)[1] * y, (torch.ones(2),), (torch.ones(2),)
    )
    assert torch.equal(value, expected) and torch.equal(tangent, expected)


def test_inference_mode_drops_tangents(x: Tensor) -> None:
    """What the refusal names as the nearest form."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with torch.inference_mode():
            assert torch.equal(openmla.quantize(dual)[1], openmla.quantize(x)[1])
        primal = forward_ad.unpack_dual(dual).primal
        assert torch.equal(openmla.quantize(primal)[1], openmla.quantize(x)[1])


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_call_is_refused_too(fullgraph: bool, x: Tensor) -> None:
    torch.compiler.reset()
    compiled = torch.compile(openmla.quantize, fullgraph=fullgraph, backend="eager")
    expected = compiled(x)[1]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises((Unsupported, torch._dynamo.exc.Unsupported), match="x may have a tan"):
            compiled(dual)
    assert torch.equal(compiled(x)[1], expected)


def _loss() -> Arguments:
    q, k = calls.numbers(5, 2, 12), calls.numbers(5, 2, 12)
    offsets = torch.tensor([0, 3, 5], dtype=torch.int32)
    attention = {"q": q, "k_nope": k, "k_rope": None, "cu_seqlens_q": offsets}
    index = {"index_q": calls.numbers(5, 3, 8), "index_k": calls.numbers(5, 8)}
    return {**index, "index_weights": torch.ones(5, 3), "lse": torch.zeros(5, 2), **attention}


def _given() -> Arguments:
    call = {**calls.dense(), "scale": 0.3}
    out, lse = openmla.mla_prefill(**call, return_lse=True)
    return {"out": out, "lse": lse, **call}


@pytest.mark.parametrize(
    ("function", "made", "differentiated", "kept"),
    [
        (openmla.mla_prefill, calls.dense, "q", ("k_nope", "k_rope", "v", "cu_seqlens_q")),
        (openmla.mla_prefill_sparse, calls.sparse, "q", ("kv", "indices")),
        (openmla.indexer_loss, _loss, "index_k", ("index_q", "q", "lse", "cu_seqlens_q")),
        (with_expanded_gradients, _given, "v", ("q", "k_nope", "cu_seqlens_q")),
    ],
)
def test_what_inference_mode_made_is_refused_before_the_forward_pass(
    function: Callable[..., Tensor],
    made: Callable[[], Arguments],
    differentiated: str,
    kept: tuple[str, ...],
) -> None:
    """torch keeps no such tensor for a backward pass, and says so after the forward pass."""
    arguments = made()
    for name in kept:
        with torch.inference_mode():
            of_inference = arguments[name].clone()
        call = {**arguments, name: of_inference}
        call[differentiated] = call[differentiated].detach().requires_grad_()
        with pytest.raises(Unsupported, match=f"^{name} was made under torch.inference_mode"):
            function(**call)
        with torch.no_grad():
            function(**call)


def test_a_given_output_inside_a_transform_is_refused() -> None:
    arguments = _given()
    q = arguments.pop("q")
    with pytest.raises(Unsupported, match=r"torch\.func\.grad"):
        torch.func.grad(lambda x: with_expanded_gradients(q=x, **arguments)[0].sum())(q)
