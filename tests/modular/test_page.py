"""docs/modular.md: every item of the five pages is there, and every name of the five classes."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import openmla.modular
from openmla.modular import FA4Config, MLAConfig, MlaConfigV2, MlaMmaOp, MLAPrefillSparse

ROOT = Path(__file__).resolve().parents[2]
PAGES = json.loads((Path(__file__).parent / "pages.json").read_text())
PAGE = (ROOT / "docs" / "modular.md").read_text()
DEVICE = {
    "MLAPrefillSparse": ROOT / "src/openmla/kernels/blackwell/sparse",
    "MlaMmaOp": ROOT / "src/openmla/kernels/cdna4",
}
"""Where the methods of a page that run on a GPU are functions."""
INSIDE = {
    "kernel": "sparse_kernel",
    "kernel_fp8": "sparse_kernel",
    "k_tma_gather4_load": "load_k",
    "v_tma_gather4_load": "load_v",
}
"""Methods that are part of a function of another name."""


def device_functions(struct: str) -> set[str]:
    """Functions of the kernel folders that a struct's methods are in."""
    if struct not in DEVICE:
        return set()
    trees = (ast.parse(path.read_text()) for path in DEVICE[struct].rglob("*.py"))
    return {
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("struct", PAGES)
def test_every_item_is_a_name(struct: str) -> None:
    made = getattr(openmla.modular, struct)
    known = {*dir(made), *(field.name for field in fields(made))}
    known |= device_functions(struct)
    items = [item for kind in PAGES[struct].values() for item in kind]
    assert [item for item in items if INSIDE.get(item, item) not in known] == []


@pytest.mark.parametrize("struct", PAGES)
def test_every_item_is_on_the_page(struct: str) -> None:
    section = PAGE.split(f"\n## {struct}\n")[1].split("\n## ")[0]
    items = [item for kind in PAGES[struct].values() for item in kind]
    assert [item for item in items if f"`{item}`" not in section] == []


FIVE = (FA4Config, MLAConfig, MLAPrefillSparse, MlaConfigV2, MlaMmaOp)
OTHER_NAMES = {
    *("None", "LatentCache", "Unsupported", "splitk_partitions", "dynamic_cluster_dim"),
    *("crd2idx", "v_full_v227", "v227_layout", "mma_op"),
}
"""What the second column of a table names besides members."""


def section(title: str) -> str:
    """The part of the page under a heading that begins with a title."""
    text = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    found = re.search(rf"^## {title}$.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found.group()


def named(text: str) -> set[str]:
    """What stands in code quotes, without parentheses of calls."""
    return {name.removesuffix("()") for name in re.findall(r"`([^`]+)`", text)}


@pytest.mark.parametrize("kind", FIVE, ids=lambda kind: kind.__name__)
def test_every_public_name_is_in_its_table(kind: Any) -> None:
    names = {name for name in dir(kind) if not name.startswith("_")}
    names |= {field.name for field in fields(kind)}
    assert names - named(section(kind.__name__)) == set()


def test_what_belongs_to_the_five_is_listed() -> None:
    others = set(openmla.modular.__all__) - {kind.__name__ for kind in FIVE}
    assert others - named(section("What belongs to them")) == set()


def test_names_that_the_page_gives_exist() -> None:
    """Each name in the second column of the five tables is one of the class."""
    for kind in FIVE:
        rows = [line.split("|") for line in section(kind.__name__).splitlines()]
        table = [row[2] for row in rows if len(row) == 6]
        known = set(dir(kind)) | {field.name for field in fields(kind)}
        wrong = {
            name
            for cell in table
            for name in named(cell)
            if re.fullmatch(r"\w+", name) and name not in known | OTHER_NAMES
        }
        assert wrong == set(), kind.__name__
