"""Files of compile reports: kept, found again, and mended when they are damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openmla.lab.compiling import store

LABEL, OTHER, TRITON = "hopper dense for sm90", "hopper sparse for sm90", "3.6.0"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the labels, in an empty folder."""
    monkeypatch.setenv("OPENMLA_COMPILE_CACHE", str(tmp_path))
    return store.file_of(LABEL, TRITON)


def test_a_report_is_found_under_its_key_alone(path: Path) -> None:
    store.keep(LABEL, TRITON, "k1", {"shared": 3, "warnings": ()})
    assert store.stored(LABEL, TRITON, "k1") == {"shared": 3}
    assert store.stored(LABEL, TRITON, "k2") is None and store.stored(OTHER, TRITON, "k1") is None
    assert store.read(path.with_name("none.json")) == {}


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b'{"hopper dense for sm90": {"key": "k1", "sha',
        b"\x00\xff garbage",
        b"[1, 2]",
        b"3",
        b"null",
        b"[" * 200_000,
    ],
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(
    damage: bytes, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(damage)
    for _ in range(3):  # it is read for every job
        assert store.stored(LABEL, TRITON, "k1") is None
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and str(path) in warning.getMessage()
    store.keep(LABEL, TRITON, "k1", {"shared": 3})
    assert json.loads(path.read_text()) == {LABEL: {"key": "k1", "shared": 3}}
    assert store.stored(LABEL, TRITON, "k1") == {"shared": 3} and len(caplog.records) == 1


@pytest.mark.parametrize("damage", [3, None, "text", [1]])
def test_a_damaged_entry_counts_as_absent_and_the_others_stay(
    damage: object, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(json.dumps({LABEL: damage, OTHER: {"key": "k2", "shared": 5}}))
    assert store.stored(LABEL, TRITON, "k1") is None
    assert store.stored(OTHER, TRITON, "k2") == {"shared": 5}
    (warning,) = caplog.records
    assert str(path) in warning.getMessage() and LABEL in warning.getMessage()
    store.keep(LABEL, TRITON, "k1", {"shared": 3})
    assert set(json.loads(path.read_text())) == {LABEL, OTHER}
    assert store.stored(LABEL, TRITON, "k1") == {"shared": 3}


def test_pruning_mends_a_damaged_file(path: Path) -> None:
    path.write_text("{")
    assert store.prune([LABEL], TRITON) == []
    assert json.loads(path.read_text()) == {}
