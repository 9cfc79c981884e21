"""Copies of Blackwell's kernels: products between issue and wait, counted in the compiled code."""

from __future__ import annotations

from typing import Any

import pytest

from executed.cases import dense, sparse
from openmla.errors import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed.facts import facts

LONG: dict[str, Any] = {"heads": 1, "causal": False, "spare": 0}
# Products of a block of keys: as many are issued under a typical copy, or more.
BLOCKS: dict[str, tuple[Case, int]] = {
    "dense 128+64": (dense(256, 1024, **LONG), 20),
    # Two tiles of queries: a block is 20 products of each.
    "dense 128+64, pair": (dense(2048, 1024, **LONG), 40),
    "dense 128+0": (dense(256, 1024, d_rope=0, rope="none", **LONG), 16),
    "dense 192+64->256": (dense(128, 1024, d_nope=192, d_v=256, **LONG), 20),
    "dense 256+0->256": (dense(128, 1024, d_nope=256, d_rope=0, d_v=256, rope="none", **LONG), 20),
    # A slot of the ring has 4: the load warps set the pace here, where products take no time.
    "pair": (sparse("plain", heads=128, topk=2048, q_lens=(1,), k_lens=(2048,)), 4),
}


@pytest.mark.executed
@pytest.mark.parametrize("name", BLOCKS)
def test_copies_are_products_ahead(name: str) -> None:
    case, products = BLOCKS[name]
    try:
        (kernel,) = facts(case, "b200")
    except Unsupported as error:
        pytest.skip(error.reason)
    streams = [line for line in kernel.slack if len(line.products) > 4]
    assert len(streams) >= 2, kernel.slack
    assert all(line.typical >= products for line in streams), [str(line) for line in streams]
