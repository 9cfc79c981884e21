"""The support table says what the planner says, and how each kernel is known to work."""

from __future__ import annotations

import doctest
from dataclasses import replace
from pathlib import Path

import pytest

from openmla.errors import Unsupported
from openmla.explain import support
from openmla.explain.support import (
    BEGIN,
    END,
    FEATURES,
    TABLE_TARGETS,
    support_of,
    support_table,
    support_table_markdown,
)
from openmla.planning import NEWEST_TRITON, Plan, cached_plan, plan, target_by_name
from openmla.planning.registry import family_named
from openmla.problem import FORMS, Problem


def test_examples() -> None:
    assert doctest.testmod(support).failed == 0


def runnable(problem: Problem, target: str, backend: str = "auto") -> Plan:
    return cached_plan(problem, target_by_name(target), backend, NEWEST_TRITON)


@pytest.mark.parametrize("family", ["cpu", "reference", "portable"])
def test_cpu_reference_and_portable_have_a_kernel_for_every_form(family: str) -> None:
    for form in FORMS:
        assert all(kernel.launcher for kernel in family_named(family).of_form(form))


@pytest.mark.parametrize("feature", FEATURES)
def test_cells_are_what_the_planner_says(feature: str) -> None:
    for target, cell in support_table()[feature].items():
        try:
            chosen = plan(FEATURES[feature], target)
        except Unsupported as error:
            assert (cell.family, cell.reason) == ("", error.reason) and str(cell) == "–"
        else:
            assert cell.family == chosen.backend
            assert not cell.runs or runnable(FEATURES[feature], target).backend == cell.runs
            assert ("planned" in str(cell)) == (not chosen.kernel.launcher)
            assert str(cell).startswith(chosen.word) or not chosen.runs_today
            assert (cell.runs == chosen.backend) == chosen.runs_today


def test_markdown_has_a_row_per_feature_and_a_column_per_target() -> None:
    rows = [line for line in support_table_markdown().splitlines() if line.startswith("| ")]
    assert len(rows) == len(FEATURES) + 1
    assert all(line.count("|") == len(TABLE_TARGETS) + 2 for line in rows)


def test_no_feature_has_two_rows() -> None:
    assert len(set(FEATURES.values())) == len(FEATURES)


def test_the_indexer_has_its_rows() -> None:
    table = support_table()
    scores = table["index scores, 64 heads, pages of 64"]
    assert [scores[t].runs for t in ("cpu", "h200", "b200", "mi355x", "a100")] == [
        "cpu",
        "hopper",
        "blackwell",
        "cdna4",
        "portable",
    ]
    selection = table["selection of 2048"]
    assert [selection[t].runs for t in ("cpu", "h200", "b200")] == ["cpu", "hopper", "blackwell"]


def test_gradients_have_kernels_of_their_own_where_there_are_some() -> None:
    gradients = support_table()["gradients of dense 128+64 → 128, bf16"]
    assert [str(gradients[t]) for t in ("h200", "mi355x", "mi300x")] == [
        "measured (hopper)",
        "simulated (cdna4)",
        "portable",
    ]


def test_a_gap_has_a_dash_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    feature, problem = next(iter(FEATURES.items()))
    monkeypatch.setitem(FEATURES, feature, replace(problem, q_dtype="fp32"))
    text = support_table_markdown()
    assert f"| {feature} | measured | – |" in text
    assert f"portable: q_dtype fp32: bf16, fp16 or e4m3 are served: {feature} on" in text


def test_the_page_has_the_table_of_today() -> None:
    page = (Path(__file__).parents[2] / "docs/support.md").read_text()
    table = support_table_markdown()
    assert table in page, "run `openmla doctor --table` and paste it into docs/support.md"
    assert page.count(BEGIN) == page.count(END) == 1


def test_a_cell_names_what_runs_until_the_planned_kernel_exists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = next(iter(FEATURES.values()))
    for kernel in family_named("hopper").kernels:
        monkeypatch.setitem(kernel.__dict__, "launcher", "")
    cached_plan.cache_clear()
    assert str(support_of(dense, "h200")) == "portable; hopper planned"
    assert str(support_of(dense, "a100")) == "portable"
    for kernel in family_named("portable").kernels:
        monkeypatch.setitem(kernel.__dict__, "launcher", "")
    cached_plan.cache_clear()
    assert str(support_of(dense, "h200")) == "hopper planned"
    monkeypatch.undo()
    cached_plan.cache_clear()


def test_a_plan_that_runs_when_named_says_so_in_the_plan_that_runs() -> None:
    fp8 = FEATURES["latent 512+64, fp8 queries and pages"]
    assert plan(fp8, "h200").backend == "hopper" and not plan(fp8, "h200").runs_today
    instead = runnable(fp8, "h200")
    assert instead.backend == "portable" and instead.runs_today
    assert any(reason.startswith("hopper: runs when named") for reason in instead.passed_over)


def test_of_two_kernels_that_serve_a_plan_names_the_one_that_runs_unasked() -> None:
    """With a Triton and without; the other runs when its family is named."""
    fp8 = FEATURES["sparse 512+64, fp8 throughout"]
    for chosen in (plan(fp8, "b200"), runnable(fp8, "b200")):
        assert chosen.kernel_name == "sparse_fp8_rows" and chosen.runs_today
        (reason,) = chosen.passed_over
        assert reason.startswith("blackwell: runs when named, its weights are FP8 too")
    assert runnable(fp8, "b200", "blackwell").kernel_name == "sparse_fp8"


def test_columns_without_a_plan_say_why() -> None:
    instead = runnable(replace(FEATURES["sparse 512+0, bf16"], d_nope=256, d_v=256), "b200")
    assert instead.backend == "portable" and "d_rope 0" in instead.passed_over[0]


@pytest.mark.parametrize(("pages", "tokens"), [("bf16", 66), ("fp8", 66), ("bf16", 1), ("fp8", 1)])
def test_chunks_and_single_queries_run_on_the_latent_hopper_kernel(pages: str, tokens: int) -> None:
    problem = replace(FEATURES[f"latent 512+64, {pages} pages"], total_q=tokens, batch=1)
    assert runnable(problem, "h200").backend == "hopper"


@pytest.mark.parametrize(
    ("queries", "mode"),
    [(1, "in_kernel"), (32, "workspace"), (256, "workspace"), (1024, "workspace")],
)
def test_fp8_rows_are_read_the_way_that_measured_faster(queries: int, mode: str) -> None:
    """128 heads, lists of 2048 into a pool of a million rows: see planning/dequantize.py."""
    problem = FEATURES["sparse 512+64, fp8_656 cache"]
    problem = replace(problem, total_q=queries, total_k=1_000_000)
    chosen = runnable(problem, "h200")
    assert chosen.backend == "hopper" and chosen.config.cache_read.mode == mode
