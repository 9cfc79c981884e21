"""Gradients over several ranks, against those of one process: right, and in one order."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from distributed import on_ranks
from distributed.on_ranks import Batch
from distributed.ranks import Ranks
from formula import same_bits
from openmla import Unsupported
from openmla.distributed import (
    gather_latent,
    prefill,
    prefill_latent,
    prefill_sparse,
    send_latent,
    split,
)

BATCH = Batch(lengths=(70, 0, 3, 1, 41), dtype=torch.float32, latent=32, rope=64)
CLOSE = 2e-5
"""Share of the largest element, in float32: 600 terms in another order."""
OWN, SHARED = ("q", "latent", "rope"), ("weight", "sink")
CASES: dict[str, tuple[Batch, Any, dict[str, Any]]] = {
    "zigzag": (BATCH, "zigzag", {}),
    "contiguous": (BATCH, "contiguous", {"sink": True}),
    "wave by wave": (BATCH, "zigzag", {"overlap": True}),
    "sent before": (BATCH, "zigzag", {"early": True}),
    "one sequence": (Batch((50,), dtype=torch.float32, latent=32), "zigzag", {}),
    "a rank without tokens": (Batch((2,), dtype=torch.float32, latent=32), "zigzag", {}),
    "queries alone": (BATCH, "zigzag", {"frozen": ("latent", "rope", "weight")}),
    "rows frozen": (BATCH, "zigzag", {"frozen": ("latent", "rope")}),
}


def whole(found: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Gradients of all ranks' rows where their tokens are; what ranks share, summed."""
    order = torch.cat([rows for rows, _ in found]).argsort()
    joined = {}
    for name in found[0][1]:
        parts = [gradients[name] for _, gradients in found]
        joined[name] = torch.cat(parts)[order] if name in OWN else torch.stack(parts).sum(0)
    return joined


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    batch, layout, how = CASES[name]
    expected = on_ranks.differentiated(0, 1, batch, layout, how)[1]
    got = whole(ranks.run(on_ranks.differentiated, batch, layout, how))
    assert got.keys() == expected.keys() and set(got) <= {*OWN, *SHARED}
    for part, want in expected.items():
        assert bool(want.any()), part
        assert (got[part] - want).abs().max() <= CLOSE * want.abs().max(), part


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_on_two_and_four_ranks_in_bf16(ranks: Ranks) -> None:
    """Parts of a row's gradient are rounded on the rank that computes them, and summed in fp32."""
    batch = Batch(lengths=(70, 9), latent=32)
    expected = on_ranks.differentiated(0, 1, batch, "zigzag", {})[1]
    found = ranks.run(on_ranks.differentiated, batch, "zigzag", {})
    for name, got in whole(found).items():
        want = expected[name].float()
        assert (got.float() - want).norm() <= 1e-2 * want.norm(), name


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_they_have_the_same_bits_every_time(ranks: Ranks) -> None:
    batch = Batch(lengths=(70, 9), latent=32)
    first = ranks.run(on_ranks.differentiated, batch, "zigzag", {})
    for _ in range(2):
        again = ranks.run(on_ranks.differentiated, batch, "zigzag", {})
        for (_, a), (_, b) in zip(first, again, strict=True):
            assert all(same_bits(a[name], b[name]) for name in a)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_rows_that_are_gathered_by_themselves(ranks: Ranks) -> None:
    for rows, got in ranks.run(on_ranks.gathered_gradients):
        assert got.tolist() == [[6.0 * t] * 2 for t in rows.tolist()]


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_ranks_that_disagree_are_told(ranks: Ranks) -> None:
    said = ranks.run(on_ranks.lone_gradients)
    assert all("gradients: expected the same on every rank" in text for text in said)


def test_what_has_no_gradients_is_refused() -> None:
    shard = split((5,), 1, 0)
    latent = torch.zeros(5, 512, dtype=torch.bfloat16, requires_grad=True)
    rope = torch.zeros(5, 64, dtype=torch.bfloat16)
    q = torch.zeros(5, 2, 576, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match=r"^latent requires"):
        prefill_latent(q, latent, rope, shard, scale=0.1)
    with pytest.raises(Unsupported, match=r"^local requires"):
        gather_latent(latent, shard, async_op=True)
    rows = send_latent(latent, rope, shard).rows()
    assert rows.requires_grad
    (rows**2).sum().backward()
    with torch.no_grad():
        prefill_latent(q, latent, rope, shard, scale=0.1)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_batch_that_inference_saw_first_can_be_trained_on(
    layout: Literal["zigzag", "contiguous"],
) -> None:
    """What is kept of a batch's lengths is for every later call."""
    shard = split([4, 7, 2], 1, 0, layout)
    given = [torch.randn(shard.tokens, 2, 24), torch.randn(shard.tokens, 32)]

    def attend() -> Tensor:
        q, latent = given

        def expand(rows: Tensor) -> tuple[Tensor, Tensor]:
            return rows.view(-1, 2, 16), rows.view(-1, 2, 16)

        return prefill(q, latent, torch.ones(len(q), 8, dtype=q.dtype), expand, shard)

    with torch.inference_mode():
        served = attend()
    given = [x.requires_grad_() for x in given]
    trained = attend()
    trained.sum().backward()
    assert same_bits(trained, served) and all(x.grad is not None for x in given)


@pytest.mark.parametrize("wants", ["q", "latent"])
def test_gradients_of_selected_rows_over_ranks_are_refused(wants: str) -> None:
    given = {"q": torch.randn(4, 2, 576), "latent": torch.randn(4, 512)}
    given[wants].requires_grad_()
    lists = torch.zeros(4, 1, dtype=torch.int32)
    with pytest.raises(Unsupported, match=wants):
        prefill_sparse(*given.values(), torch.randn(4, 64), lists, split([4], 1, 0), scale=1.0)
