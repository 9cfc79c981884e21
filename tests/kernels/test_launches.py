"""What calls of every kind launch is what launches.json says, at sizes that nobody simulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.launches import FILE, LAUNCHED, TARGETS, differences, kept, lines, version
from openmla.kernels.hopper.dense import launch as dense
from openmla.kernels.hopper.latent import launch as latent

SAME_TRITON = kept()["Triton"] == version()
ADVICE = f"read what changed, and run `python tests/kernels/{FILE.stem}.py --write` if it is meant"


@pytest.mark.skipif(not SAME_TRITON, reason="layouts are written as another Triton has them")
@pytest.mark.parametrize("target", TARGETS)
def test_launches_are_those_that_are_kept(target: str) -> None:
    before = {name: line for name, line in kept().items() if name.startswith(f"{target} ")}
    now = {name: line for name, line, _ in lines(f"{target} ")}
    assert len(now) > 100
    changed = differences(before, now)
    assert not changed, "\n".join([f"{len(changed)} lines, {ADVICE}", *changed[:20]])


def test_every_family_and_kind_of_call_is_there() -> None:
    text = list(kept().values())
    families = {line.split(":")[0] for line in text[1:]}
    assert families == set(LAUNCHED)
    for kernel in (
        "merge_kernel",
        "place_kernel",
        "upcast_kernel",
        "weights_kernel",
        "one_block_kernel",
        "statistics_kernel",
        "row_sum_kernel",
        "select_kernel",
    ):
        assert any(kernel in line for line in text), kernel


def line_of(name: str) -> str:
    """The present line of one call."""
    [line] = [line for found, line, _ in lines(name) if found == name]
    return line


DENSE = "h200 dense 128+64 → 128, bf16, 128 heads, 100 tokens"
SPLIT = "h200 latent 512+64, bf16 pages, 16 heads, tables of 32768 keys, 16 heads, 1 tokens"


def exchanged(name: str, x: torch.Tensor | None, unit: int = 1) -> dict[str, int]:
    """Strides of heads for those of tokens."""
    token, head = (0, 0) if x is None else x.stride()[:2]
    return {f"{name}_stride_t": head // unit, f"{name}_stride_h": token // unit}


@pytest.mark.parametrize(
    ("name", "place", "field", "changed"),
    [
        (DENSE, dense, "strides", exchanged),
        (SPLIT, latent, "range_programs", lambda *args: 131),
    ],
    ids=["strides", "programs"],
)
def test_a_change_is_seen(
    name: str, place: Any, field: str, changed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = line_of(name)
    monkeypatch.setattr(place, field, changed)
    assert line_of(name) != before


def test_a_workspace_one_row_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before, wanted = line_of(SPLIT), latent.partial_results

    def shorter(*arguments: Any) -> dict[str, Any]:
        found = wanted(*arguments)
        return found | {"part_sums_ptr": found["part_sums_ptr"][:-514].clone()}

    monkeypatch.setattr(latent, "partial_results", shorter)
    assert line_of(SPLIT) != before
