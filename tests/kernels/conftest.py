"""Tests that plant a defect in a kernel judge the other tests, not the kernel: they have a mark."""

import pytest

PLANTING = ("test_defect_is_found", "test_an_offset_of_32_bits_is_found")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(item, "originalname", "") in PLANTING:
            item.add_marker(pytest.mark.seeded)
