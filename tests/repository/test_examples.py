"""Every example is short, runs on a CPU and prints what it promises; so does the notebook."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from openmla.explain.text import explain_text
from openmla.planning import plan
from openmla.planning.models import problem_for_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "dense.py": r"off the reference by \d\.\de-0[3-9]",
    "paged_fp8.py": r"0\.57 of the memory, [1-4]\.\d% off bf16 rows",
    "sparse_topk.py": r"\[128(, 128){7}\] rows of 600 .*\n\d\d% of the softmax weight",
    "chunked_prefill.py": r"3 chunks of 128: \d\.\de-03 off the whole prompt",
    "planning.py": r"h200 +hopper .*(\n.*)*cpu +cpu .*\nrefused: backend 'hopper' has no sparse",
    "simulator.py": r"0 findings\naccepted: True",
    "transformers_generate.py": r"the same tokens as without openmla: True",
    "fine_tune.py": r"step 0: loss [23]\.\d\d\n(.*\n){3}after 40 .* loss 0\.\d\d, by chance 2\.77",
    "lora_transformers.py": r"step 0: loss [34]\.\d\d\n(.*\n)*step 39: loss [01]\.\d\d",
    "indexer_warm_up.py": r"step 0: loss 1\.\d\d\n(.*\n){3}16 keys catch [45]\d% .*, [89]\d% after",
    # e4m3 keeps 3 bits: an error of some percent in the values, less after averaging them.
    "layer_over_fp8_pages.py": r"(.*\n +expanded: .*\n){2}.*\n +latent: .*\n"
    r"(\d+ tokens: [0-4]\.\d+% off the whole prompt without a cache\n){2}",
}
ON_TWO_RANKS = "context_parallel.py"
LINES = 80


@pytest.mark.parametrize("name", PRINTED)
def test_it_prints_what_it_promises(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTED[name], printed), printed


def test_every_example_is_run_and_short():
    lengths = {p.name: len(p.read_text().splitlines()) for p in EXAMPLES.glob("*.py")}
    assert set(lengths) == {*PRINTED, ON_TWO_RANKS}
    assert {name: n for name, n in lengths.items() if n >= LINES} == {}
    assert [p.name for p in EXAMPLES.glob("*.ipynb")] == ["tour.ipynb"]


@pytest.mark.slow
def test_context_parallel_on_two_ranks():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command.append(str(EXAMPLES / ON_TWO_RANKS))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shares = re.findall(r"rank (\d): (\d+) tokens", done.stdout)
    assert sorted(rank for rank, _ in shares) == ["0", "1"]
    assert sum(int(tokens) for _, tokens in shares) == 343


def cells(kind: str) -> list[str]:
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def test_the_notebook_plans_runs_times_and_draws(capsys: pytest.CaptureFixture[str]):
    """Cell by cell, in one namespace, as a notebook does."""
    found: dict[str, object] = {"__name__": "tour"}
    for number, source in enumerate(cells("code")):
        exec(compile(source, f"tour.ipynb, cell {number}", "exec"), found)
    assert "hopper" in capsys.readouterr().out
    assert set(found["medians"]) == {"openmla", "torch SDPA"}  # type: ignore[call-overload]
    picture = found["Picture"]("<svg><g/></svg>")._repr_svg_()  # type: ignore[operator]
    assert picture.startswith("<svg><style>") and picture.endswith("<g/></svg>")


def test_the_notebook_is_kept_with_its_outputs():
    """A reader sees them without running it. Figures of a machine are old, the rest must not be."""
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert "stream" in kinds and kinds.count("execute_result") >= 3
    assert "image/svg+xml" in code[-1]["outputs"][-1]["data"]
    problem = problem_for_model("deepseek-v3", tokens=4096, tp=8)
    printed = "".join(code[1]["outputs"][0]["text"])
    assert printed.strip() == explain_text(plan(problem, "h200")).strip()
    titles = re.findall(r"^## (\w+)", "\n".join(cells("markdown")), re.MULTILINE)
    assert titles == ["Plan", "Run", "Time", "Draw"]
