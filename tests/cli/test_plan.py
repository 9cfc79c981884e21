"""`openmla plan`: the form of a layer, beside the plan of a kernel."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from openmla.cli.plan import plan_command

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


def test_json_is_nothing_but_the_plan():
    assert json.loads(CliRunner().invoke(app, ["--json"]).output)["problem"]["heads"] == 128
