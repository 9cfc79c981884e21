"""The prediction is made of the kernel's own timeline, and says that it is one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.explain import explain_command
from openmla.lab.bench.predicted import SHAPES, problem_of
from openmla.lab.prediction import (
    ERROR,
    Prediction,
    _work,
    _work_of_waves,
    predict,
    useful_flops,
)
from openmla.planning import plan
from openmla.planning.models import problem_for_model
from openmla.problem import Problem, RowSource

ROOT = Path(__file__).parents[2]
V3 = problem_for_model("deepseek-v3", tokens=8192)


@pytest.fixture(scope="module")
def dense() -> Prediction:
    found = predict(plan(V3, "b200"))
    assert found is not None
    return found


def test_dense_is_no_faster_than_its_units(dense: Prediction) -> None:
    """A block of 256 x 128 scores: 192 + 128 columns of products, an exponential per score."""
    products = 256 * 128 * (192 + 128) / 4096
    operands = 2 * (2 * 128 * 192 + 128 * 128) * 2 / 128
    exponentials = 256 * 128 / 16
    assert dense.block_clocks >= max(products, operands, exponentials)
    assert max(dense.busy.values()) <= 1.0 + 1e-9
    assert dense.busy["exp"] == pytest.approx(exponentials / dense.block_clocks, rel=0.02)


def test_share_of_peak_counts_what_the_mask_leaves(dense: Prediction) -> None:
    assert 0.6 < dense.share_of_peak < 1.0
    ideal = 256 * 128 * (192 + 128) / 4096 / dense.block_clocks
    assert dense.share_of_peak < ideal


def test_sparse() -> None:
    chosen = plan(problem_for_model("deepseek-v3.2", tokens=4096, context=65536), "b200")
    found = predict(chosen)
    assert found is not None and 0.2 < found.share_of_peak < 1.0
    assert found.bound_by in found.busy


@pytest.mark.parametrize(("topk", "alike"), [(2048, True), (128, False)])
def test_fp8_rows_are_predicted_where_a_pass_dequantizes_them(topk: int, alike: bool) -> None:
    rows = replace(problem_of(SHAPES[10]), total_q=64, topk=topk)
    dtypes = dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), "fp8_656")
    bf16, fp8 = (predict(plan(p, "h200")) for p in (rows, replace(rows, page_size=64, **dtypes)))
    assert bf16 is not None
    assert fp8 == (bf16 if alike else None)


def test_it_says_that_it_is_a_prediction(dense: Prediction) -> None:
    text = "\n".join(dense.lines())
    assert "not measured" in text and "% of the datasheet's peak" in text and "bound by" in text


GLM5 = replace(V3, heads=64, d_nope=192, d_v=256)
FP8 = dict.fromkeys(("q_dtype", "kv_dtype", "v_dtype", "rope_dtype"), "e4m3")
ROWS_656 = {**dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), "fp8_656"), "page_size": 64}
SPARSE = problem_of(SHAPES[10])
LATENT = replace(SPARSE, form="latent", topk=0, total_q=1024, total_k=8192, page_size=64)


@pytest.mark.parametrize(
    ("problem", "share", "unit"),
    [
        (V3, 47, "LDS 35 % busy"),
        (replace(V3, rope="cache", page_size=64), 47, "LDS 35 % busy"),
        (replace(V3, **FP8), 28, "LDS 21 % busy"),
        (replace(V3, **{**FP8, "v_dtype": "bf16"}), 29, "LDS 30 % busy"),
        (replace(V3, **FP8, has_q_scale=True, has_k_scale=True), 27, "LDS 20 % busy"),
        (replace(GLM5, **FP8), 28, "LDS 25 % busy"),
        (replace(V3, has_key_mask=True), 44, "LDS 33 % busy"),
        (GLM5, 47, "LDS 42 % busy"),
        (SPARSE, 59, "LDS 72 % busy"),
        (replace(SPARSE, **ROWS_656), 40, "LDS 48 % busy"),
        (LATENT, 61, "LDS 72 % busy"),
        (replace(LATENT, **ROWS_656), 41, "LDS 49 % busy"),
    ],
)
def test_an_mi355x(problem: Problem, share: int, unit: str) -> None:
    """Waves in step: units follow one another, and all of them read LDS. The page has the share."""
    found = predict(plan(problem, "mi355x"))
    assert found is not None and round(100 * found.share_of_peak) == share
    assert f"{100 * found.busy['smem']:.0f} % busy" in unit
    page = (ROOT / "docs/prediction.md").read_text()
    assert any(f"{share} %" in row and unit in row for row in page.splitlines())
    assert (
        any("CUs" in line for line in found.lines()[2:]) and max(found.busy.values()) <= 1.0 + 1e-9
    )


def test_work_items_of_an_mi355x() -> None:
    """64 rows of scores, 128 a token: two tiles of every token, causal."""
    small = replace(LATENT, total_q=3, total_k=130)
    assert sorted(_work_of_waves(plan(small, "mi355x"))) == [2, 2, 3, 3, 3, 3]
    assert _work_of_waves(plan(replace(SPARSE, total_q=1, topk=65), "mi355x")) == [2, 2]


@pytest.mark.parametrize("chip", ["h200", "b200", "mi355x"])
@pytest.mark.parametrize("second", [None, RowSource(page_size=2, topk=512, total_k=1024)])
def test_spans_and_second_sources_have_none(chip: str, second: RowSource | None) -> None:
    pages = {"page_size": 64, "span": True, "table_keys": 4096, "total_k": 4096}
    window = Problem("sparse", 64, 512, 0, 512, rope="none", total_q=64, **pages, second=second)
    assert predict(plan(window, chip)) is None


def test_other_chips_have_none() -> None:
    assert predict(plan(V3, "a100")) is None


def test_cycles_are_those_that_an_h200_took() -> None:
    """The record: measured cycles, predicted ones, and the table of docs/prediction.md."""
    (path,) = (ROOT / "benchmarks/results").glob("predicted-h200-*.json")
    measured = {
        r["shape"]: r["cycles"] for r in json.loads(path.read_text())["cycles"]["cycles"]["results"]
    }
    assert set(measured) == {str(shape) for shape in SHAPES}
    page, errors = (ROOT / "docs/prediction.md").read_text(), []
    for shape in SHAPES:
        found = predict(plan(problem_of(shape), "h200"))
        assert found is not None
        cycles, clocks = measured[str(shape)], found.clocks
        errors.append(abs(clocks / cycles - 1))
        thousands = f"{cycles / 1e3:,.0f} | {clocks / 1e3:,.0f}"
        assert f"| {shape} | {thousands} | {clocks / cycles - 1:+.1%} |" in page
    assert median(errors) <= ERROR[0] and max(errors) <= ERROR[1]


def test_useful_flops() -> None:
    small = Problem(form="dense", heads=1, d_nope=64, d_rope=64, d_v=128, total_q=2, total_k=3)
    assert useful_flops(small) == 2 * (2 + 3) * 256
    assert useful_flops(replace(small, causal=False)) == 2 * 6 * 256
    assert useful_flops(replace(small, window=2)) == 2 * (2 + 2) * 256


def test_a_window_is_predicted_by_its_own_blocks() -> None:
    """300 queries of 1000 keys: the table at the head of the kernel's tiles.py. Without a$
    window there are 7 or 8."""
    sizes = {"heads": 1, "d_nope": 128, "d_rope": 64, "d_v": 128, "total_q": 300, "total_k": 1000}
    windowed = replace(V3, **sizes, self_attention=False, window=100)
    chosen = plan(windowed, "h200")
    chosen = replace(chosen, config=chosen.config.with_num_qo(2))
    assert _work(chosen) == [2, 2, 2]
    assert _work(replace(chosen, problem=replace(windowed, window=0))) == [7, 8, 8]
    found = predict(chosen)
    assert found is not None and found.clocks > 0


def test_command() -> None:
    app = typer.Typer()
    app.command()(explain_command)
    done = CliRunner().invoke(app, ["--model", "deepseek-v3", "--target", "a100"])
    assert done.exit_code == 0 and "no prediction" in done.output
    for target in ("h200", "mi355x"):
        done = CliRunner().invoke(app, ["--model", "deepseek-v3", "--target", target])
        assert done.exit_code == 0 and "of the datasheet's peak" in done.output
    assert CliRunner().invoke(app, ["--model", "no-such-model"]).exit_code == 2
