"""Records of benchmarks say which source they measured."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from openmla.lab.bench import provenance


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module as if it lay in a checkout of its own."""
    file = tmp_path / "provenance.py"
    file.write_text("first\n")
    monkeypatch.setattr(provenance, "__file__", str(file))
    return file


def test_the_commit_is_named_and_so_are_changes(source: Path):
    git(source.parent, "init", "--quiet")
    git(source.parent, "add", source.name)
    git(source.parent, "commit", "--quiet", "-m", "one")
    git(source.parent, "tag", "-a", "-m", "a tag is no commit", "v1")
    head = git(source.parent, "rev-parse", "HEAD")
    assert provenance.commit_of_source() == head
    assert provenance.provenance("a command", gpu=False)["commit"] == head
    source.write_text("second\n")
    assert provenance.commit_of_source() == f"{head}-dirty"


def test_a_checkout_around_an_installed_package_is_not_its_source(source: Path):
    git(source.parent, "init", "--quiet")
    git(source.parent, "commit", "--quiet", "--allow-empty", "-m", "someone else's")
    assert provenance.commit_of_source() == ""
    assert provenance.provenance("a command", gpu=False)["commit"] == provenance.UNKNOWN
