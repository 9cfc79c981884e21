"""Nothing in an engine's process dies because openmla is installed, whatever the engine is like.

Each world here is an engine with one thing broken. All that the environment may ask for is asked
for. A plug-in may say one line for each thing that it cannot do; it may not raise.
"""

from __future__ import annotations

import doctest
import logging
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any

import pytest

from integrations import stand_in
from integrations.sglang import fake_sglang
from integrations.vllm import fake_vllm
from openmla.integrations import plugin, sglang, vllm
from repository.package_source import ROOT


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Panic(BaseException):
    """What an extension written in Rust raises when it panics."""


class Hostile:
    """Raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}\n")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError

    def __contains__(self, item: Any) -> bool:
        raise KeyError(item)


class Agreeable:
    """Has everything, does nothing: whatever it is asked for is itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


@dataclass(frozen=True)
class Engine:
    """A stand-in, the entry points that it calls, and what its users may ask for."""

    modules: Callable[[], stand_in.Contents]
    installed: Callable[..., AbstractContextManager[stand_in.Contents]]
    entry_points: tuple[Callable[[], Any], ...]
    wishes: tuple[dict[str, str], ...]
    own: str


ENGINES = {
    "vllm": Engine(
        fake_vllm.modules,
        fake_vllm.installed,
        (vllm.platform, vllm.register),
        (
            *({"OPENMLA_VLLM_CPU": wish} for wish in ("prefill", "attention", "sparse", "\n")),
            {"OPENMLA_VLLM_CUSTOM": "prefill,attention,sparse,,x"},
            {},
        ),
        "vllm.openmla",
    ),
    "vllm on a GPU": Engine(
        partial(fake_vllm.modules, (8, 0)),
        partial(fake_vllm.installed, capability=(8, 0)),
        (vllm.platform, vllm.register),
        ({"OPENMLA_VLLM_INDEXER": "1", "OPENMLA_VLLM_CPU": "sparse"}, {}),
        "vllm.openmla",
    ),
    "sglang": Engine(
        fake_sglang.modules,
        fake_sglang.installed,
        (sglang.register,),
        ({"OPENMLA_SGLANG": "latent,scores,attention,,x"}, {}),
        "sglang.openmla",
    ),
}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
SHAPES = [None, 7, "text", [], {}, object(), Hostile(), Agreeable(), Hostile, int]
ERRORS = [
    RuntimeError("no kernel image\nis available"),
    OSError("libcudart.so.12: cannot open shared object file"),
    ImportError(),
    AttributeError("partially initialized module"),
    SyntaxError("invalid"),
    AssertionError(),
    RecursionError("maximum recursion depth"),
    SystemExit(1),
    Panic("called `Option::unwrap()` on a `None` value"),
    Unprintable(),
]


def call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry point twice, for every wish."""
    for wish in engine.wishes:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("OPENMLA_")]:
                patch.delenv(name)
            for name, value in wish.items():
                patch.setenv(name, value)
            patch.setattr(vllm.registration, "_as_custom", set())
            for entry_point in engine.entry_points * 2:
                entry_point()


def said(engine: Engine, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a world; none has a line break, and all are openmla's."""
    found = [record.getMessage() for record in caplog.records if record.name == engine.own]
    caplog.clear()
    assert all(line.startswith("openmla: ") for line in found)
    assert all("\n" not in line.replace("=\n", "=") for line in found)
    return found


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@every_engine
def test_a_whole_engine_costs_lines_for_what_it_is_asked_in_vain_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with engine.installed():
        call(engine, monkeypatch)
    assert all(" has no effect: " in line for line in said(engine, caplog))


@every_engine
def test_modules_and_names_that_are_missing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for module, names in engine.modules().items():
        for missing in (module, *(f"{module}:{name}" for name in names)):
            with engine.installed(without=(missing,)):
                call(engine, monkeypatch)
            said(engine, caplog)


@every_engine
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
def test_names_that_are_something_else(
    shape: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    for module, names in engine.modules().items():
        for name in names:
            with engine.installed():
                setattr(sys.modules[module], name, shape)
                call(engine, monkeypatch)
            said(engine, caplog)


@contextmanager
def raised_by(module: str, error: BaseException) -> Iterator[None]:
    """Importing this module raises."""

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            if name == module:
                raise error

    del sys.modules[module]
    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@every_engine
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_modules_that_raise_on_import(
    error: BaseException,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    lines = []
    for module in engine.modules():
        with engine.installed(), raised_by(module, error):
            call(engine, monkeypatch)
        lines += said(engine, caplog)
    assert any(f": {type(error).__name__}: " in f"{line} " for line in lines)


def test_an_interrupt_is_not_a_reason(monkeypatch: pytest.MonkeyPatch):
    engine = ENGINES["vllm"]
    interrupted = raised_by("vllm.v1.attention.backends.registry", KeyboardInterrupt())
    with engine.installed(), interrupted, pytest.raises(KeyboardInterrupt):
        call(engine, monkeypatch)


LOAD = """
import logging, sys
from importlib.metadata import EntryPoint
logging.basicConfig()
{world}
for group, value in (
    ("vllm.general_plugins", "openmla.integrations.vllm:register"),
    ("vllm.platform_plugins", "openmla.integrations.vllm:platform"),
    ("sglang.srt.plugins", "openmla.integrations.sglang:register"),
):
    for turn in range(2):
        EntryPoint("openmla", value, group).load()()
print("alive")
"""
WORLDS = {
    "no triton": "sys.modules['triton'] = None",
    "no torch": "sys.modules['torch'] = None",
    "no torch.cuda": "import torch; sys.modules['torch.cuda'] = None; del torch.cuda",
    "a torch that is something else": "sys.modules['torch'] = type(sys)('torch')",
    "no engine": "sys.modules['vllm'] = sys.modules['sglang'] = None",
}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_entry_points_in_a_process_without(world: str):
    environment = {
        "OPENMLA_VLLM_CPU": "sparse",
        "OPENMLA_VLLM_CUSTOM": "attention",
        "OPENMLA_VLLM_INDEXER": "1",
        "OPENMLA_SGLANG": "scores,attention",
        "PYTHONPATH": ":".join(sys.path),
    }
    program = [sys.executable, "-c", LOAD.format(world=world)]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0 and done.stdout == "alive\n", done.stderr
    assert "Traceback" not in done.stderr
    assert all(".openmla:openmla: " in line for line in done.stderr.splitlines())


def test_extras_and_environments_are_of_the_version_that_a_plug_in_was_written_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm_extra, sglang_extra = (extras["optional-dependencies"][n][0] for n in ("vllm", "sglang"))
    version = vllm.registration.WRITTEN_FOR.removeprefix("vLLM ")
    assert vllm_extra == f"vllm=={version}.*"
    assert f"vllm-cpu=={version}." in (ROOT / "constraints-vllm.txt").read_text()
    version = sglang.registration.WRITTEN_FOR.removeprefix("SGLang ")
    assert sglang_extra == f"sglang=={version}"
    assert f"sglang=={version} " in (ROOT / "Makefile").read_text()


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(plugin).attempted and not doctest.testmod(plugin).failed
