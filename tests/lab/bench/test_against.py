"""A run against an earlier one: which figures are compared, and which have moved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from openmla.cli.bench import bench_command
from openmla.lab.bench import dense
from openmla.lab.bench.against import LIMIT, changes
from openmla.lab.bench.gpu_timing import GpuTiming

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
app = typer.Typer()
app.command()(bench_command)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda p: p.stem)
def test_a_result_against_itself_has_not_moved(path: Path):
    record = json.loads(path.read_text())
    found = changes(record, record)
    assert all(change.ratio == 1 and not change.moved for change in found)
    # Files of scripts with other sections have nothing that `openmla bench` measures.
    benchmarks = ("cpu-", "hopper-dense-h200", "hopper-sparse-h200")
    assert len(found) > 5 or not path.name.startswith(benchmarks)


def test_more_than_three_percent_is_a_move_either_way():
    rows = [{"shape": name, "tflops": rate} for name, rate in (("a", 100.0), ("b", 100.0))]
    faster = [{"shape": "a", "tflops": 100 * (1 + LIMIT) + 0.1}, {"shape": "b", "tflops": 97.1}]
    found = changes({"rows": faster}, {"rows": [*rows, {"shape": "c", "tflops": 5.0}]})
    assert [(c.case, c.moved) for c in found] == [("a", True), ("b", False)]
    assert changes({"rows": rows}, {"rows": faster})[0].moved


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if measured: TFLOP/s of 1 ms, cuDNN in 1.5 ms."""
    timings = {n: GpuTiming(ms, ms, ms) for n, ms in (("openmla", 1.0), ("cudnn", 1.5))}
    row = dense.Row(dense.Shape(heads=16, q_len=4096, k_len=4096), timings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(dense, "run_dense", lambda rounds: iter([row]))
    monkeypatch.setattr(dense, "matmul_tflops", lambda rounds: 700.0)


@pytest.mark.usefixtures("gpu")
def test_the_command_prints_ratios_and_marks_what_moved(tmp_path: Path):
    first = tmp_path / "first.json"
    assert invoke("dense", "--json", str(first)).exit_code == 0
    record: dict[str, Any] = json.loads(first.read_text())
    record["rows"][0]["kernel"] *= 1.25  # what was faster then
    record["torch"] = "another"
    first.write_text(json.dumps(record))
    result = invoke("dense", "--against", str(first))
    assert result.exit_code == 0, result.output
    assert "0.800" in result.output and result.output.count("WORSE") == 1
    assert "1.000" in result.output and "1 of 2 figures moved by more than 3 %" in result.output
    assert f"torch another, now {torch.__version__}" in result.output


@pytest.mark.usefixtures("gpu")
def test_what_cannot_be_compared_is_one_line(tmp_path: Path):
    result = invoke("dense", "--against", str(tmp_path / "none.json"))
    assert result.exit_code == 2 and "cannot read" in result.output
    (tmp_path / "other.json").write_text('{"rows": []}')
    result = invoke("dense", "--against", str(tmp_path / "other.json"))
    assert result.exit_code == 2 and "none of these cases" in result.output


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        "[]",
        "3",
        '{"rows": 3}',
        '{"rows": [3]}',
        '{"rows": [{"peers": [{}]}]}',
        '{"rows": [{"shape": "a", "tflops": "fast"}]}',
        '{"speed": {"a": []}}',
    ],
)
def test_a_record_that_cannot_be_read_is_refused_before_anything_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ran: list[object] = []
    monkeypatch.setattr("openmla.cli.bench._run", lambda *arguments: ran.append(arguments))
    path = tmp_path / "record.json"
    path.write_text(text)
    result = invoke("cpu", "--quick", "--against", str(path))
    assert result.exit_code == 2 and "cannot read" in result.output and not ran
