"""Groups of 2, 3 and 4 ranks, started once for all tests of a process.

`@pytest.mark.parametrize("ranks", [4], indirect=True)` asks for one of them.
"""

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks


@pytest.fixture(scope="session", params=[2, 3, 4], ids="world{}".format)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as group:
        yield group
