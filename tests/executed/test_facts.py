"""`openmla explain --compiled`: what compiled kernels show about speed, where a kernel needs it."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from gluon_sim.compiled import LineSlack
from openmla.cli.explain import explain_command
from openmla.lab.testing.executed import facts as module
from openmla.lab.testing.executed.facts import Facts, case_like, facts
from openmla.planning.models import problem_for_model

app = typer.Typer()
app.command()(explain_command)


@pytest.mark.compile
def test_hopper_hides_its_copies():
    """Two tiles of queries have 40 products per block of keys: K has one block's time, V more."""
    (kernel,) = facts(case_like(problem_for_model("deepseek-v3", tokens=8192)), "h200")
    typical = {line.typical for line in kernel.slack if len(line.products) > 4}
    assert typical == {40, 64}
    assert kernel.spills == 0
    tiles = [loop for loop in kernel.loops if loop.products]
    assert [(loop.warps, loop.products) for loop in tiles] == [
        ((0, 1, 2, 3), 20),
        ((4, 5, 6, 7), 20),
    ]
    assert all(loop.barriers <= 3 for loop in tiles)


def test_the_command_prints_them(monkeypatch: pytest.MonkeyPatch):
    made = Facts("kernel", (LineSlack("a.py:1", "b.py:2", (3, 5, 5)),), (), 168, 0)
    asked = []
    monkeypatch.setattr(module, "facts", lambda case, target: asked.append(target) or [made])
    result = CliRunner().invoke(app, ["--target", "h200", "--compiled"])
    assert result.exit_code == 0 and asked == ["h200"]
    assert "compiled and executed on this CPU: dense bf16 1 heads" in result.output
    assert "registers 168, moved to local memory 0" in result.output
    assert "a.py:1 -> b.py:2: 5 products (3 to 5)" in result.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "glm-5"}, "sparse bf16 64 heads 512+64->512 q(1) k(1024) topk 1024 distinct"),
        ({"form": "latent"}, "latent bf16 128 heads 512+64->512 q(4) k(1024) full"),
        ({"dtype": "e4m3"}, "dense e4m3 1 heads 128+64->128 q(256) k(1024) full"),
    ],
)
def test_a_small_case_of_the_same_kernel(options: dict[str, str], said: str):
    problem = problem_for_model(options.pop("model", "deepseek-v3"), tokens=8192, **options)
    assert str(case_like(problem)).startswith(said)
