"""Shared by the tests that run portable kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernels.portable.interpreting import Interpreting


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Interpreting]:
    """Runs parts of the scripts beside this file."""
    with Interpreting() as process:
        yield process
