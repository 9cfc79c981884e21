"""The contract of DESIGN.md on the CPU, point by point: scores, masks, empty rows, sinks, indices.

Bits and sizes (points 7 to 10) are in test_bits.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import calls
import formula
import openmla
from openmla import InvalidArgument, Unsupported

FORMS: dict[str, tuple[Callable[..., Any], Callable[..., dict[str, Any]]]] = {
    "dense": (openmla.mla_prefill, calls.dense),
    "latent": (openmla.mla_prefill_latent, calls.latent),
    "sparse": (openmla.mla_prefill_sparse, calls.sparse),
}
BACKENDS = ["cpu", "reference"]
every_form = pytest.mark.parametrize("form", FORMS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def run(form: str, call: dict[str, Any], **options: Any) -> Any:
    return FORMS[form][0](**call, **options)


def assert_empty(out: torch.Tensor, lse: torch.Tensor) -> None:
    """+0 and -inf, compared as bits."""
    assert formula.same_bits(out, torch.zeros_like(out))
    assert formula.same_bits(lse, torch.full_like(lse, -torch.inf))


# 1. Scores


@every_backend
def test_1_default_scale_is_one_over_the_root_of_the_query_width(backend: str):
    call = calls.dense()
    default = openmla.mla_prefill(**call, return_lse=True, backend=backend)
    given = openmla.mla_prefill(**call, scale=1 / math.sqrt(12), return_lse=True, backend=backend)
    formula.assert_close(default[0], given[0].double(), bound=1e-7)
    one_key = calls.dense([1])
    score = (one_key["q"][0, :, :8] * one_key["k_nope"][0]).sum(-1)
    score = score + (one_key["q"][0, :, 8:] * one_key["k_rope"]).sum(-1)
    lse = openmla.mla_prefill(**one_key, return_lse=True, backend=backend)[1]
    formula.assert_close(lse[0], score.double() / math.sqrt(12))


@pytest.mark.parametrize("form", ["latent", "sparse"])
def test_1_latent_forms_have_no_default_scale(form: str):
    call = FORMS[form][1]()
    del call["scale"]
    with pytest.raises(InvalidArgument, match="scale: expected a number"):
        run(form, call)


@every_backend
@pytest.mark.parametrize("size", [1e4, 1e18, 1e19], ids=str)
def test_1_equal_scores_of_any_size_give_the_mean(backend: str, size: float):
    call = calls.dense([1], [2], heads=1)
    call["q"].fill_(size)
    call["k_nope"].fill_(1e18)
    call["k_rope"].zero_()
    out, lse = openmla.mla_prefill(**call, scale=1.0, return_lse=True, backend=backend)
    formula.assert_close(out[0, 0], call["v"].double().mean(0)[0], bound=1e-6)
    assert math.isclose(float(lse), 8e18 * size, rel_tol=1e-6)


# 2. Causal


@every_backend
@pytest.mark.parametrize("form", ["dense", "latent"])
def test_2_causal_is_bottom_right(form: str, backend: str):
    call = FORMS[form][1]([2], [4])
    lse = run(form, call, return_lse=True, backend=backend)[1]
    full = run(form, call, causal=False, return_lse=True, backend=backend)[1]
    assert formula.same_bits(lse[1], full[1])  # the last query sees the last key
    assert (lse[0] < full[0]).all()  # the one before it does not


# 3. LSE


@every_form
@every_backend
def test_3_lse_is_natural_float32_and_free_of_the_sink(form: str, backend: str):
    call = FORMS[form][1]()
    plain = run(form, call, return_lse=True, backend=backend)
    sink = torch.tensor([1.5, -0.5])
    out, lse = run(form, call, sink=sink, return_lse=True, backend=backend)
    assert lse.dtype == torch.float32 and lse.shape == (5, 2) and lse.is_contiguous()
    assert formula.same_bits(lse, plain[1])
    shrink = 1 / (1 + torch.exp(sink.double() - plain[1].double()))
    formula.assert_close(out, plain[0].double() * shrink[..., None])


@every_backend
def test_3_n_equal_scores_give_log_n(backend: str):
    call = calls.dense([1], [5])
    call["q"].zero_()
    lse = openmla.mla_prefill(**call, return_lse=True, backend=backend)[1]
    formula.assert_close(lse, torch.full((1, 2), math.log(5), dtype=torch.float64), bound=1e-7)


# 4. Empty rows


@every_backend
@pytest.mark.parametrize("form", ["dense", "latent"])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "empty_rows"),
    [
        ([3], [0], [0, 1, 2]),
        ([3], [1], [0, 1]),
        ([0, 2, 0], [4, 0, 0], [0, 1]),
        ([2, 2], [2, 0], [2, 3]),
        ([300], [7], list(range(293))),
    ],
    ids=["no-keys", "q-longer", "zero-lengths", "second-empty", "several-tiles"],
)
def test_4_rows_without_keys(form: str, backend: str, q_lens, k_lens, empty_rows):
    call = FORMS[form][1](q_lens, k_lens)
    sink = torch.tensor([0.5, torch.inf])
    for options in ({}, {"sink": sink}):
        out, lse = run(form, call, return_lse=True, backend=backend, **options)
        assert_empty(out[empty_rows], lse[empty_rows])
        others = sorted(set(range(sum(q_lens))) - set(empty_rows))
        assert lse[others].isfinite().all()


@every_backend
@pytest.mark.parametrize("form", ["dense", "latent"])
def test_4_a_batch_of_none(form: str, backend: str):
    out, lse = run(form, FORMS[form][1]([], []), return_lse=True, backend=backend)
    assert out.shape[0] == 0 and lse.shape == (0, 2)


@every_backend
@pytest.mark.parametrize(("rows", "topk"), [(0, 3), (7, 0)], ids=["no-rows", "no-indices"])
def test_4_sparse_with_nothing_to_see(backend: str, rows: int, topk: int):
    call = calls.sparse(rows=rows, topk=topk)
    assert_empty(*openmla.mla_prefill_sparse(**call, return_lse=True, backend=backend))
    none = calls.sparse(queries=0)
    assert openmla.mla_prefill_sparse(**none, backend=backend).shape == (0, 2, 8)


@every_backend
@pytest.mark.parametrize("form", ["dense", "latent"])
def test_4_queries_of_no_sequence_are_empty_rows(form: str, backend: str):
    call = FORMS[form][1]()
    call["cu_seqlens_q"] = torch.tensor([0, 1, 3], dtype=torch.int32)
    out, lse = run(form, call, return_lse=True, backend=backend)
    assert_empty(out[3:], lse[3:])


@every_backend
def test_4_one_key_gives_its_value_bit_for_bit(backend: str):
    call = calls.dense([1, 1, 1], dtype=torch.bfloat16)
    out = openmla.mla_prefill(**call, backend=backend)
    assert formula.same_bits(out, call["v"])


# 5. Sink


@every_form
@every_backend
def test_5_infinite_sinks(form: str, backend: str):
    call = FORMS[form][1]()
    plain = run(form, call, backend=backend)
    out = run(form, call, sink=torch.tensor([-torch.inf, torch.inf]), backend=backend)
    assert formula.same_bits(out[:, 0], plain[:, 0])
    assert (out[:, 1] == 0).all()


@every_form
@pytest.mark.parametrize("sink", [3e38, -3e38], ids=["huge", "minus-huge"])
def test_5_huge_finite_sinks(form: str, sink: float):
    call = FORMS[form][1]()
    out = run(form, call, sink=torch.full((2,), sink))
    want = torch.zeros_like(out) if sink > 0 else run(form, call)
    assert torch.equal(out, want)


# 6. Indices


@every_backend
def test_6_indices_that_do_not_count_are_ignored(backend: str):
    call = calls.sparse(queries=3, rows=7)
    odd = [[2, -1, 5, 7], [-(2**31), 3, 2**31 - 1, 3], [6, 0, 1, 2]]
    call["indices"] = torch.tensor(odd, dtype=torch.int32)
    lengths = torch.tensor([4, 100, 1], dtype=torch.int32)
    got = openmla.mla_prefill_sparse(**call, topk_lengths=lengths, return_lse=True, backend=backend)
    want = formula.listed(call["q"], call["kv"], [[2, 5], [3, 3], [6]], 8, 0.3)
    formula.assert_close(got[0], want.out)
    formula.assert_close(got[1], want.lse)


@every_backend
def test_6_a_duplicate_counts_twice_and_a_negative_length_hides_all(backend: str):
    call = calls.sparse(queries=2, rows=7)
    call["indices"] = torch.tensor([[4, 4], [4, 4]], dtype=torch.int32)
    lengths = torch.tensor([1, 2], dtype=torch.int32)
    once, twice = openmla.mla_prefill_sparse(
        **{**call, "q": call["q"][:1].expand(2, -1, -1)},
        topk_lengths=lengths,
        return_lse=True,
        backend=backend,
    )[1]
    formula.assert_close(twice, once.double() + math.log(2), bound=1e-6)
    lengths = torch.tensor([-3, 0], dtype=torch.int32)
    assert_empty(
        *openmla.mla_prefill_sparse(**call, topk_lengths=lengths, return_lse=True, backend=backend)
    )


# 11. Where nothing fits, a typed error


@every_form
@pytest.mark.parametrize("backend", ["portable", "hopper", "blackwell", "cdna4"])
def test_11_an_explicit_backend_never_falls_back(form: str, backend: str):
    call = FORMS[form][1]()
    out = torch.full((5, 2, 6 if form == "dense" else 8), torch.nan)
    with pytest.raises(Unsupported, match=backend):
        run(form, call, out=out, backend=backend)
    assert out.isnan().all()


@every_form
@pytest.mark.parametrize("heads", [1, 5, 20, 128], ids="heads={}".format)
def test_11_any_head_count(form: str, heads: int):
    call = FORMS[form][1](heads=heads)
    got = run(form, call, return_lse=True)
    want = run(form, call, return_lse=True, backend="reference")
    formula.assert_close(got[0], want[0].double())
    formula.assert_close(got[1], want[1].double())


# 12. Wrong arguments (test_malformed.py has the table)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("dense", "sparse")])
@pytest.mark.parametrize("name", ["q", "sink"])
def test_12_gradients_are_refused_unless_switched_off(form: str, name: str):
    call = {**FORMS[form][1](), "sink": torch.zeros(2)}
    want = run(form, call)
    call[name] = call[name].clone().requires_grad_()
    with pytest.raises(Unsupported, match=f"{name} requires a gradient"):
        run(form, call)
    with torch.no_grad():
        assert formula.same_bits(run(form, call), want)


@every_form
def test_12_out_over_an_input_is_refused(form: str):
    call = FORMS[form][1]()
    width = 6 if form == "dense" else 8
    before = call["q"].clone()
    with pytest.raises(InvalidArgument, match="out: expected memory of its own, apart from q"):
        run(form, call, out=call["q"][..., :width])
    assert formula.same_bits(call["q"], before)
