"""openmla enters SGLang's registries, or says in one line why not; it never ends an engine."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from integrations.sglang import fake_sglang
from openmla.compat import flash_mla, stand_in
from openmla.integrations.sglang import register, registration, selection
from openmla.integrations.sglang.registration import BACKENDS, CHOICES, HOOKS, LISTS, REPLACED
from repository.package_source import ROOT, imports, modules

LOADED = "integrations.sglang.attention"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in found)
    return found


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("OPENMLA_SGLANG", raising=False)
    caplog.set_level(logging.INFO)


def test_the_backend_is_offered_once_however_often_it_is_called(caplog: pytest.LogCaptureFixture):
    with fake_sglang.installed() as sglang:
        register()
        register()
        assert sglang[BACKENDS]["ATTENTION_BACKENDS"]["openmla"] is registration.create
        assert all(sglang[CHOICES][name] == ["triton", "openmla"] for name in LISTS)
        assert not sglang[HOOKS]["HookRegistry"].hooks
    assert lines(caplog) == []


def test_flash_mla_is_openmlas_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with fake_sglang.installed():
        register()
        assert "flash_mla" not in sys.modules
        monkeypatch.setenv("OPENMLA_SGLANG", "flash_mla,latent")
        try:
            register()
            register()
            called = sys.modules["flash_mla"].flash_mla_with_kvcache
            assert called is flash_mla.flash_mla_with_kvcache
        finally:
            stand_in.remove()
    assert lines(caplog) == []


def test_flash_mla_that_is_in_use_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_SGLANG", "flash_mla")
    there = ModuleType("flash_mla")
    monkeypatch.setitem(sys.modules, "flash_mla", there)
    with fake_sglang.installed():
        register()
        assert sys.modules["flash_mla"] is there
    [line] = lines(caplog)
    assert line.startswith("openmla: OPENMLA_SGLANG=flash_mla has no effect: ")


def test_another_plug_in_of_that_name_is_left_alone(caplog: pytest.LogCaptureFixture):
    with fake_sglang.installed() as sglang:
        sglang[BACKENDS]["ATTENTION_BACKENDS"]["openmla"] = "somebody else's"
        register()
        assert sglang[BACKENDS]["ATTENTION_BACKENDS"]["openmla"] == "somebody else's"
        assert sglang[CHOICES]["ATTENTION_BACKEND_CHOICES"] == ["triton"]
    [line] = lines(caplog)
    assert line.startswith("openmla: no backend openmla: another plug-in has registered that name")


@pytest.mark.parametrize(
    "missing",
    [
        BACKENDS,
        f"{BACKENDS}:register_attention_backend",
        CHOICES,
        *(f"{CHOICES}:{n}" for n in LISTS),
    ]
    + [f"{CHOICES}:{adder}" for adder in LISTS.values()],
)
def test_an_older_sglang_costs_one_line_and_is_left_as_it_was(
    missing: str, caplog: pytest.LogCaptureFixture
):
    with fake_sglang.installed(without=(missing,)) as sglang:
        register()
        lists = sglang.get(CHOICES, {})
        assert all(lists.get(name, ["triton"]) == ["triton"] for name in LISTS)
        backends = sglang.get(BACKENDS, {}).get("ATTENTION_BACKENDS", {})
        assert "openmla" not in backends
    [line] = lines(caplog)
    assert line.startswith("openmla: no backend openmla: ")
    assert line.endswith("SGLang 0.5.23 has it")


@pytest.mark.parametrize("wish", REPLACED)
def test_functions_are_replaced_when_asked_for(
    wish: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_SGLANG", f"latent, {wish}")
    with fake_sglang.installed() as sglang:
        register()
        hooks, replace = sglang[HOOKS]["HookRegistry"].hooks, sglang[HOOKS]["HookType"].REPLACE
        wanted = {t: [(replace, getattr(selection, f))] for t, f in REPLACED[wish].items()}
        assert hooks == wanted
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("wish", "missing", "reason"),
    [
        ("yes", (), "expected latent, flash_mla, scores, attention"),
        ("scores", (HOOKS,), "ModuleNotFoundError: "),
        ("attention", (f"{HOOKS}:HookType",), "AttributeError: "),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    wish: str,
    missing: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("OPENMLA_SGLANG", wish)
    with fake_sglang.installed(without=missing):
        register()
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_SGLANG={wish} has no effect: {reason}")


class Broken(ModuleType):
    """A module whose import ends midway, so that asking for a name raises."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.__error = error

    def __getattr__(self, name: str) -> Any:
        raise self.__error


@pytest.mark.parametrize(
    "error",
    [RuntimeError("two\nlines"), OSError("libcuda.so"), ImportError(""), SyntaxError("invalid")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("module", [BACKENDS, CHOICES, HOOKS])
def test_whatever_a_module_raises_is_one_line(
    module: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("OPENMLA_SGLANG", "scores")
    with fake_sglang.installed():
        monkeypatch.setitem(sys.modules, module, Broken(module, error))
        register()
    [line] = lines(caplog)
    assert f": {type(error).__name__}: " in line


def test_the_form_of_a_batch_is_tritons_unless_told(monkeypatch: pytest.MonkeyPatch):
    with fake_sglang.installed():
        assert registration.form_of(None, None) is fake_sglang.Method.MHA
        monkeypatch.setenv("OPENMLA_SGLANG", "latent")
        assert registration.form_of(None, None) is fake_sglang.Method.MLA


def test_without_sglang_registering_is_one_line_and_no_error(caplog: pytest.LogCaptureFixture):
    with fake_sglang.installed(without=tuple(fake_sglang.modules())):
        register()
    assert len(lines(caplog)) == 1


def test_sglang_finds_the_plug_in():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is register


def test_only_the_backend_imports_sglang():
    found = {m for m in modules() for name, _ in imports(m) if name.split(".")[0] == "sglang"}
    assert found == {LOADED}
    assert not [m for m in modules() for name, _ in imports(m) if name == f"openmla.{LOADED}"]


def test_importing_the_plug_in_does_not_import_sglang():
    program = "import sys; sys.modules['sglang'] = None; import openmla.integrations.sglang"
    subprocess.run([sys.executable, "-c", program], check=True)
