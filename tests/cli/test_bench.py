"""`openmla bench`: what it refuses, and what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from openmla.cli.bench import bench_command
from openmla.lab.bench import dense, few, gpu_timing, sparse
from openmla.lab.bench.gpu_timing import GpuTiming
from openmla.planning import target

app = typer.Typer()
app.command()(bench_command)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})


def test_unknown_targets_are_refused():
    result = invoke("tpu")
    assert (
        result.exit_code == 2
        and "expected auto, cpu, dense, few, sparse, got 'tpu'" in result.output
    )


@pytest.mark.parametrize("what", ["dense", "sparse"])
def test_kernels_need_a_gpu(monkeypatch: pytest.MonkeyPatch, what: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke(what)
    assert result.exit_code == 2 and f"{what} needs a CUDA GPU" in result.output


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke("--plot", "x.svg")
    assert result.exit_code == 2 and "not with cpu" in result.output


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings as if measured: cuDNN takes 1.5 times as long, and twice with assembling K."""
    times = {"openmla": 2.0, "cudnn": 3.0, "cudnn layer": 4.0}
    timings = {name: GpuTiming(ms, ms, ms) for name, ms in times.items()}
    row = dense.Row(dense.Shape(heads=16, q_len=4096, k_len=4096), timings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(dense, "run_dense", lambda rounds: iter([row]))
    monkeypatch.setattr(dense, "matmul_tflops", lambda rounds: 700.0)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("what", [["dense"], []], ids=["dense", "auto"])
def test_dense_prints_ratios_and_writes_them(tmp_path: Path, what: list[str]):
    result = invoke(*what, "--rounds", "3", "--json", str(tmp_path / "new" / "dense.json"))
    assert result.exit_code == 0, result.output
    assert "1.500" in result.output and "2.000" in result.output
    record = json.loads((tmp_path / "new" / "dense.json").read_text())
    assert record["command"] == "openmla bench dense --rounds 3 --threads 0"
    assert (record["rows"][0]["kernel"], record["rows"][0]["layer"]) == (1.5, 2.0)


def test_sparse_prints_shares_and_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shape = sparse.Shape(heads=128, q_len=4096, rows=8192, topk=2048, bar=0.88)
    # As fast as the matmul for every operation: a share of 1, half of it in a row.
    ms = shape.flops / gpu_timing.MATMUL_FLOPS
    row = sparse.Row(
        shape, {"openmla": GpuTiming(ms, ms, 2 * ms), "matmul": GpuTiming(1.0, 1.0, 1.0)}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(sparse, "run_sparse", lambda rounds: iter([row]))
    paths = [tmp_path / "new" / name for name in ("sparse.json", "sparse.svg")]
    result = invoke("sparse", "--json", str(paths[0]), "--plot", str(paths[1]))
    assert result.exit_code == 0, result.output
    assert "1.000" in result.output and "0.500" in result.output and "0.88" in result.output
    written = json.loads(paths[0].read_text())["rows"][0]
    assert written["share"] == pytest.approx(1.0)
    assert written["gather_tb_per_s"] == pytest.approx(4096 * 2 * 2048 * 1152 / ms * 1e-9)
    assert paths[1].read_text().count("<svg") == 1


def test_few_runs_on_a_cpu_beside_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shapes = (few.Shape(32, 2, 2048, 4), few.Shape(64, 1, 2080, 3, cache_format="fp8_656"))
    monkeypatch.setattr(few, "SHAPES", shapes)
    path = tmp_path / "few.json"
    result = invoke("few", "--quick", "--rounds", "1", "--json", str(path))
    assert result.exit_code == 0, result.output
    first, second = json.loads(path.read_text())["rows"]
    assert (first["requests"], first["queries"], first["keys"]) == (1, 2, 64)
    assert second["shape"] == "2x1 on 65 h3 fp8_656" and second["shape"] in result.output
    flops = 2 * 2 * 65 * 3 * 1088
    assert second["tflops"] * second["us"] == pytest.approx(flops * 1e-6)
    assert second["tb_per_s"] * second["us"] == pytest.approx(2 * 65 * 656 * 1e-6)


def test_plain_torch_computes_what_openmla_does():
    inputs = few.Inputs(few.Shape(2, 3, 70, 4), "cpu")
    torch.testing.assert_close(inputs.plain(), inputs.openmla(), rtol=0.05, atol=0.02)


@pytest.mark.usefixtures("fake_gpu")
def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = invoke("dense", "--json", str(tmp_path / "file" / "dense.json"))
    assert result.exit_code == 2 and "is a file, not a folder" in result.output


@pytest.mark.usefixtures("fake_gpu")
def test_dense_draws_a_picture_and_says_which_gpu_it_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    h200 = target.target_by_name("h200")
    monkeypatch.setattr(target, "target_of_device", lambda device: h200)
    picture = tmp_path / "dense.svg"
    result = invoke("dense", "--target", "h200", "--plot", str(picture))
    assert result.exit_code == 0 and picture.read_text().count("<svg") == 1
    result = invoke("dense", "--target", "b200")
    assert result.exit_code == 2 and "target b200, but this GPU is h200" in result.output
    assert invoke("dense", "--target", "tpu").exit_code == 2


def test_a_target_goes_with_dense_only():
    result = invoke("cpu", "--target", "h200")
    assert result.exit_code == 2 and "target and plot go with dense" in result.output
