"""`openmla doctor`: what runs here, and the table of what runs where."""

from __future__ import annotations

import typer
from typer.testing import CliRunner

from openmla import __version__
from openmla.cli.doctor import doctor_command
from openmla.explain.support import support_table_markdown

app = typer.Typer()
app.command()(doctor_command)


def test_this_machine_runs_every_call():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and __version__ in result.output
    cpu = [line for line in result.output.splitlines() if "mla_prefill" in line][:3]
    assert len(cpu) == 3 and all(line.rstrip(" │").endswith("cpu") for line in cpu)


def test_the_table_is_printed_as_it_stands_in_the_readme():
    result = CliRunner().invoke(app, ["--table"])
    assert result.output == support_table_markdown() + "\n"
