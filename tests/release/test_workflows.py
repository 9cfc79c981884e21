"""Workflows and templates: every step is a make target that exists; nothing else is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
MAKE = re.compile(r"make ([a-z-]+)( [A-Z]+=\S.*)?")


def make_targets() -> set[str]:
    """Names of rules in the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def unknown(commands: list[str]) -> list[str]:
    """Commands that are no call of a make target that exists."""
    found = [(command, MAKE.fullmatch(command)) for command in commands]
    return [c for c, match in found if match is None or match[1] not in make_targets()]


def test_the_workflows_are_there():
    assert [w.stem for w in WORKFLOWS] == ["ci", "docs", "release", "weekly"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.stem)
def test_every_step_is_a_make_target(workflow: Path):
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands and unknown(commands) == []


def test_a_step_that_is_none_is_caught():
    """A check of the checker."""
    assert unknown(["make lint", "make wheel TAG=v1"]) == []
    assert unknown(["make nonsense", "pip install x", "make lint && rm -r x"]) != []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda w: w.stem)
def test_rights_are_named_and_actions_have_versions(workflow: Path):
    """A workflow may read, unless a job says otherwise; no action floats."""
    record = yaml.safe_load(workflow.read_text())
    assert record["permissions"] == {"contents": "read"}
    uses = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [u for u in uses if not re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v\d+)", u)] == []


def test_ci_covers_every_python_of_the_package():
    jobs = yaml.safe_load((FOLDER / "workflows/ci.yml").read_text())["jobs"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", pyproject)
    assert jobs["test"]["strategy"]["matrix"]["python"] == named


def test_a_release_is_tested_first_and_published_without_a_password():
    jobs = yaml.safe_load((FOLDER / "workflows/release.yml").read_text())["jobs"]
    assert "make test" in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in str(jobs["publish"])


@pytest.mark.parametrize("name, asks", [("bug", ["doctor", "replay"]), ("speed", ["doctor"])])
def test_issue_templates_ask_for_what_is_needed(name: str, asks: list[str]):
    template = yaml.safe_load((FOLDER / f"ISSUE_TEMPLATE/{name}.yml").read_text())
    fields = {field["id"]: str(field["attributes"]) for field in template["body"]}
    assert set(asks) <= set(fields) and "openmla doctor" in fields["doctor"]
    if "replay" in asks:
        assert "openmla check" in fields["replay"] and "--replay" in fields["replay"]
