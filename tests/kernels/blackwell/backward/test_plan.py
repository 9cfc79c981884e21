"""Plans of Blackwell's backward passes: where tensor memory goes, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from openmla.backward.problem import BackwardProblem
from openmla.kernels.blackwell.backward.plan import BlackwellBackwardConfig, KeyPass, QueryPass
from openmla.kernels.hopper.backward.plan import HopperBackwardConfig
from openmla.planning import plan
from openmla.problem import Problem

V3 = BlackwellBackwardConfig(heads=128, d_nope=128, d_rope=64, d_v=128)
PROBLEM = BackwardProblem.of(
    Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
)
WIDTHS = [(n, r, v) for n in (64, 128) for r in (0, 32, 64) for v in (64, 128)]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("kind", [QueryPass, KeyPass])
def test_tiles_of_tensor_memory_lie_side_by_side_at_multiples_of_their_width(
    kind: type[QueryPass] | type[KeyPass], widths: tuple[int, int, int]
) -> None:
    d_nope, d_rope, d_v = widths
    found = kind(replace(V3, d_nope=d_nope, d_rope=d_rope, d_v=d_v))
    tiles = sorted(found.tile_columns.values(), key=lambda columns: columns.first)
    assert all(a.first + a.count == b.first for a, b in pairwise(tiles))
    assert all(tile.first % tile.count == 0 for tile in tiles)
    assert found.columns_used <= found.tmem_columns <= 512
    assert found.config.supported()


def test_the_key_pass_takes_all_of_tensor_memory() -> None:
    key_pass = KeyPass(V3)
    taken = {name: columns.count for name, columns in key_pass.tile_columns.items()}
    want = {"d_v": 128, "d_k nope": 128, "d_k rope": 64, "scores": 64, "products": 64}
    assert taken == {**want, "P": 32, "dS": 32}
    assert key_pass.columns_used == key_pass.tmem_columns == 512
    assert QueryPass(V3).columns_used == 352


def test_what_does_not_fit_is_refused_in_words() -> None:
    wide = replace(V3, BQ=128, query_stages=1)
    assert wide.why_unsupported() == "key pass: 704 columns of tensor memory, 192 too many"
    assert wide.explain()[-1].startswith("not supported: key pass: 704")
    assert "query pass: 247" in replace(V3, key_stages=4).why_unsupported()
    assert "key pass: 24" in replace(V3, query_stages=4).why_unsupported()


def test_the_workspace_is_hoppers() -> None:
    hopper = HopperBackwardConfig(heads=128, d_nope=128, d_rope=64, d_v=128)
    assert V3.workspace(PROBLEM) == hopper.workspace(PROBLEM) == 138_674_176


@pytest.mark.parametrize("chip", ["b200", "b300"])
def test_gradients_of_a_b200_and_a_b300_are_blackwells(chip: str) -> None:
    chosen = plan(PROBLEM, chip)
    assert (chosen.backend, chosen.kernel_name) == ("blackwell", "backward")
    assert "simulated" in chosen.explain() and "512 columns" in chosen.explain()


@pytest.mark.parametrize(
    "changed",
    [
        {"has_key_mask": True},
        {"has_sink": True, "has_d_lse": True},
        {"d_nope": 192, "d_v": 256},
        {"window": 64},
    ],
    ids=str,
)
def test_what_is_not_declared_is_portable(changed: dict[str, int]) -> None:
    assert plan(replace(PROBLEM, **changed), "b200").backend == "portable"
