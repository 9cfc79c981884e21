"""`openmla check`: seeds, summary, exit codes."""

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.check import check_command
from openmla.testing import showcases
from openmla.testing.fuzz import Checker

app = typer.Typer()
app.command()(check_command)


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments])


def test_a_clean_run_says_so(tmp_path):
    result = invoke("--cases", "11", "--seed", "40", "--save-dir", str(tmp_path / "failures"))
    assert result.exit_code == 0, result.output
    assert "11 random cases, seeds 40 to 50, backend auto, on cpu" in result.output
    assert "all accepted" in result.output and "failures" in result.output
    assert not (tmp_path / "failures").exists()


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


def test_the_defect_table(monkeypatch):
    few = [d for d in showcases.REGISTER if d.name in ("causal ignored", "base two lse")]
    monkeypatch.setattr("openmla.cli.check.catalog", lambda: few)
    result = invoke("--defects")
    assert result.exit_code == 0, result.output
    assert "base two lse" in result.output and "15 of 15 broken results rejected" in result.output
    assert "2 of 2 defects seen" in result.output
