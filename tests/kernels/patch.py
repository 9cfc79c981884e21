"""A change of source code that is anchored to code, not to its layout.

A seeded defect says which code becomes which. Both are compared word by word: line breaks, spaces,
comments and the comma before a closing bracket do not count, so a formatter cannot blind a defect.
Code that is no longer there, or there more than once, is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

WORD = re.compile(
    r"""(?P<space>\s+|\#[^\n]*|\\\n)
    |(?:\b[rRbBfF]{1,2})?(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    |[^\W\d]\w*|\d[\w.]*
    |\*\*=?|//=?|<<=?|>>=?|->|:=|[-+*/%&|^@=!<>]=|\.\.\.|.
    """,
    re.VERBOSE | re.DOTALL,
)
CLOSING = frozenset(")]}")


@dataclass(frozen=True)
class Word:
    """One word of source code, and where it stands in the text."""

    text: str
    start: int
    stop: int


class NotThere(LookupError):
    """The code that a defect changes is not in the source, or is there more than once."""


def words(source: str) -> list[Word]:
    """The words of source code, whole or in part, without what only lays it out.

    >>> [word.text for word in words("f(a,  # why" + chr(10) + "  b,)")]
    ['f', '(', 'a', ',', 'b', ')']
    """
    found: list[Word] = []
    for match in WORD.finditer(source):
        if match["space"] is not None:
            continue
        if match[0] in CLOSING and found and found[-1].text == ",":
            found.pop()
        found.append(Word(match[0], *match.span()))
    return found


def places(source: str, code: str) -> list[tuple[int, int]]:
    """Where `code` stands in `source`: the first character of each place, and the one after it.

    Code that is nowhere may be part of a string, as assembly is: there every character counts.

    >>> places("if x:" + chr(10) + "    wait( a )", "wait(a)")
    [(10, 19)]
    """
    return _as_words(source, code) or [
        match.span() for match in re.finditer(re.escape(code), source)
    ]


def _as_words(source: str, code: str) -> list[tuple[int, int]]:
    of_source, of_code = words(source), [word.text for word in words(code)]
    texts, count = [word.text for word in of_source], len(of_code)
    return [
        (of_source[at].start, of_source[at + count - 1].stop)
        for at in range(len(texts) - count + 1)
        if texts[at : at + count] == of_code
    ]


def once(old: str, new: str, after: str = "") -> Callable[[str], str]:
    """The change of `old` into `new`.

    Without `after`, `old` must be in the source exactly once. With it, the first `old` changes that
    follows this text, which is taken as it stands: `def producer` or the words of a comment.
    """

    def edit(source: str) -> str:
        found = places(source, old)
        if after:
            if after not in source:
                raise NotThere(f"not in the source: {after}")
            found = [place for place in found if place[0] >= source.index(after)][:1]
        if len(found) != 1:
            raise NotThere(f"{len(found)} places: {old}")
        [(start, stop)] = found
        return source[:start] + new.strip() + source[stop:]

    return edit
