"""The case generator: deterministic, broad, and it writes only what a problem addresses."""

import json
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch

import openmla
from openmla.errors import InvalidArgument
from openmla.lab.testing.cases import HEADS, Case, build, named_cases, random_case, shrink
from openmla.lab.testing.compare import judge
from openmla.lab.testing.draw import COST_LIMIT, has_listed_widths, varied
from openmla.lab.testing.memory import Memory
from openmla.problem import CACHE_FORMATS

DRAWN = [random_case(seed) for seed in range(3000)]


def test_a_case_survives_json():
    for case in DRAWN[:200]:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_unknown_fields_and_impossible_cases_are_refused():
    with pytest.raises(InvalidArgument, match=r"fields of Case, got unknown \['color'\]"):
        Case.from_json({**DRAWN[0].to_json(), "color": "red"})
    with pytest.raises(InvalidArgument, match="scale: expected a number, in the latent form"):
        Case("latent", 1, 8, 4, 8)
    with pytest.raises(InvalidArgument, match="d_v: expected at most the latent width 8, got 9"):
        Case("sparse", 1, 8, 4, 9, scale=1.0)
    with pytest.raises(InvalidArgument, match=r"rope and d_rope: .* got 'shared' and 0"):
        Case("dense", 1, 8, 0, 8)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("heads", "2", "case.heads: expected an integer, got '2'"),
        ("heads", 0, "heads: expected at least 1, got 0"),
        ("q_lens", 4, "case.q_lens: expected a list of integers, got 4"),
        ("q_lens", [4, None], r"case.q_lens\[1\]: expected an integer, got None"),
        ("q_lens", [-4], "q_lens: expected lengths of at least 0"),
        ("k_lens", [1, 2, 3, 4, 5, 6, 7, 8, 9], "q_lens and k_lens: expected as many of each"),
        ("causal", 1, "case.causal: expected true or false, got 1"),
        ("scale", "x", "case.scale: expected a number or null, got 'x'"),
        ("scale", float("nan"), "case.scale: expected a number or null, got nan"),
        ("form", ["dense"], "case.form: expected 'dense', 'latent' or 'sparse'"),
        ("layout", "round", "layout: expected one of 'contiguous', 'strided', .* got 'round'"),
    ],
)
def test_a_wrong_field_of_a_saved_case_is_named(name, value, complaint):
    with pytest.raises(InvalidArgument, match=complaint):
        Case.from_json({**DRAWN[0].to_json(), name: value})


def test_the_same_seed_gives_the_same_tensors():
    for case in DRAWN[:20]:
        one, two = build(case), build(case)
        for a, b in zip(one.memory.buffers, two.memory.buffers, strict=True):
            assert torch.equal(a, b)


def test_every_choice_is_drawn():
    seen = {name: Counter(getattr(case, name) for case in DRAWN) for name in Case.__slots__}
    assert set(HEADS) <= set(seen["heads"])
    assert set(CACHE_FORMATS) < set(seen["kv"])
    for name, values in {
        "form": ("dense", "latent", "sparse"),
        "dtype": ("bf16", "fp16", "fp32", "e4m3"),
        "rope": ("none", "shared", "shared_3d", "per_head", "cache"),
        "page_size": (1, 3, 16, 64),
        "sink": ("none", "normal", "low", "high", "mixed"),
        "index_kind": ("distinct", "duplicates", "mixed", "invalid"),
        "topk_lengths": ("none", "full", "ragged", "wild"),
        "values": ("normal", "peaky", "rising", "tiny", "large", "equal", "exact"),
        "topk": (0, 1, 63, 64, 65, 128),
        "layout": ("contiguous", "strided", "aligned", "values"),
        "out": ("fresh", "given", "strided", "aligned"),
        "default_dtype": ("fp32", "bf16", "fp16"),
        "default_device": ("", "meta", "same"),
    }.items():
        assert set(values) <= set(seen[name]), name


def test_widths_that_nobody_listed_are_drawn_in_all_combinations():
    wide = [case for case in DRAWN if not has_listed_widths(case)]
    assert len(wide) > 0.35 * len(DRAWN)
    for name in ("d_nope", "d_rope", "d_v"):
        seen = {getattr(case, name) for case in wide}
        assert min(seen - {0}) <= 2 and max(seen) >= 575 and len(seen) > 150, name
        assert len({n % 8 for n in seen}) == 8, name
    assert {case.form for case in wide if case.d_rope == 0} == {"dense", "latent", "sparse"}
    narrow = [case for case in wide if case.d_v <= 32 < 128 < case.d_nope]
    assert len(narrow) > 0.1 * len(wide)
    assert len({case.heads for case in DRAWN}) > 100 and max(case.heads for case in DRAWN) == 128


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_every_form_meets_every_dtype_and_odd_scales(form):
    mine = [case for case in DRAWN if case.form == form]
    assert {case.dtype for case in mine} == {"bf16", "fp16", "fp32", "e4m3"}
    assert any(case.scale == 0 for case in mine) and any((case.scale or 1) < 0 for case in mine)
    if form != "dense":
        assert {case.kv for case in mine} >= {*CACHE_FORMATS, "plain"}


def test_fp16_queries_meet_rows_of_every_format():
    rows = [case for case in DRAWN if case.form != "dense" and case.dtype == "fp16"]
    assert {case.kv for case in rows} >= {*CACHE_FORMATS, "plain"}


def test_boundaries_are_drawn():
    assert any(not case.q_lens for case in DRAWN)
    assert any(0 in case.q_lens and max(case.k_lens) > 0 for case in DRAWN)
    assert any(0 in case.k_lens and max(case.q_lens) > 0 for case in DRAWN)
    assert any(q > k > 0 for case in DRAWN for q, k in zip(case.q_lens, case.k_lens, strict=True))
    for edge in (17, 63, 64, 65, 127, 128, 129, 257, 511, 512, 513, 1025):
        assert any(edge in case.k_lens and case.causal for case in DRAWN), edge
    for edge in (15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257):
        assert any(edge in case.q_lens for case in DRAWN), edge


def test_block_tables_that_are_exactly_full_are_drawn():
    full = [c for c in DRAWN if c.form == "latent" and c.spare == 0 and max(c.k_lens, default=0)]
    assert any(max(c.k_lens) % c.page_size == 0 and max(c.k_lens) > c.page_size for c in full)
    assert any(max(c.k_lens) % c.page_size == 1 for c in full)


def test_the_indices_of_sparse_cases_cover_what_the_contract_ignores():
    negative = past = beyond_length = negative_length = 0
    for case in DRAWN[:400]:
        if case.form != "sparse" or not case.topk:
            continue
        op = build(case).operands
        negative += bool((op.indices < 0).any())
        past += bool((op.indices >= op.rows).any())
        if op.topk_lengths is not None:
            beyond_length += bool((op.topk_lengths > case.topk).any())
            negative_length += bool((op.topk_lengths < 0).any())
    assert min(negative, past, beyond_length, negative_length) > 0


@pytest.mark.parametrize("topk", [5, 16, 40, 200])
def test_a_list_is_broken_in_the_last_place_of_a_block(topk):
    case = Case("sparse", 1, 8, 0, 8, (9,), (30,), topk=topk, index_kind="block_end", scale=1.0)
    op = build(case).operands
    wrong = (op.indices < 0) | (op.indices >= op.rows)
    assert wrong.sum(dim=1).tolist() == [1] * 9
    places = set(wrong.int().argmax(dim=1).tolist())
    assert places <= ({4} if topk == 5 else {15, 31, 63, 127})


@pytest.mark.parametrize("name", named_cases())
def test_model_sized_cases_are_accepted(name):
    built = build(named_cases()[name])
    verdict = judge(built, built.run())
    assert verdict.ok, verdict.report()


def test_background_stays_where_nothing_is_addressed():
    case = Case("dense", 2, 8, 4, 8, (3,), (5,), spare=2, layout="strided")
    built = build(case, memory=Memory(background="nan"))
    assert built.operands.q[3:].isnan().all() and not built.operands.q[:3].isnan().any()
    gaps = built.operands.v.as_strided((5 * 2, 3), (11, 1), 8)
    assert gaps[0].isnan().all()


def test_cost_stays_small():
    assert max(case.cost for case in DRAWN) <= 1_500_000
    assert max(case.total_q for case in DRAWN) <= 520


@pytest.mark.parametrize("layout", ["contiguous", "strided", "aligned", "values"])
def test_layouts_are_what_they_say(layout):
    case = Case("dense", 2, 32, 16, 24, (3,), (5,), layout=layout, out="aligned")
    op = build(case).operands
    assert op.q.is_contiguous() == (layout in ("contiguous", "values"))
    assert op.v.is_contiguous() == (layout == "contiguous")
    aligned = all(s % 8 == 0 for t in (op.q, op.k_nope, op.v) for s in t.stride()[:-1])
    assert aligned == (layout != "strided")


@pytest.mark.parametrize(
    ("dtype", "device"), [("fp32", ""), ("bf16", ""), ("fp16", "meta"), ("bf16", "same")]
)
def test_the_defaults_of_a_case_hold_during_the_call_and_only_then(dtype, device, monkeypatch):
    seen = {}

    def call(**arguments):
        made = torch.empty(0)
        seen.update(dtype=made.dtype, device=made.device.type)
        return torch.zeros(4, 1, 8, dtype=torch.bfloat16, device="cpu")

    monkeypatch.setattr(openmla, "mla_prefill", call)
    case = Case("dense", 1, 8, 4, 8, return_lse=False, default_dtype=dtype, default_device=device)
    build(case).run()
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert seen == {"dtype": names[dtype], "device": "meta" if device == "meta" else "cpu"}
    assert torch.empty(0).dtype == torch.float32 and torch.empty(0).device.type == "cpu"


def test_shrinking_keeps_failing_and_ends_small():
    case = next(c for c in DRAWN if c.form == "sparse" and c.sink == "mixed" and c.topk > 100)
    small = shrink(case, lambda c: c.sink == "mixed" and c.topk > 3)
    assert (small.sink, small.topk, small.heads, small.total_q) == ("mixed", 4, 1, 0)


def test_shrinking_leaves_a_minimal_case_alone():
    case = Case("dense", 1, 1, 0, 1, (1,), (1,), rope="none", causal=False, page_size=1)
    assert shrink(case, lambda c: c.total_q == 1 and c.total_k == 1) == case


def test_shrinking_only_builds_what_can_be_built():
    case = replace(named_cases()["deepseek_v32_sparse"], heads=2)

    def fails(candidate):
        build(candidate)
        return True

    assert shrink(case, fails).heads == 1


@pytest.mark.parametrize("seed", range(60))
def test_variants_share_what_a_kernel_is_compiled_for(seed: int) -> None:
    case = random_case(seed)
    varying = {
        "q_lens",
        "k_lens",
        "topk",
        "seed",
        "spare",
        "values",
        "sink",
        "topk_lengths",
        "index_kind",
        "heads",
        "key_mask",
        "sources",
    }
    for number in range(1, 4):
        other = varied(case, number)
        fixed = {f.name for f in fields(Case)} - varying
        assert {name: getattr(other, name) for name in fixed} == {
            name: getattr(case, name) for name in fixed
        }
        assert (other.sink == "none") == (case.sink == "none")
        assert (other.key_mask == "none") == (case.key_mask == "none")
        assert (other.topk_lengths == "none") == (case.topk_lengths == "none")
        assert other.seed != case.seed and other.cost <= COST_LIMIT
