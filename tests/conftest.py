"""Shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distributed.ranks import Ranks

# So that its failures say what was compared.
pytest.register_assert_rewrite("kernels.judging", "gpu.on_device")

# pytest-xdist runs one worker per core; more threads than that only wait for each other.
torch.set_num_threads(1)

# Compile reports travel with the repository, with a hash of the source: an unchanged kernel costs
# nothing. A changed one is compiled here, and fails until `make compile-all` wrote its report.
os.environ["OPENMLA_COMPILE_GOLDEN"] = str(Path(__file__).parent / "compiled")
os.environ["OPENMLA_COMPILE_CACHE"] = str(Path(__file__).parent.parent / "build" / "compiled")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws does not depend on which tests ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=[2, 3, 4], ids="world{}".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Groups of 2, 3 and 4 ranks, started once for all tests of a process.

    `@pytest.mark.parametrize("ranks", [4], indirect=True)` asks for one of them.
    """
    with Ranks(request.param) as group:
        yield group
