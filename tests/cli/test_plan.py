"""`openmla plan`: the form of a layer, beside the plan of a kernel."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from openmla import dispatch
from openmla.cli.plan import plan_command
from openmla.explain import text

app = typer.Typer()
app.command()(plan_command)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ("--tokens 4096", "expanded: 3222 M multiply-adds per head, 9666 M in latent form"),
        ("--tokens 16 --context 32768", "latent: 572.4 M multiply-adds per head, 4463 M expanded"),
        (
            "--model glm-5 --context 8192 --target b200",
            "sparse: 8192 keys, and a query selects 2048",
        ),
        (
            "--model deepseek-v3.2 --tokens 8192",
            "masked: 8192 keys, and a query selects 2048; 4.05 ms masked, 6.75 ms sparse at an "
            "H200's rates; at 128 heads a query costs the same both ways when it sees 7096 keys, "
            "a fresh prompt of 14192",
        ),
        ("--model deepseek-v4-flash", "sparse: K and V are one row, and there is no other"),
    ],
)
def test_the_form_of_a_layer_is_explained(options: str, form: str):
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0
    assert result.output.endswith(f"form of a layer\n  {form}\n")


@pytest.mark.parametrize(
    ("options", "version", "here"),
    [
        ("--target h200", (3, 6), ""),
        ("--target b200", (3, 6), "with Triton 3.6 a call runs blackwell, 256 rows x 128 keys"),
        ("--target b200 --tokens 1024", (3, 6), ""),
        (
            "--model deepseek-v3.2 --target b200",
            (3, 6),
            "here: with Triton 3.6 a call runs blackwell, 64 rows x 64 keys, 2 stages "
            "(blackwell: needs Triton 3.8 or later)",
        ),
        ("--model deepseek-v3.2 --target b200", (3, 9), ""),
        ("--target mi355x", (3, 6), "here: with Triton 3.6 a call runs portable, 128 rows"),
        ("--target mi355x", (3, 9), ""),
        (
            "--target mi355x --backend cdna4",
            (3, 6),
            "here: with Triton 3.6 nothing runs: cdna4: needs Triton 3.8 or later",
        ),
        ("--target b200 --dtype e4m3", (3, 9), "here: with Triton 3.9 a call runs portable"),
        ("--target h200 --form latent --page-size 64 --tokens 2", (3, 9), ""),
        ("--target h200", None, "here: no Triton is installed, so no GPU kernel runs"),
        ("--target cpu", None, ""),
    ],
)
def test_what_the_installed_triton_runs_instead(
    options: str, version: tuple[int, int] | None, here: str, monkeypatch: pytest.MonkeyPatch
):
    def installed() -> tuple[int, int]:
        if version is None:
            raise ImportError("triton")
        return version

    monkeypatch.setattr(dispatch, "triton_version", installed)
    monkeypatch.setattr(text, "triton_version", installed)
    output = CliRunner().invoke(app, options.split()).output
    lines = [line for line in output.splitlines() if line.startswith("here: ")]
    assert len(lines) == bool(here)
    assert here in "".join(lines)


def test_json_is_nothing_but_the_plan():
    assert json.loads(CliRunner().invoke(app, ["--json"]).output)["problem"]["heads"] == 128
