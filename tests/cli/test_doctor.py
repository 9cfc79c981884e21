"""`openmla doctor`: what runs here, and the table of what runs where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from openmla import __version__
from openmla.cli import doctor
from openmla.cli.doctor import doctor_command
from openmla.explain.support import support_table_markdown
from openmla.planning.target import target_by_name

app = typer.Typer()
app.command()(doctor_command)


def test_this_machine_runs_every_call():
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and __version__ in result.output
    cpu = [line for line in result.output.splitlines() if "mla_prefill" in line][:3]
    assert len(cpu) == 3 and all(line.rstrip(" │").endswith("cpu, measured") for line in cpu)


def test_the_table_is_printed_as_it_stands_in_the_readme():
    result = CliRunner().invoke(app, ["--table"])
    assert result.output == support_table_markdown() + "\n"


def test_it_ends_with_what_to_do_next(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    result = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert result.output.splitlines()[-1].startswith("next: `openmla demo`")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/" + name)
    assert "install its CUDA or ROCm build" in doctor.next_step()


@pytest.mark.parametrize(
    "chip, words",
    [("h200", "openmla warmup --model"), ("v100", "does not run on this GPU"), ("a100", "warmup")],
)
def test_the_next_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch, chip: str, words: str):
    """As if this were that chip, with the Triton that is installed."""
    found = replace(target_by_name("a100"), name="v100", arch="sm_70") if chip == "v100" else None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "device_target", lambda device: found or target_by_name(chip))
    assert words in doctor.next_step()


@pytest.mark.parametrize(
    "reason, words",
    [("hopper: needs Triton 3.6 or later", "upgrade Triton"), ("hopper: d_nope 112", "slower")],
)
def test_an_old_triton_and_a_slow_path_are_named(
    monkeypatch: pytest.MonkeyPatch, reason: str, words: str
):
    plan = doctor.plan_for(doctor.EXAMPLES["mla_prefill"], target_by_name("h200"), "portable")
    plan = replace(plan, passed_over=(reason,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "device_target", lambda device: target_by_name("h200"))
    monkeypatch.setattr(doctor, "plan_for", lambda problem, target: plan)
    assert words in doctor.next_step()
