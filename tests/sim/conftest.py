"""The marker of the tests that `make compile` runs with the second Triton."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "compile: compiles kernels without a GPU")
