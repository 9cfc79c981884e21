"""The case generator: deterministic, broad, and it writes only what a problem addresses."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from openmla.problem import CACHE_FORMATS
from openmla.testing.cases import HEADS, Case, build, named_cases, random_case, shrink
from openmla.testing.compare import judge
from openmla.testing.memory import Memory

DRAWN = [random_case(seed) for seed in range(2000)]


def test_a_case_survives_json():
    for case in DRAWN[:200]:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_unknown_fields_and_impossible_cases_are_refused():
    with pytest.raises(ValueError, match="unknown fields"):
        Case.from_json({**DRAWN[0].to_json(), "color": "red"})
    with pytest.raises(ValueError, match="need a scale"):
        Case("latent", 1, 8, 4, 8)
    with pytest.raises(ValueError, match="d_v 9 is wider"):
        Case("sparse", 1, 8, 4, 9, scale=1.0)
    with pytest.raises(ValueError, match="does not go with"):
        Case("dense", 1, 8, 0, 8)


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
    }.items():
        assert set(values) <= set(seen[name]), name


def test_boundaries_are_drawn():
    assert any(not case.q_lens for case in DRAWN)
    assert any(0 in case.q_lens and max(case.k_lens) > 0 for case in DRAWN)
    assert any(0 in case.k_lens and max(case.q_lens) > 0 for case in DRAWN)
    assert any(q > k > 0 for case in DRAWN for q, k in zip(case.q_lens, case.k_lens, strict=True))
    for edge in (63, 64, 65, 127, 128, 129, 511, 512, 513, 1025):
        assert any(edge in case.k_lens for case in DRAWN), edge
    for edge in (15, 16, 17, 63, 64, 65, 127, 128, 255, 256, 257):
        assert any(edge in case.q_lens for case in DRAWN), edge


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
    assert max(case.total_q for case in DRAWN) <= 300


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
