"""The versions that tests are pinned to go together, and are those that users get from pip."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from openmla.kernels.prepared import CHECKED_TRITONS

ROOT = Path(__file__).resolve().parents[2]
# What torch of the package index requires on Linux, by its wheels' metadata of 2026-11-16:
# `pip install --dry-run --report - torch==VERSION`.
TRITON_OF_TORCH = {
    "2.11.0": "3.6.0",
    "2.12.1": "3.7.1",
    "2.13.0": "3.7.1",
    "2.14.1": "3.8.0",
    "2.15.0": "3.9.0",
}


def pins(path: Path) -> dict[str, str]:
    """Package and version of every line that has both."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)$", path.read_text(), re.MULTILINE))


def other_tritons() -> list[str]:
    found = re.search(r"^OTHER_TRITONS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found
    return found[1].split()


def test_the_pinned_torch_and_triton_can_be_installed_together() -> None:
    pinned = pins(ROOT / "constraints.txt")
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]
    assert pins(ROOT / "constraints-vllm.txt")["torch"] in TRITON_OF_TORCH
    pinned = pins(ROOT / "constraints-sglang.txt")
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]


def test_what_the_installed_torch_requires_is_the_pin() -> None:
    """A CPU build requires no Triton; any other says which."""
    required = [
        line
        for line in importlib.metadata.requires("torch") or ()
        if re.match(r"triton\b", line) and "extra" not in line
    ]
    if not required:
        pytest.skip("this build of torch requires no Triton")
    version = importlib.metadata.version("torch").split("+")[0]
    assert f"=={TRITON_OF_TORCH[version]}" in required[0].replace(" ", "")


def test_every_triton_that_a_torch_of_ours_brings_is_tested() -> None:
    tested = {pins(ROOT / "constraints.txt")["triton"], *other_tritons()}
    assert tested == set(TRITON_OF_TORCH.values())
    numbers = {tuple(int(part) for part in version.split(".")[:2]) for version in tested}
    assert numbers == set(CHECKED_TRITONS)
    requires = (ROOT / "pyproject.toml").read_text()
    assert '"torch>=2.11"' in requires and "triton>=3.6" in requires, "open ranges"
