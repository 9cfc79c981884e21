"""out= of float32 beside narrower queries: what sums come to, not rounded once more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import openmla
from openmla import InvalidArgument, Problem, Unsupported, plan
from openmla.planning.registry import FAMILIES

BACKENDS = ("cpu", "reference")
DENSE = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512, total_k=512, fp32_out=True
)
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64)
SPARSE = replace(LATENT, form="sparse", topk=64, causal=False)
FORMS: dict[str, Callable[..., Any]] = {
    "dense": openmla.mla_prefill,
    "latent": openmla.mla_prefill_latent,
    "sparse": openmla.mla_prefill_sparse,
}


def call_of(form: str, dtype: torch.dtype) -> dict[str, Any]:
    if form == "sparse":
        call = calls.sparse()
        return call | {name: call[name].to(dtype) for name in ("q", "kv")}
    make: Callable[..., dict[str, Any]] = getattr(calls, form)
    return {"scale": 0.3, **make(dtype=dtype)}


def both(form: str, call: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The output as it is made, and in fp32, which the call returns as it was given."""
    made = FORMS[form](**call, **options)
    given = torch.full(made.shape, torch.nan)
    assert FORMS[form](**call, **options, out=given) is given
    return made, given


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_made_output_is_this_one_rounded(form: str, dtype: torch.dtype, backend: str) -> None:
    made, given = both(form, call_of(form, dtype), backend=backend)
    assert made.dtype == dtype
    assert torch.equal(given.to(dtype), made) and not torch.equal(given, made.float())


def test_e4m3_queries_have_it_too() -> None:
    e4m3 = torch.float8_e4m3fn
    call = call_of("dense", torch.bfloat16)
    call |= {name: call[name].to(e4m3) for name in ("q", "k_nope", "k_rope", "v")}
    made, given = both("dense", call)
    assert made.dtype == torch.bfloat16
    assert torch.equal(given.bfloat16(), made) and not torch.equal(given, made.float())


def test_two_sources_have_it_too() -> None:
    call = call_of("sparse", torch.bfloat16)
    sources = [openmla.Listed(call["kv"], call["indices"]) for _ in range(2)]
    options = {"scale": 0.3, "d_v": calls.LATENT}
    made = openmla.mla_attend(call["q"], sources, **options)
    given = torch.full(made.shape, torch.nan)
    openmla.mla_attend(call["q"], sources, **options, out=given)
    assert torch.equal(given.bfloat16(), made) and not torch.equal(given, made.float())


def test_rows_that_see_nothing_are_plus_zero() -> None:
    call = {"scale": 0.3, **calls.dense([5], [2], dtype=torch.bfloat16)}
    _, given = both("dense", call)
    assert not given[:3].any() and not given[:3].signbit().any() and bool(given[3:].any())


def test_parts_add_up_to_the_whole() -> None:
    """What fp32 parts are for: a merge of bf16 parts rounds three times."""
    call = {"scale": 0.3, **calls.dense([4], [4096], dtype=torch.bfloat16), "causal": False}
    exact = openmla.mla_prefill(**call, backend="reference", out=torch.empty(4, 2, calls.D_V))
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        outs, lses = [], []
        for half in (slice(0, 2048), slice(2048, 4096)):
            part = {n: call[n][half] for n in ("k_nope", "k_rope", "v")}
            part["cu_seqlens_k"] = torch.tensor([0, 2048], dtype=torch.int32)
            out, lse = openmla.mla_prefill(
                **call | part, return_lse=True, out=torch.empty(4, 2, calls.D_V, dtype=dtype)
            )
            outs.append(out)
            lses.append(lse)
        merged, _ = openmla.merge_many(outs, lses)
        found[dtype] = float((merged.float() - exact).norm())
    assert found[torch.float32] < found[torch.bfloat16] / 100


@pytest.mark.parametrize("form", FORMS)
def test_other_types_are_refused(form: str) -> None:
    call = call_of(form, torch.bfloat16)
    like = FORMS[form](**call)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(InvalidArgument, match=r"out: expected torch.bfloat16 or torch.float32"):
            FORMS[form](**call, out=like.to(dtype))


def test_fp32_queries_have_no_other_problem() -> None:
    fp32 = dict.fromkeys(("q_dtype", "kv_dtype", "v_dtype", "rope_dtype"), "fp32")
    assert not replace(DENSE, **fp32).fp32_out
    assert replace(DENSE, **fp32).out_dtype == DENSE.out_dtype == "fp32"


@pytest.mark.parametrize("problem", [DENSE, LATENT, SPARSE], ids=lambda p: p.form)
def test_who_serves_it(problem: Problem) -> None:
    serving = {
        f.name for f in FAMILIES for k in f.of_form(problem.form) if k.serves.mentions("fp32_out")
    }
    own = {"mi355x": "cdna4"}
    if problem.form == "dense":
        own["b200"] = "blackwell"
    assert serving == {"reference", "cpu", "portable", *own.values()}
    for target, backend in (("h200", "hopper"), ("b200", "blackwell"), ("mi355x", "cdna4")):
        assert plan(problem, target=target).backend == own.get(target, "portable")
        assert "fp32 out" in plan(problem, target=target).explain()
        if target not in own:
            with pytest.raises(Unsupported, match="fp32_out True: not served"):
                plan(problem, target=target, backend=backend)
