"""The examples run, stay short, and print what they promise."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LINES = 80


def printed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_they_are_short():
    lengths = {f.name: len(f.read_text().splitlines()) for f in EXAMPLES.glob("*.py")}
    assert lengths and {name: n for name, n in lengths.items() if n >= LINES} == {}


def test_transformers_generate(capsys: pytest.CaptureFixture[str]):
    out = printed("transformers_generate.py", capsys)
    assert "the same tokens as without openmla: True" in out


def test_layer_over_fp8_pages(capsys: pytest.CaptureFixture[str]):
    """e4m3 keeps 3 bits: an error of some percent in the values, less after averaging them."""
    out = printed("layer_over_fp8_pages.py", capsys)
    assert [out.count(f"{form}: ") for form in ("expanded", "latent")] == [2, 1]
    errors = [float(line.split()[2].rstrip("%")) for line in out.splitlines()[-2:]]
    assert len(errors) == 2 and all(0 < e < 5 for e in errors)
