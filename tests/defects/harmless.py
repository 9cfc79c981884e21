"""Changes of kernels that cannot matter, and why not: survivors that nobody needs to look at again.

Each is anchored to a file, a function and the text of a statement, so that it does not move when
lines do. An example:

    Harmless(
        "kernels/hopper/dense/producer.py", "produce", "thread_barrier()", "pass",
        "The wait behind it orders the same accesses.",
    )
"""

from __future__ import annotations

from dataclasses import dataclass

from defects.drawing.source import Edit


@dataclass(frozen=True)
class Harmless:
    """One statement, what it becomes, and a sentence that says why nothing depends on that."""

    file: str
    """Below src/openmla."""
    function: str
    """Its dotted name; "(module)" outside of functions."""
    statement: str
    """In one line; of a statement with a body, what stands before the body."""
    becomes: str
    reason: str
    place: int = 1
    """Which of the function's statements with this text it is."""

    def covers(self, edit: Edit) -> bool:
        """Whether an edit is this change."""
        return (self.file, self.function, self.statement, self.becomes, self.place) == (
            edit.file, edit.function, edit.statement, edit.becomes, edit.place,
        )  # fmt: skip


HARMLESS: tuple[Harmless, ...] = ()


def reason(edit: Edit, known: tuple[Harmless, ...] = HARMLESS) -> str:
    """Why a change cannot matter; nothing where nobody has said so."""
    return next((each.reason for each in known if each.covers(edit)), "")
