"""What the plug-ins of engines share: whatever stands in the way of one is one line in a log.

An engine calls a plug-in in each of its processes, and what the plug-in raises would end it. An
engine's modules may raise anything on import, of any version, and so may its registries.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class Refused(Exception):
    """Why something cannot be registered."""


@contextmanager
def or_one_line(log: logging.Logger, what: str) -> Iterator[None]:
    """Do what is inside, or say in one line of the log why not: "openmla: what: why"."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        raise
    # A module may call sys.exit while it is imported, and an extension written in Rust may panic:
    # neither is an Exception.
    except BaseException as error:
        log.warning("openmla: %s: %s", what, reason(error))


def reason(error: BaseException) -> str:
    """One line, whatever the error says of itself.

    >>> reason(OSError("libcuda.so.1: cannot open\\nshared object file"))
    'OSError: libcuda.so.1: cannot open'
    >>> reason(Refused("another plug-in has that name"))
    'another plug-in has that name'
    """
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be printed"
    kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
    return ((kind + text).splitlines() or ["no reason given"])[0]


def attribute(module: str, name: str, written_for: str) -> Any:
    """A name of an engine's module; a refusal where this version of it has no such thing."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Refused(f"{reason(error)}; {written_for} has it") from error
