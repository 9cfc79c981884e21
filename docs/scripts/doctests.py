"""For the API reference: examples in docstrings are shown as code. A Griffe extension."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:(?!\n|>>> ).*\n?)*)+", re.MULTILINE)


def fenced(docstring: str) -> str:
    """The text with its examples in fences."""
    return EXAMPLE.sub(lambda m: f"```pycon\n{m[0].rstrip()}\n```", docstring)


class Fenced(griffe.Extension):
    """Does so for everything that has a docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that Griffe reads."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
