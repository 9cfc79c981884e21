"""The built wheel, installed where there is nothing but what it requires, makes a call.

The environment is a fresh one into which the files of the required distributions are linked from
this one: no download, and nothing that only developers have.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import openmla

ROOT = Path(__file__).resolve().parents[2]
VERSION = openmla.__version__
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src/openmla")
PROGRAM = """
import importlib.metadata, importlib.util, sys
import torch, openmla
assert openmla.__file__.startswith(sys.prefix), openmla.__file__
assert importlib.metadata.version("openmla") == openmla.__version__
absent = ("pytest", "typer", "rich", "mkdocs", "gluon_sim", "transformers", "ruff")
assert [name for name in absent if importlib.util.find_spec(name)] == []
q, k, v = torch.randn(5, 2, 24), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
cu = torch.tensor([0, 2, 5], dtype=torch.int32)
given = (q, k, torch.randn(5, 8), v)
out = openmla.mla_prefill(*given, cu_seqlens_q=cu)
exact = openmla.mla_prefill(*given, cu_seqlens_q=cu, backend="reference")
assert torch.allclose(out, exact, atol=1e-5)
problem = openmla.Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128)
print(openmla.plan(problem, "b200"))
"""


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Like a shell whose environment names no other place to import from."""
    return subprocess.run(
        [str(c) for c in command],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, as what a build leaves behind must not end up in the next one."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    done = run(*pip, "--wheel-dir", folder, folder / "source")
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


def required(names: list[str]) -> dict[str, Distribution]:
    """The distributions that these require, and those that these require, by name."""
    found: dict[str, Distribution] = {}
    while names:
        requirement = Requirement(names.pop())
        name = requirement.name.lower()
        if name not in found and (
            not requirement.marker or requirement.marker.evaluate({"extra": ""})
        ):
            found[name] = distribution(name)
            names += found[name].requires or []
    return found


def test_the_wheel_holds_the_package_and_no_more(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    info = f"openmla-{VERSION}.dist-info/"
    assert {name.split("/")[0] for name in names} == {"openmla", info.rstrip("/")}
    modules = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src/openmla").rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == modules
    assert "openmla/py.typed" in names and any(n.endswith("tuned/h200.json") for n in names)
    metadata = zipfile.ZipFile(wheel).read(info + "METADATA").decode()
    assert f"Version: {VERSION}\n" in metadata and "License-Expression: Apache-2.0" in metadata


@pytest.mark.slow
def test_a_clean_environment_makes_a_call(wheel: Path, tmp_path: Path):
    assert run(sys.executable, "-m", "venv", "--without-pip", tmp_path).returncode == 0
    site = next(tmp_path.glob("lib/python*/site-packages"))
    metadata = zipfile.ZipFile(wheel).read(f"openmla-{VERSION}.dist-info/METADATA").decode()
    for found in required(re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)).values():
        for top in {
            f.parts[0] for f in found.files or [] if f.parts[0] not in ("..", "__pycache__")
        }:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    into = (sys.executable, "-m", "pip", "--python", tmp_path / "bin/python", "install")
    done = run(*into, "--no-deps", "--no-index", wheel)
    assert done.returncode == 0, done.stderr[-2000:]
    done = run(tmp_path / "bin/python", "-c", PROGRAM)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "blackwell" in done.stdout
    done = run(tmp_path / "bin/openmla", "doctor")
    assert "pip install 'openmla[cli]'" in done.stderr and "Traceback" not in done.stderr
