"""`openmla plan`: the form of a layer, beside the plan of a kernel."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from openmla import dispatch
from openmla.cli.plan import plan_command
from openmla.errors import InvalidArgument
from openmla.explain import text
from openmla.planning import Plan
from openmla.planning.models import index_problem_for_model

app = typer.Typer()
app.command()(plan_command)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ("--tokens 4096", "expanded: 3222 M multiply-adds per head, 9666 M in latent form"),
        ("--tokens 131072", "expanded: 2766 G multiply-adds per head, 9363 G in latent form"),
        (
            "--tokens 16 --context 32768",
            "latent: 572.4 M multiply-adds per head, 4463 M expanded; --form latent plans that "
            "call",
        ),
        (
            "--tokens 16 --context 32768 --form latent",
            "latent: 572.4 M multiply-adds per head, 4463 M expanded",
        ),
        (
            "--model glm-5 --context 8192 --target a100",
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
    result = CliRunner().invoke(app, ["--verbose", *options.split()])
    assert result.exit_code == 0
    assert result.output.endswith(f"form of a layer\n  {form}\n")
    short = CliRunner().invoke(app, options.split()).output
    assert f"layer {form}" in " ".join(short.split())


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            "--form scores --context 32768",
            [
                "scores, 64 heads, 4096 queries x 32768 keys, pages of 64",
                "kernel: hopper scores (measured)",
                "work: 2 x 64 heads x 4096 queries x 32768 keys x 128 = 2.2 TFLOP at most",
                "  shared memory bytes 199088 of 232448",
                "  mi355x   cdna4 (simulated), 4 waves, 2 queries x 64 heads in registers",
            ],
        ),
        (
            "--form select --context 32768 --tokens 128 --page-size 32",
            [
                "select, top-2048 of 128 rows x 32768 scores, pages of 32",
                "kernel: hopper select (measured)",
                "work: 128 rows x 32768 scores = 0.0168 GB at most",
                "  24592  end, of 232448",
            ],
        ),
        ("--form scores --world 4", ["scores, 64 heads, 1024 queries x 4096 keys, pages of 64"]),
    ],
)
def test_steps_of_the_indexer_are_planned_as_calls_of_attention_are(options: str, lines: list[str]):
    result = CliRunner().invoke(app, ["--model", "deepseek-v3.2", "--verbose", *options.split()])
    assert result.exit_code == 0 and "form of a layer" not in result.output
    assert set(lines) <= set(result.output.splitlines())
    assert "kernel: hopper" in result.output
    as_json = CliRunner().invoke(app, ["--model", "glm-5", "--form", "scores", "--json"])
    assert Plan.from_json(as_json.output).problem.heads == 32


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("deepseek-v4-flash", "43 layers: 2 of the window alone; 21 of ratio 4; 20 of ratio 128"),
        ("deepseek-v4-pro --ratio 128", "61 layers: 31 of ratio 128, all rows; 30 of ratio 4"),
        ("deepseek-v4.1-flash --ratio 1", "2 of the window alone; 18 of ratio 2; 20 of ratio 1"),
        ("glm-5.3-flash", "11 of 45 layers are MLA"),
        ("kimi-k3", "24 of 93 layers are MLA"),
    ],
)
def test_a_model_with_layers_that_differ_says_which(model: str, told: str):
    words = CliRunner().invoke(app, ["--model", *model.split()]).output.split()
    assert told in " ".join(words)
    assert ("mla_attend:" in words) == model.startswith("deepseek")
    assert told in CliRunner().invoke(app, ["--verbose", "--model", *model.split()]).output


def test_a_window_is_planned() -> None:
    told = CliRunner().invoke(app, ["--window", "128", "--context", "8192", "--verbose"])
    assert told.exit_code == 0 and "window of 128" in told.output and "portable" in told.output
    for wrong in (["--form", "scores"], ["--form", "sparse"]):
        refused = CliRunner().invoke(app, ["--model", "deepseek-v3.2", *wrong, "--window", "8"])
        assert refused.exit_code == 2 and "window: expected 0" in refused.output


def test_ranges_of_a_named_length_are_planned() -> None:
    asked = ["--form", "latent", "--tokens", "1", "--context", "32768", "--page-size", "64"]
    told = CliRunner().invoke(app, [*asked, "--range-keys", "512", "--verbose"])
    assert told.exit_code == 0 and "ranges of 512 keys" in told.output
    assert "64 range(s) = 128, for 132 SMs" in told.output
    for wrong in ("384", "64"):
        refused = CliRunner().invoke(app, [*asked, "--range-keys", wrong])
        assert refused.exit_code == 2 and f"to 1048576, got {wrong}" in refused.output
    for form in ("scores", "dense"):
        wrong = ["--model", "deepseek-v3.2", "--form", form, "--range-keys", "512"]
        refused = CliRunner().invoke(app, wrong)
        assert refused.exit_code == 2 and "range_keys: expected 0" in refused.output


def test_results_that_are_turned_back_are_planned() -> None:
    asked = ["--model", "deepseek-v4-flash", "--dtype", "fp8_584", "--page-size", "64"]
    told = CliRunner().invoke(app, [*asked, "--turned-back", "64", "--verbose"])
    assert told.exit_code == 0 and "64 columns turned back" in told.output
    assert "simulated" in told.output and "hopper" in told.output
    for wrong in (["--form", "scores"], ["--form", "dense"]):
        asked = ["--model", "deepseek-v3.2", *wrong, "--turned-back", "64"]
        refused = CliRunner().invoke(app, asked)
        assert refused.exit_code == 2 and "turned_back: expected 0" in refused.output


def test_a_model_without_an_indexer_is_refused():
    for model in ("deepseek-v3", "kimi-k3"):
        result = CliRunner().invoke(app, ["--model", model, "--form", "scores"])
        assert result.exit_code == 2 and "form" in result.output
        with pytest.raises(InvalidArgument, match=f"form: .*{model} has no indexer"):
            index_problem_for_model(model)


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
        (  # two kernels serve it, and wait for the same
            "--target mi355x --dtype e4m3",
            (3, 6),
            "3 stages (cdna4: needs Triton 3.8 or later)",
        ),
        (
            "--target mi355x --backend cdna4",
            (3, 6),
            "here: with Triton 3.6 nothing runs: cdna4: needs Triton 3.8 or later",
        ),
        ("--target b200 --dtype e4m3", (3, 9), ""),
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
    output = CliRunner().invoke(app, ["--verbose", *options.split()]).output
    lines = [line for line in output.splitlines() if line.startswith("here: ")]
    assert len(lines) == bool(here)
    assert here in "".join(lines)


def test_json_is_nothing_but_the_plan():
    assert json.loads(CliRunner().invoke(app, ["--json"]).output)["problem"]["heads"] == 128


@pytest.mark.parametrize("target", ["h200", "b200", "mi355x", "a100", "cpu", "gb200", "h100"])
@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v3.2", "glm-5", "minicpm3-4b"])
def test_the_answer_is_short_and_says_how_the_kernel_is_known_to_work(model: str, target: str):
    output = CliRunner().invoke(app, ["--model", model, "--target", target]).output
    lines = output.splitlines()
    assert len(lines) <= 22 and max(map(len, lines)) <= 80
    (status,) = (line for line in lines if line.startswith("  status "))
    assert status.split()[1].strip(":,") in ("measured", "simulated", "portable")
    assert "original" not in output and "runs today" not in output


def test_keys_are_counted_as_they_were_asked_for():
    asked = ["--model", "glm-5", "--tokens", "4096", "--page-size", "48"]
    first = CliRunner().invoke(app, asked).output.splitlines()[0]
    assert first == "glm-5 on h200: 64 heads, 4096 new tokens, 4096 keys in 86 pages of 48"


def test_a_chip_that_stands_for_another_says_so():
    lines = CliRunner().invoke(app, ["--target", "gb200"]).output.splitlines()
    assert lines[:2] == [
        "deepseek-v3 on gb200: 128 heads, 4096 new tokens, 4096 keys",
        "  planned as b200: the same architecture beside a Grace CPU",
    ]
