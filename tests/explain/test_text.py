"""What `openmla plan` prints, and how it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.plan import plan_command
from openmla.explain.text import SIDE_BY_SIDE, elsewhere, explain_text, work_lines
from openmla.planning import Plan, plan
from openmla.planning.models import problem_for_model

app = typer.Typer()
app.command()(plan_command)
runner = CliRunner()


def test_why_the_ring_is_shared_and_what_bound_the_tile() -> None:
    text = explain_text(plan(problem_for_model("deepseek-v3", tokens=1024), "b200"))
    assert "BN = 128: bound by tensor memory" in text
    assert "3 slots, an odd number: K and V share one ring" in text
    assert "229864  end, of 232448" in text and "Modular's kernel reserves 230556" in text
    assert "kernel: blackwell dense (simulated)" in text
    pair = explain_text(plan(problem_for_model("deepseek-v3"), "b200"))
    assert "6 slots, an even number: separate rings of 3" in pair
    assert "a pair of CTAs shares K and V" in pair


@pytest.mark.parametrize(("target", "rows"), [("h200", 64), ("b200", 128)])
def test_why_one_query_tile(target: str, rows: int) -> None:
    short = plan(problem_for_model("deepseek-v3", tokens=40), target)
    assert f"1Q: 40 queries a request fit one tile of {rows} rows" in short.explain()
    few = plan(problem_for_model("deepseek-v3", tokens=512, tp=8), target)
    assert "1Q: two tiles a block would make" in few.explain()
    assert "1Q:" not in plan(problem_for_model("deepseek-v3"), target).explain()


def test_scales_of_an_fp8_cache_are_counted() -> None:
    problem = replace(problem_for_model("deepseek-v3.2", dtype="fp8_block64"), heads=64)
    text = explain_text(plan(problem, "b200"))
    assert "compiled: 214024 bytes" in text and "scales of K: 2304 bytes" in text


def test_work() -> None:
    lines = work_lines(plan(problem_for_model("deepseek-v3"), "h200"))
    assert lines[0].endswith("= 1.37 TFLOP at most")
    assert "about half: 0.687 TFLOP" in lines[1]
    assert "989 TFLOP/s: 0.695 ms or more" in lines[2]
    assert "791 TFLOP/s: 0.869 ms" in lines[3]
    sparse = work_lines(plan(problem_for_model("deepseek-v3.2"), "cpu"))
    assert len(sparse) == 1 and "2048 rows each" in sparse[0]


def test_every_target_appears() -> None:
    chosen = plan(problem_for_model("deepseek-v3", dtype="e4m3"), "mi355x")
    lines = elsewhere(chosen)
    assert set(lines) == set(SIDE_BY_SIDE)
    assert lines["a100"].startswith("portable") and "measured" in lines["cpu"]
    expected = "cdna4 (simulated), 256 rows x 128 keys, 2 stages, 148208 of 163840 bytes"
    assert lines["mi355x"] == expected


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ("--tokens 4096", "0.687 TFLOP, 0.695 ms or more at the datasheet's 989 TFLOP/s"),
        # 32768 rows of 1152 or 656 bytes at 4800 GB/s; 9 GFLOP would take 9 us at 989 TFLOP/s.
        (
            "--tokens 1 --context 32768 --form latent --tp 8",
            "1.14 GFLOP over 37.7 MB of cache rows, 7.86 us or more at the datasheet's 4800 GB/s",
        ),
        (
            "--tokens 1 --context 32768 --form latent --tp 8 --dtype fp8_656",
            "1.14 GFLOP over 21.5 MB of cache rows, 4.48 us or more at the datasheet's 4800 GB/s",
        ),
        (
            "--tokens 1 --context 32768 --form latent",
            "9.13 GFLOP, 9.23 us or more at the datasheet's 989 TFLOP/s",
        ),
    ],
)
def test_the_least_time_is_that_of_what_bounds_a_call(options: str, bound: str) -> None:
    result = runner.invoke(app, options.split())
    assert f"work {bound}" in " ".join(result.output.split())


def test_command() -> None:
    result = runner.invoke(app, ["--model", "glm-5", "--target", "h200", "--form", "dense", "-v"])
    assert result.exit_code == 0
    assert "192 in 128 + 64" in result.output and "BN = 64: 128 keys are too many" in result.output


def test_command_json() -> None:
    result = runner.invoke(app, ["--target", "b200", "--page-size", "128", "--json"])
    chosen = Plan.from_json(json.loads(result.output))
    assert chosen == plan(problem_for_model("deepseek-v3", page_size=128), "b200")


def test_command_html(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = runner.invoke(app, ["--target", "b200", "--html", str(page)])
    assert result.exit_code == 0 and page.read_text().startswith("<!doctype html>")
    missing = tmp_path / "missing" / "plan.html"
    assert runner.invoke(app, ["--html", str(missing)]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "gpt-2"], "model: expected one of deepseek-v2"),
        (["--target", "h9000"], "target: expected one of cpu, h100"),
        (["--tokens", "-1"], "tokens: expected an integer of at least 0, got -1"),
        (["--tp", "3"], "128 = 42 x 3 + 2"),
        (["--dtype", "int4"], "dtype: expected one of bf16"),
        (["--form", "sparse"], "deepseek-v3 selects no rows"),
        (["--backend", "magic"], "backend: expected one of auto"),
    ],
)
def test_bad_values(arguments: list[str], words: str) -> None:
    result = runner.invoke(app, arguments, env={"COLUMNS": "1000"})
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output


def test_no_plan_is_no_crash() -> None:
    result = runner.invoke(app, ["--target", "sm_75:40x65536", "--dtype", "e4m3"])
    assert result.exit_code == 1
    assert "no plan: portable: sm_75" in result.output
    assert "nearest supported form: the same call with tensors on a CPU" in result.output


def test_odd_pages_go_to_the_portable_kernel() -> None:
    result = runner.invoke(app, ["--target", "b200", "--page-size", "7"])
    assert result.exit_code == 0 and "page_size 7: pages of 8, 16, 32" in result.output
    alone = runner.invoke(app, ["--target", "b200", "--page-size", "7", "--backend", "blackwell"])
    assert alone.exit_code == 1
