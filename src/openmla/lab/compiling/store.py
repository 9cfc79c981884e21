"""Where compile reports are kept: one JSON file per family and version of Triton, sorted by job.

    hopper-triton3.6.json   {"hopper dense 128+64→128 for sm90": {"key": "3f…", "shared": 221456, …

The family is the first word of a job's name. A report counts only for the key it was made under (a
hash of the kernel's source and constants, signature, target, options and Triton's version), so a
changed kernel is compiled again and replaces its entry. In this repository the golden files are in
tests/compiled, where a reviewer reads what a change did to registers and memory; tests only read
them. Everything else is kept in the user's cache.
"""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from openmla.errors import InvalidArgument
from openmla.records import parse_json, shown

log = logging.getLogger("openmla.lab.compiling.store")
Entries = dict[str, dict[str, Any]]


def golden() -> Path | None:
    """$OPENMLA_COMPILE_GOLDEN: reports that are read before the others, and never written."""
    chosen = os.environ.get("OPENMLA_COMPILE_GOLDEN")
    return Path(chosen) if chosen else None


def folder() -> Path:
    """$OPENMLA_COMPILE_CACHE, or the user's cache."""
    if chosen := os.environ.get("OPENMLA_COMPILE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "openmla" / "compile"


def file_of(label: str, triton: str) -> Path:
    """The file of a job.

    >>> file_of("hopper dense 128+64→128 for sm90", "3.6.0").name
    'hopper-triton3.6.json'
    """
    return folder() / _file_name(label, triton)


def golden_file_of(label: str, triton: str) -> Path | None:
    """The golden file of a job; None where there are no golden files."""
    where = golden()
    return None if where is None else where / _file_name(label, triton)


def _file_name(label: str, triton: str) -> str:
    family = label.split()[0]
    return f"{family}-triton{'.'.join(triton.split('.')[:2])}.json"


def stored(label: str, triton: str, key: str) -> dict[str, Any] | None:
    """What is kept for a job under this key."""
    for path in (golden_file_of(label, triton), file_of(label, triton)):
        entry = read(path).get(label, {}) if path is not None else {}
        if entry.get("key") == key:
            return {name: value for name, value in entry.items() if name != "key"}
    return None


def keep(label: str, triton: str, key: str, values: Mapping[str, Any]) -> None:
    """Replace what is kept for a job; empty values are left out."""
    told = {
        name: value for name, value in sorted(values.items()) if value not in (None, "", [], ())
    }

    def replace(entries: Entries) -> Entries:
        return {**entries, label: {"key": key, **told}}

    _change(file_of(label, triton), replace)


def prune(labels: Collection[str], triton: str) -> list[str]:
    """Forget jobs that are not among these, in the files that these are in; which they were."""
    gone: list[str] = []

    def without(entries: Entries) -> Entries:
        gone.extend(label for label in entries if label not in labels)
        return {label: entry for label, entry in entries.items() if label in labels}

    for path in sorted({file_of(label, triton) for label in labels}):
        _change(path, without)
    return gone


def read(path: Path) -> Entries:
    """All entries of a file; none if there is no such file.

    A file may be damaged, as by a full disk. What cannot be read counts as absent, with a warning,
    and the next report that is kept replaces it.
    """
    try:
        found = parse_json("compile reports", path.read_bytes())
    except FileNotFoundError:
        return {}
    except InvalidArgument as error:
        _warn(path, str(error))
        return {}
    if not isinstance(found, dict):
        _warn(path, f"expected an object, got {shown(found)}")
        return {}
    entries = {label: entry for label, entry in found.items() if isinstance(entry, dict)}
    if damaged := [label for label in found if label not in entries]:
        _warn(path, f"expected objects for {shown(damaged)}")
    return entries


@lru_cache(maxsize=64)
def _warn(path: Path, reason: str) -> None:
    """Say once what is wrong with a file, which is read for every job."""
    log.warning("%s is damaged and counts as absent: %s", path, reason)


def _change(path: Path, change: Callable[[Entries], Entries]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path):
        entries = change(read(path))
        lines = [
            f"{json.dumps(label, ensure_ascii=False)}: {json.dumps(entries[label])}"
            for label in sorted(entries)
        ]
        fresh = path.with_suffix(".new")
        fresh.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        fresh.replace(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process changes the file meanwhile."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
