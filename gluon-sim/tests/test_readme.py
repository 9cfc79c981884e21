"""The README's examples run, in one file, and print what it says."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from gluon_sim import Kind

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def run(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The text as a module hand_over, since Triton reads the source of kernels from a file."""
    monkeypatch.chdir(folder)
    path = folder / "hand_over.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("hand_over", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hand_over", module)
    spec.loader.exec_module(module)
    return module


def test_all_examples_run_and_print_what_is_said(tmp_path, monkeypatch, capsys):
    run("".join(blocks("python")), tmp_path, monkeypatch)
    assert capsys.readouterr().out == "".join(blocks("text"))
    assert len(blocks("python")[0].split("\n")) < 35  # it stays short
    assert "<rect" in (tmp_path / "hand_over.svg").read_text()


def test_the_pipelined_copy_is_right_with_the_wait_that_is_named(tmp_path, monkeypatch):
    first, last = blocks("python")[0], next(text for text in blocks("python") if "add_rows" in text)
    right = last.replace("wait_group(1)", re.search(r"wait_group\(1 if.*?\)", README)[0])
    run(f"{first}\n{right.replace('print(report.findings[0])', '')}", tmp_path, monkeypatch)
    module = sys.modules["hand_over"]
    assert module.report.ok and torch.equal(module.o, (module.x[0] + module.x[1]) + module.x[2])


def test_every_kind_of_finding_is_listed():
    listed = re.findall(r"^\| ([A-Z_]+) \|", README, re.MULTILINE)
    assert listed == [kind.name for kind in Kind]
