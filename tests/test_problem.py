"""Problem: what it derives, that it is a value, and how it prints."""

from __future__ import annotations

import dataclasses
import json

import pytest

from openmla import InvalidArgument, Problem
from openmla.planning.problems import decode_problem
from openmla.problem import RowSource

DEEPSEEK_V3 = Problem(
    form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=512, total_k=640
)
SPARSE = Problem(
    form="sparse",
    heads=64,
    d_nope=512,
    d_rope=64,
    d_v=512,
    q_dtype="e4m3",
    kv_dtype="fp8_656",
    page_size=64,
    causal=False,
    topk=2048,
    has_sink=True,
    wants_lse=True,
    total_q=7,
    total_k=4096,
)
V4 = dataclasses.replace(
    SPARSE,
    d_rope=0,
    q_dtype="bf16",
    kv_dtype="fp8_584",
    span=True,
    topk=0,
    table_keys=4096,
    second=RowSource(page_size=2, topk=512, has_topk_lengths=True, total_k=4096),
    total_k=8192,
)


def test_equal_fields_make_equal_problems_with_equal_hashes():
    again = dataclasses.replace(DEEPSEEK_V3)
    assert again == DEEPSEEK_V3 and hash(again) == hash(DEEPSEEK_V3)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Problem)])
def test_every_field_counts_in_equality(field: str):
    changed = {
        "form": "latent",
        "rope": "per_head",
        "q_dtype": "fp16",
        "second": RowSource(topk=64, total_k=100),
        "kv_dtype": "fp16",
        "v_dtype": "fp16",
        "rope_dtype": "fp16",
        "turned_back": 64,
        "range_keys": 512,
    }
    base = DEEPSEEK_V3
    if field in ("table_keys", "invariant", "range_keys"):  # of the latent form alone
        base = dataclasses.replace(base, form="latent", d_nope=512, d_v=512, page_size=64)
        base = dataclasses.replace(base, invariant=field == "range_keys")
    if field in ("span", "second", "turned_back"):  # of the sparse form alone
        base = dataclasses.replace(base, form="sparse", d_nope=512, d_v=512, page_size=64)
    old = getattr(base, field)
    new = changed.get(field, not old if isinstance(old, bool) else old)
    if isinstance(old, int) and not isinstance(old, bool) and field not in changed:
        new = old - 1 if field == "heads" else old + 1
    assert dataclasses.replace(base, **{field: new}) != base


@pytest.mark.parametrize("keys", [-512, 1, 64, 129, 384, 2**21])
def test_ranges_are_powers_of_two_of_whole_steps(keys: int):
    latent = {"form": "latent", "heads": 16, "d_nope": 512, "d_rope": 64, "d_v": 512}
    with pytest.raises(InvalidArgument, match=r"range_keys: .* a power of two from 128 to 1048576"):
        Problem(**latent, invariant=True, range_keys=keys)


def test_only_invariant_latent_calls_have_ranges_of_a_length_of_their_own():
    latent = {"form": "latent", "heads": 16, "d_nope": 512, "d_rope": 64, "d_v": 512}
    asked = Problem(**latent, invariant=True, range_keys=512)
    assert "invariant, ranges of 512 keys" in str(asked)
    assert Problem(**asked.to_json()) == asked
    with pytest.raises(InvalidArgument, match="range_keys: expected 0, or in an invariant call"):
        dataclasses.replace(asked, invariant=False)
    with pytest.raises(InvalidArgument, match="range_keys: expected 0 unless the form is latent"):
        dataclasses.replace(DEEPSEEK_V3, range_keys=512)


def test_a_problem_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEEPSEEK_V3.heads = 1  # type: ignore[misc]


@pytest.mark.parametrize("problem", [DEEPSEEK_V3, SPARSE, V4], ids=["dense", "sparse", "v4"])
def test_json_leads_back_to_the_same_problem(problem: Problem):
    written = json.loads(json.dumps(problem.to_json()))
    assert Problem(**written) == problem and decode_problem(written) == problem


def test_sources_in_the_order_of_the_softmax():
    assert [source.most_rows for source in V4.sources] == [4096, 512] and V4.most_rows == 4608
    assert [source.kv_dtype for source in V4.sources] == ["fp8_584", "bf16"]
    assert [source.most_rows for source in SPARSE.sources] == [2048]
    assert "(positions of 8192 fp8_584 rows in pages of 64) and (top-512 of 4096" in str(V4)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"span": True, "page_size": 0, "topk": 0}, "page_size"),
        ({"span": True}, "topk"),
        ({"span": 1}, "span"),
        ({"second": "sparse"}, "second"),
        ({"second": RowSource(topk=1), "has_k_scale": True}, "second"),
        ({"second": RowSource(topk=1), "form": "latent"}, "second"),
        ({"second": {"topk": -1}}, "topk"),
        ({"second": {"kv_dtype": "int4"}}, "kv_dtype"),
        ({"second": {"span": True}}, "page_size"),
    ],
)
def test_sources_that_cannot_be(change: dict[str, object], name: str):
    with pytest.raises(InvalidArgument) as error:
        dataclasses.replace(SPARSE, **change)
    assert error.value.name == name


def test_widths_and_work():
    assert DEEPSEEK_V3.d_qk == 192
    assert DEEPSEEK_V3.flops == 2 * 128 * 512 * 640 * (192 + 128)
    assert SPARSE.flops == 2 * 64 * 7 * 2048 * (576 + 512)


@pytest.mark.parametrize(
    ("q_dtype", "out_dtype"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("e4m3", "bf16")],
)
def test_outputs_have_the_dtype_of_the_queries_but_never_fp8(q_dtype: str, out_dtype: str):
    assert dataclasses.replace(DEEPSEEK_V3, q_dtype=q_dtype).out_dtype == out_dtype


def test_a_problem_prints_itself():
    assert str(DEEPSEEK_V3) == (
        "dense bf16, 128 heads, d_nope 128 + d_rope 64 -> d_v 128, 512 queries x 640 keys, "
        "1 sequence, causal"
    )
    assert str(SPARSE) == (
        "sparse e4m3/fp8_656, 64 heads, d_nope 512 + d_rope 64 -> d_v 512, "
        "7 queries x top-2048 of 4096 rows, pages of 64, sink, lse"
    )
    several = dataclasses.replace(DEEPSEEK_V3, batch=3, causal=False)
    assert str(several).endswith("3 sequences, full")
