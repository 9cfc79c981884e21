"""Changes of source code that do not depend on its layout."""

from __future__ import annotations

import pytest

from kernels.patch import NotThere, once

SOURCE = """\
def load(ring, phase):
    wait(
        ring.index(0),  # the first
        phase,
    )
    use(ring)


def store(ring, phase):
    wait(ring.index(0), phase)
"""


def test_layout_and_comments_do_not_count() -> None:
    changed = once("wait(ring.index(0), phase)\n    use(ring)", "use(ring)")(SOURCE)
    assert changed.startswith("def load(ring, phase):\n    use(ring)\n")


def test_strings_are_words() -> None:
    assert once("f('a  b')", "f()")("g(f('a  b'))") == "g(f())"
    with pytest.raises(NotThere):
        once("f('a b')", "f()")("g(f('a  b'))")


@pytest.mark.parametrize("code", ["wait(ring.index(0), phase)", "wait(ring.index(1), phase)"])
def test_code_that_is_there_twice_or_not_at_all_is_an_error(code: str) -> None:
    with pytest.raises(NotThere, match="places: wait"):
        once(code, "pass")(SOURCE)


def test_the_first_after_a_text_changes() -> None:
    changed = once("wait(ring.index(0), phase)", "pass", after="def store")(SOURCE)
    assert changed.endswith("def store(ring, phase):\n    pass\n")
    with pytest.raises(NotThere, match="not in the source: def gather"):
        once("use(ring)", "pass", after="def gather")(SOURCE)
