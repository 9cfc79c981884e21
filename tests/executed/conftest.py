"""Tests marked `executed` take minutes: they run when asked for by name, with -m executed."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "executed" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="runs with -m executed")
    for item in items:
        if item.get_closest_marker("executed") is not None:
            item.add_marker(skip)
