"""The errors openmla raises. A leaf module: it imports nothing from openmla.

Every one but PeerLost is raised before any work is launched. A message says what is wrong in the
caller's own words: the argument, what was expected, what came.

>>> str(InvalidArgument("q", "3 dimensions [total_q, heads, d_qk]", "shape (4, 192)"))
'q: expected 3 dimensions [total_q, heads, d_qk], got shape (4, 192)'
"""


class OpenMLAError(Exception):
    """Base of all errors that openmla raises on purpose."""


class InvalidArgument(OpenMLAError, ValueError):
    """An argument is wrong: no backend could ever accept it."""

    def __init__(self, name: str, expected: str, got: object) -> None:
        super().__init__(f"{name}: expected {expected}, got {got}")
        self.name = name
        self.expected = expected
        self.got = got


class Unsupported(OpenMLAError, NotImplementedError):
    """The arguments are legal, but no kernel serves them where they were asked to run."""

    def __init__(self, reason: str, nearest: str = "") -> None:
        super().__init__(f"{reason}; nearest supported form: {nearest}" if nearest else reason)
        self.reason = reason
        self.nearest = nearest


class PeerLost(OpenMLAError, RuntimeError):
    """Another rank of a process group has ended, or did not call within the group's timeout."""

    def __init__(self, call: str, rank: int, world: int, reason: str) -> None:
        super().__init__(
            f"{call} on rank {rank} of {world}: another rank has ended, or did not make this call "
            f"within the group's timeout ({reason})"
        )
        self.call = call
        self.rank = rank
        self.world = world
        self.reason = reason
