"""A module that engines import as `flash_mla`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from openmla.compat import flash_mla, stand_in
from openmla.errors import Unsupported


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    stand_in.remove()


def test_engines_import_openmlas_calls() -> None:
    assert importlib.util.find_spec("flash_mla") is None
    package = stand_in.install()
    assert stand_in.install() is package is importlib.import_module("flash_mla")
    interface = importlib.import_module("flash_mla.flash_mla_interface")
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    assert flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache
    assert get_mla_metadata is flash_mla.get_mla_metadata
    assert interface.flash_mla_sparse_fwd is flash_mla.flash_mla_sparse_fwd
    assert package.flash_mla_interface is interface
    assert importlib.util.find_spec("flash_mla") is not None
    stand_in.remove()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_mla")
    stand_in.remove()  # again: nothing to do


def test_a_name_that_is_not_there() -> None:
    package = stand_in.install()
    assert not hasattr(package, "flash_attn_varlen_func")
    with pytest.raises(AttributeError, match="openmla stands in for flash_mla, and has no 'mega'"):
        _ = package.mega
    with pytest.raises(ImportError, match="mega"):
        from flash_mla import mega  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_mla.cuda")


def test_the_package_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", ModuleType("flash_mla"))
    with pytest.raises(Unsupported, match="flash_mla was imported before"):
        stand_in.install()
    stand_in.remove()
    assert "flash_mla" in sys.modules
