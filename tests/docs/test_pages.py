"""Every page: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import openmla
from docs.pages import DOCS, FENCE, PAGES, ROOT, as_module, blocks, links, run_page
from openmla import errors
from openmla.cli import COMMANDS

WITH_PYTHON = [page for page in PAGES if blocks(page.read_text(), "python")]
README = ROOT / "README.md"
DOCUMENTS = [*PAGES, README, ROOT / "CONTRIBUTING.md", ROOT / "DESIGN.md"]
VLLM = {f"OPENMLA_VLLM_CPU={name}" for name in ("prefill", "attention", "sparse")}
VLLM |= {"OPENMLA_VLLM_INDEXER=1", "OPENMLA_VLLM_FLASHMLA=1"}
SGLANG = {"OPENMLA_SGLANG=scores,attention"}
SHELL = {"pip", "vllm", "sglang", "make", "openmla"} | VLLM | SGLANG


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_its_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In one namespace, from the first block to the last; no block is exempt."""
    monkeypatch.chdir(tmp_path)
    run_page(page, tmp_path)


def test_every_block_says_what_it_is():
    """Python runs, shell is checked; there is nothing else."""
    kinds = {p.name: {m[1] for m in FENCE.finditer(p.read_text())} for p in [*PAGES, README]}
    assert set().union(*kinds.values()) == {"python", "sh"}


def commands() -> list[str]:
    """Lines of the shell blocks."""
    found = [source for page in [*PAGES, README] for _, source in blocks(page.read_text(), "sh")]
    joined = "".join(found).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


def test_shell_lines_are_of_programs_we_know():
    assert {shlex.split(line)[0] for line in commands()} <= SHELL
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {shlex.split(c)[1] for c in commands() if c.startswith("make ")} <= targets


def shown_commands() -> list[str]:
    """Calls of `openmla` in shell blocks and between backticks, in all documents."""
    text = "\n".join(d.read_text() for d in DOCUMENTS)
    inline = re.findall(r"`(openmla (?:[a-z]+)[^`\n]*)`", text)
    return sorted({c for c in (*commands(), *inline) if c.startswith("openmla ")})


@pytest.mark.parametrize("command", shown_commands())
def test_openmla_commands_have_these_options(command: str):
    """The command line itself is asked, up to the point where it would begin to work."""
    import importlib

    name, *arguments = shlex.split(command)[1:]
    assert name in COMMANDS
    module, function, _ = COMMANDS[name]
    app = typer.Typer()
    app.command()(getattr(importlib.import_module(module), function))
    listed = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    for argument in arguments:
        assert not argument.startswith("--") or re.search(rf"{re.escape(argument)}\b", listed)


def test_the_readme_lists_every_command():
    listed = re.findall(r"^\| `openmla (\w+)` \|", README.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path):
    """Without a network: files exist, anchors of pages are headings of theirs."""
    dead = []
    for link in links(document.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (document.parent / path).resolve() if path else document
        if not target.exists():
            dead.append(link)
        elif anchor and target.suffix == ".md" and target.name != "api.md":
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            if anchor not in {
                re.sub(r"[^\w -]", "", t).strip().lower().replace(" ", "-") for t in titles
            }:
                dead.append(link)
    assert dead == []


def test_the_checks_find_what_is_planted(tmp_path: Path):
    """Checks of the checkers: a block that fails, at its line; a link in a text, none in code."""
    page = tmp_path / "planted.md"
    page.write_text("Text [a](b.md).\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    assert as_module(page.read_text()).splitlines()[3::4] == ["x = 1", "assert x == 2"]
    with pytest.raises(AssertionError) as failed:
        run_page(page, tmp_path)
    assert failed.traceback[-1].lineno == 7  # counted from 0
    assert links("[a](b.md) `[c](d)`\n```python\n[e](f)\n```\n") == ["b.md"]


def test_troubleshooting_has_every_error_with_cause_and_cure():
    page = (DOCS / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    types = [n for n, e in vars(errors).items() if isinstance(e, type) and issubclass(e, Exception)]
    assert sorted(sections) == sorted(types)
    assert [n for n in types if "**Cure:**" not in sections[n]] == []
    assert [n for n in types[1:] if "**Cause:**" not in sections[n]] == []


def test_the_reference_has_every_public_name():
    listed = re.findall(r"^::: openmla\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    named = {name for name in openmla.__all__ if not name.startswith("_")} - set(vars(errors))
    assert named <= set(listed) and "errors" in listed


def test_every_clause_of_the_contract_has_an_example():
    """As many as DESIGN.md has, in its order."""
    contract = re.findall(r"^(\d+)\. ", (ROOT / "DESIGN.md").read_text(), re.MULTILINE)
    page = (DOCS / "numerics.md").read_text()
    parts = re.split(r"^\*\*(\d+)\. ", page, flags=re.MULTILINE)
    assert parts[1::2] == contract and len(contract) >= 21
    assert [
        n for n, text in zip(parts[1::2], parts[2::2], strict=True) if "```python" not in text
    ] == []


def test_the_pages_are_all_in_the_navigation():
    """MkDocs says so too, where it is installed."""
    listed = re.findall(r"([\w-]+\.md)", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == [page.name for page in PAGES]
    assert len(listed) == len(set(listed))
