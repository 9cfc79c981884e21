"""The models and the problems they pose."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from openmla.errors import InvalidArgument
from openmla.planning import models
from openmla.planning.models import (
    EVIDENCE,
    MODELS,
    index_problem_for_model,
    model_by_name,
    problem_for_model,
)


def test_examples() -> None:
    assert doctest.testmod(models).failed == 0


def test_widths_are_those_the_kernels_are_made_for() -> None:
    dense = {(m.nope, m.rope, m.v) for m in MODELS.values() if not m.one_row}
    assert dense == {
        (128, 64, 128),
        (192, 64, 256),
        (64, 64, 128),
        (256, 0, 256),
        (64, 32, 64),
    }
    assert {m.kv_lora for m in MODELS.values()} == {128, 256, 512}
    assert all(m.evidence in EVIDENCE and 1 <= m.heads <= 128 for m in MODELS.values())


@pytest.mark.parametrize("name", MODELS)
def test_own_form(name: str) -> None:
    model, problem = MODELS[name], problem_for_model(name, tokens=512, context=4096)
    assert problem.form == model.form
    assert (problem.total_q, problem.total_k) == (512, 4096)
    if model.topk:
        assert problem.most_rows == model.topk + model.window + model.index_pool - 1


def test_latent_form() -> None:
    problem = problem_for_model("minicpm3-4b", form="latent", tokens=100, page_size=16)
    assert (problem.d_nope, problem.d_rope, problem.d_v, problem.heads) == (256, 32, 256, 40)
    assert (problem.page_size, problem.total_k) == (16, 112)


def test_one_row_models_have_no_separate_rope() -> None:
    problem = problem_for_model("deepseek-v4-flash")
    assert (problem.d_nope, problem.d_rope, problem.d_v) == (512, 0, 512)
    assert problem.most_rows == 640 and problem.has_sink
    with pytest.raises(InvalidArgument, match="form: expected latent or sparse"):
        problem_for_model("deepseek-v4-flash", form="dense")


@pytest.mark.parametrize(
    ("name", "ratio", "lists"),
    [
        ("deepseek-v4-flash", None, [(128, 65536), (512, 16384)]),
        ("deepseek-v4-flash", 4, [(128, 65536), (512, 16384)]),
        ("deepseek-v4-flash", 128, [(128, 65536), (512, 512)]),
        ("deepseek-v4-flash", 0, [(128, 65536)]),
        ("deepseek-v4-pro", None, [(128, 65536), (1024, 16384)]),
        ("deepseek-v4.1-flash", 2, [(128, 65536), (512, 32768)]),
        ("deepseek-v4.1-flash", 1, [(128, 65536), (512, 65536)]),
        ("glm-5.3-flash", None, [(2051, 65536)]),
    ],
)
def test_lists_of_a_window_and_of_compressed_rows(
    name: str, ratio: int | None, lists: list[tuple[int, int]]
) -> None:
    """Most rows of each list, and the rows that it may name, at 64K tokens of context."""
    problem = problem_for_model(name, tokens=2, context=65536, ratio=ratio)
    assert [(source.topk, source.total_k) for source in problem.sources] == lists


@pytest.mark.parametrize(
    ("name", "ratio", "scored", "chosen"),
    [
        ("deepseek-v3.2", None, (64, 65536), 2048),
        ("deepseek-v4-flash", None, (64, 16384), 512),
        ("deepseek-v4-pro", 4, (64, 16384), 1024),
        ("deepseek-v4.1-flash", 2, (32, 32768), 512),
        ("deepseek-v4.1-flash", 1, (32, 65536), 512),
        ("glm-5.3-flash", None, (32, 16384), 512),
    ],
)
def test_an_indexer_scores_what_was_compressed(
    name: str, ratio: int | None, scored: tuple[int, int], chosen: int
) -> None:
    given: dict[str, Any] = {"tokens": 2, "context": 65536, "ratio": ratio}
    scores = index_problem_for_model(name, **given)
    assert (scores.heads, scores.width) == scored
    assert index_problem_for_model(name, form="select", **given).topk == chosen


def test_layers_add_up_to_those_of_the_model() -> None:
    counts = {
        name: sum(kind.layers for kind in model.compressed) or model.layers
        for name, model in MODELS.items()
        if model.describe_layers()
    }
    assert counts == {
        "deepseek-v4-flash": 43,
        "deepseek-v4-pro": 61,
        "deepseek-v4.1-flash": 40,
        "kimi-k3": 93,
        "glm-5.3-flash": 45,
    }


def test_ratios_that_a_model_has_not_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ratio: expected one of 0, 4, 128, got 2"):
        problem_for_model("deepseek-v4-flash", ratio=2)
    with pytest.raises(InvalidArgument, match="deepseek-v3 compresses no rows"):
        problem_for_model("deepseek-v3", ratio=4)
    with pytest.raises(InvalidArgument, match="deepseek-v4-flash has no indexer at ratio 128"):
        index_problem_for_model("deepseek-v4-flash", ratio=128)


def test_dtypes() -> None:
    fp8 = problem_for_model("deepseek-v3", dtype="e4m3")
    assert (fp8.q_dtype, fp8.kv_dtype, fp8.rope_dtype) == ("e4m3", "e4m3", "e4m3")
    cached = problem_for_model("deepseek-v3", dtype="fp8_block64", page_size=64)
    assert (cached.q_dtype, cached.rope, cached.rope_dtype) == ("bf16", "cache", "fp8_block64")
    sparse = problem_for_model("deepseek-v3.2", dtype="fp8_656")
    assert (sparse.q_dtype, sparse.kv_dtype, sparse.page_size) == ("bf16", "fp8_656", 64)
    v4 = problem_for_model("deepseek-v4-flash", dtype="fp8_584")
    assert (v4.d_nope, v4.d_rope, v4.d_v, v4.kv_dtype) == (512, 0, 512, "fp8_584")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gpt-2"}, r"model: expected one of deepseek-v2, .*got 'gpt-2'"),
        ({"tp": 3}, r"tp: expected a divisor of the 128 heads, got 3 \(128 = 42 x 3 \+ 2\)"),
        ({"tp": 0}, "tp: expected an integer of at least 1"),
        ({"tokens": -1}, "tokens: expected an integer of at least 0, got -1"),
        ({"tokens": 100, "context": 99}, "context: expected at least the 100 new tokens, got 99"),
        ({"page_size": -8}, "page_size"),
        ({"dtype": "int4"}, "dtype: expected one of bf16, fp16, e4m3"),
        ({"dtype": "fp8_block64"}, r"in dense form \(a cache format goes with form 'latent'"),
        (
            {"dtype": "fp8_584", "form": "latent"},
            "a format for the 512 . 64 columns",
        ),
        ({"form": "square"}, "form: expected one of dense, latent, sparse"),
        ({"form": "sparse"}, "deepseek-v3 selects no rows"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        problem_for_model(**{"name": "deepseek-v3", **arguments})


def test_names_ignore_case() -> None:
    assert model_by_name(" DeepSeek-V3 ") is MODELS["deepseek-v3"]
