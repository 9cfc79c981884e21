"""Shared by all tests."""

import os

# pytest-xdist runs one worker per core; more threads than that only wait for each other. Libraries
# read these when they are imported, and processes that tests start inherit them.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

from distributed.ranks import Ranks  # noqa: E402

# So that its failures say what was compared.
pytest.register_assert_rewrite("kernels.judging", "gpu.on_device")

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
