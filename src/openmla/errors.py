"""The errors openmla raises. A leaf module: it imports nothing from openmla.

Every one but PeerLost is raised before any work is launched. A message says what is wrong in the
caller's own words: the argument, what was expected, what came.

Errors cross processes: each can be pickled and copied, with its attributes and its message. They
also cross torch.compile: Dynamo cannot trace `super().__init__`, so constructors set `args`
instead, and with fullgraph=True Dynamo's own error quotes the arguments of the constructor, those
of them that are not keywords.

>>> str(InvalidArgument("q", "3 dimensions [total_q, heads, d_qk]", "shape (4, 192)"))
'q: expected 3 dimensions [total_q, heads, d_qk], got shape (4, 192)'
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

IN_A_CLONE = {"sim": "./gluon-sim"}
"""What pip is given in a clone for an extra that is a package of the same repository."""
PLAIN = (str, int, float, bool, type(None))


def with_hint(name: str, known: Iterable[str]) -> str:
    """A name that is not known, quoted, and the known ones that it may have meant.

    >>> with_hint("deepsek-v3", ["deepseek-v3", "kimi-k2"])
    "'deepsek-v3'; did you mean deepseek-v3?"
    >>> with_hint("kimi", ["deepseek-v3", "kimi-k2", "kimi-k3"])
    "'kimi'; did you mean kimi-k2 or kimi-k3?"
    >>> with_hint("gpt-2", ["deepseek-v3"])
    "'gpt-2'"
    """
    plain = {_plain(one): one for one in known}
    asked = _plain(name)
    near = [one for one in plain if asked and (asked in one or one in asked)]
    near += [one for one in difflib.get_close_matches(asked, plain, 3, 0.6) if one not in near]
    meant = " or ".join(plain[one] for one in near[:3])
    return f"{name!r}; did you mean {meant}?" if meant else repr(name)


def _plain(name: str) -> str:
    """A name without what people spell differently."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


class OpenMLAError(Exception):
    """Base of all errors that openmla raises on purpose."""

    def __reduce__(self) -> tuple[Callable[..., OpenMLAError], tuple[Any, ...]]:
        """An exception is otherwise made again from its message, which is no constructor's."""
        return _made_again, (type(self), self.args, vars(self).copy())


def _made_again(
    kind: type[OpenMLAError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> OpenMLAError:
    """What `__reduce__` took apart."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class InvalidArgument(OpenMLAError, ValueError):
    """An argument is wrong: no backend could ever accept it."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        self.args = (f"{name}: expected {expected}, got {got}",)
        self.name = name
        self.expected = expected
        # Whatever else came is kept as text: it may be large, and need not be picklable.
        self.got = got if type(got) in PLAIN else str(got)


class Unsupported(OpenMLAError, NotImplementedError):
    """The arguments are legal, but no kernel serves them where they were asked to run."""

    def __init__(self, reason: str, nearest: str = "") -> None:
        self.args = (f"{reason}; nearest supported form: {nearest}" if nearest else reason,)
        self.reason = reason
        self.nearest = nearest


class PeerLost(OpenMLAError, RuntimeError):
    """Another rank of a process group has ended, or did not call within the group's timeout."""

    def __init__(self, call: str, rank: int, world: int, reason: str) -> None:
        self.args = (
            f"{call} on rank {rank} of {world}: another rank has ended, or did not make this call "
            f"within the group's timeout ({reason})",
        )
        self.call = call
        self.rank = rank
        self.world = world
        self.reason = reason


class MissingExtra(OpenMLAError, ImportError):
    """A part of openmla needs a package that is not installed, or not in a version that will do."""

    def __init__(self, part: str, needed: str, extra: str, reason: str = "") -> None:
        why = f" ({reason})" if reason else ""
        here = IN_A_CLONE.get(extra, f"'.[{extra}]'")
        command = f"pip install 'openmla[{extra}]', or in a clone: pip install {here}"
        self.args = (f"{part} needs {needed}{why}: {command}",)
        self.part = part
        self.needed = needed
        self.extra = extra
        self.reason = reason
