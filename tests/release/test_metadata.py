"""What PyPI and a reader of the repository are told, said once or the same everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import openmla

ROOT = Path(__file__).resolve().parents[2]
VERSION = openmla.__version__
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")


def test_every_dev_tool_is_pinned():
    """`constraints.txt` names what the extras leave open, so that runs can be repeated."""
    pinned = set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    wanted = {re.split(r"[\[>=]", r)[0] for r in [*extras["dev"], *extras["docs"]]}
    assert wanted - pinned <= {"openmla"}


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert citation["repository-code"] == PROJECT["urls"]["Homepage"]
    assert [a["name"] for a in citation["authors"]] == [a["name"] for a in PROJECT["authors"]]


def test_the_changelog_keeps_its_form():
    """keepachangelog.com: Unreleased first, then versions with dates, changes by kind."""
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    titles = [line for line in lines if line.startswith("## ")]
    assert titles[0] == "## [Unreleased]"
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", t) for t in titles[1:])
    assert titles[1].startswith(f"## [{VERSION}] - ")
    kinds = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    assert kinds and set(kinds) <= set(CHANGES)


def test_classifiers_agree_with_what_is_required():
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert "Typing :: Typed" in PROJECT["classifiers"]
    assert (ROOT / "src/openmla/py.typed").is_file()
