"""`openmla check`: seeds, summary, exit codes."""

import inspect
import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from openmla.cli.check import check_command
from openmla.cli.demo import demo_command
from openmla.cli.options import device_here
from openmla.dispatch import triton_version
from openmla.lab.testing.checker import Checker

app = typer.Typer()
app.command()(check_command)


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments])


def test_a_clean_run_says_so(tmp_path):
    result = invoke("--cases", "11", "--seed", "40", "--save-dir", str(tmp_path / "failures"))
    assert result.exit_code == 0, result.output
    assert "11 random cases, seeds 40 to 50, backend auto, on cpu" in result.output
    assert "every case is right or refused" in result.output and "failures" in result.output
    assert not (tmp_path / "failures").exists()


def test_seeds_are_counted_by_variants(tmp_path):
    result = invoke("--cases", "7", "--seed", "40", "--variants", "3", "--save-dir", str(tmp_path))
    assert result.exit_code == 0 and "7 random cases, seeds 40 to 42" in result.output


def test_a_failure_is_shown_saved_and_replayed(monkeypatch, tmp_path):
    def wrong(self, built):
        outcome = built.run()
        outcome.out.add_(1)
        return outcome

    monkeypatch.setattr(Checker, "run", wrong)
    result = invoke("--cases", "2", "--seed", "7", "--save-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "accuracy" in result.output and "shrunk to" in result.output
    saved = sorted(tmp_path.glob("*.json"))
    assert saved and saved[0].name in result.output.replace("\n", "")
    assert invoke("--replay", str(saved[0])).exit_code == 1
    monkeypatch.undo()
    again = invoke("--replay", str(saved[0]))
    assert again.exit_code == 0 and "nothing wrong" in again.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"case": ' + "[" * 200_000, "saved case: expected JSON, got lists and objects nested"),
        ('{"case": {"form": "dense"', "saved case: expected JSON"),
        (b"\xff\xfe\x00", "saved case: expected JSON"),
        ("[]", 'saved case: expected an object with a "case", got []'),
        ('{"case": 3}', "case: expected an object with the fields of Case, got 3"),
        ('{"case": {"form": 3}}', "case: expected the fields of Case, got missing heads"),
    ],
)
@pytest.mark.parametrize("options", [(), ("--simulate", "--target", "h200")])
def test_a_file_that_is_no_saved_case_is_refused(text, said, options, tmp_path):
    path = tmp_path / "case.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = invoke(*options, "--replay", str(path))
    assert result.exit_code == 2, result.output
    words = " ".join(result.output.replace("│", " ").split())
    assert "is not a saved case" in words and said in words


def test_children_and_a_record(tmp_path):
    record = tmp_path / "report.json"
    result = invoke("--cases", "4", "--seed", "9", "--jobs", "1", "--json", str(record))
    assert result.exit_code == 0, result.output
    written = json.loads(record.read_text())
    assert written["ok"] and (written["cases"], written["right"]) == (4, 4)
    version = ".".join(map(str, triton_version()))
    assert (written["torch"], written["triton"]) == (torch.__version__, version)
    assert written["guarded"] == 1 and sum(written["served"].values()) == 4


def test_a_run_stops_after_the_failures_it_may_have(monkeypatch, tmp_path):
    def raises(self, built):
        raise RuntimeError("boom")

    monkeypatch.setattr(Checker, "run", raises)
    result = invoke("--cases", "9", "--max-failures", "2", "--save-dir", str(tmp_path))
    assert result.exit_code == 1 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("there", [False, True])
def test_a_gpu_is_used_when_there_is_one(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)  # as if it could be used
    assert device_here("auto") == torch.device("cuda" if there else "cpu")
    assert device_here("cpu") == torch.device("cpu")
    for command in (check_command, demo_command):
        assert inspect.signature(command).parameters["device"].default == "auto"


def test_a_backend_without_kernels_fails():
    result = invoke("--cases", "2", "--backend", "cdna4")
    assert result.exit_code == 1 and "nothing ran" in result.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--cases", "0"], "--cases"),
        (["--cases", "x"], "--cases"),
        (["--backend", "magic"], "expected one of auto, reference"),
        (["--device", "magic"], "no such device here: magic"),
        (["--device", "cuda:99"], "no such device here: cuda:99"),
        (["--json", "no/such/folder.json"], "there is no folder no/such"),
        (["--jobs", "-1"], "--jobs"),
        (["--replay", "missing.json"], "missing.json is not a saved case"),
        (["--replay", __file__], "is not a saved case"),
    ],
)
def test_bad_options_are_refused(arguments, named, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert not list(tmp_path.iterdir())  # nothing ran, so nothing was saved


@pytest.mark.parametrize("values", ["[]", "{}", '{"case": {"form": 1}}', '{"case": 3}'])
def test_json_that_is_no_case_is_refused(values, tmp_path):
    (tmp_path / "x.json").write_text(values)
    result = invoke("--replay", str(tmp_path / "x.json"))
    assert result.exit_code == 2 and "Traceback" not in result.output
