"""`Batch`: positions, physical rows and their refusals, by hand-worked examples."""

from __future__ import annotations

import pytest
import torch

from openmla.errors import InvalidArgument
from openmla.nn import Batch
from openmla.nn.indexer import own_pages
from openmla.nn.mla import fresh_pages

TABLE = torch.tensor([[5, 2], [7, 0]], dtype=torch.int32)


def test_new_tokens_follow_their_contexts():
    batch = Batch.of([3, 0, 2], [4, 9, 0])
    assert batch.tokens == 5
    assert batch.keys == (7, 9, 2)
    assert batch.positions.tolist() == [4, 5, 6, 0, 1]
    assert batch.sequences.tolist() == [0, 0, 0, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 3, 5]
    assert batch.cache_lengths.tolist() == [7, 9, 2]


def test_slots_go_through_the_pages():
    """Pages of 4: place 3 is the last row of the first page, place 4 the first of the second."""
    batch = Batch.of([2, 1], [3, 0], TABLE)
    assert batch.slots(4).tolist() == [5 * 4 + 3, 2 * 4 + 0, 7 * 4]


def test_a_piece_of_the_contexts():
    batch = Batch.of([1, 1], [6, 3], TABLE)
    rows, cu = batch.context_rows(2, 5, 4)
    assert rows.tolist() == [22, 23, 8, 30]
    assert cu.tolist() == [0, 3, 4]
    rows, cu = batch.context_rows(5, 9, 4)
    assert (rows.tolist(), cu.tolist()) == ([9], [0, 1, 1])


def test_selected_rows_name_no_key_outside_the_sequence():
    batch = Batch.of([1, 1], [4, 1], TABLE)
    indices = torch.tensor([[4, -1, 5], [1, 2, 0]])
    assert batch.selected_rows(indices, 4).tolist() == [[8, -1, -1], [29, -1, 28]]
    fresh = Batch.of([2, 2])
    indices = torch.tensor([[0], [1], [0], [2]])
    assert fresh.selected_rows(indices, None).flatten().tolist() == [0, 1, 2, -1]


def test_selected_rows_name_no_key_after_the_query():
    """Places 2 and 3 are new: the first of their queries does not see the second one's key."""
    batch = Batch.of([2], [2], TABLE[:1])
    indices = torch.tensor([[3, 0], [3, 0]])
    assert batch.selected_rows(indices, 4).tolist() == [[-1, 20], [23, 20]]


@pytest.mark.parametrize("method", ["slots", "key_rows", "selected_rows"])
def test_a_table_without_pages_for_all_keys_is_refused(method: str):
    batch = Batch.of([2], [7], TABLE[:1])
    more = {"key_rows": (0, 9), "selected_rows": (torch.zeros(2, 1).int(),)}.get(method, ())
    with pytest.raises(InvalidArgument, match=r"pages for 9 keys, of 4 rows each, got 2 pages"):
        getattr(batch, method)(*more, 4)


def test_an_empty_batch():
    batch = Batch.of([])
    assert batch.positions.tolist() == [] and batch.cu_seqlens.tolist() == [0]


def test_wrong_lengths_are_named():
    with pytest.raises(InvalidArgument, match="context: expected 2 lengths"):
        Batch.of([1, 2], [0])
    with pytest.raises(InvalidArgument, match=r"new: expected ints of at least 0, got \[-1\]"):
        Batch.of([-1])
    with pytest.raises(InvalidArgument, match=r"block_table: expected .* \[1, max_pages\]"):
        Batch.of([1], block_table=TABLE)
    with pytest.raises(InvalidArgument, match="block_table: expected a tensor"):
        Batch.of([1], block_table=[[0]])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="block_table: expected the pages"):
        Batch.of([1]).slots(4)


def test_a_batch_like_an_earlier_one_makes_nothing_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU would wait for a copy in every call, and a captured graph may not."""

    def of_fresh_sequences() -> list[torch.Tensor]:
        cache, batch = own_pages(Batch.of([70, 3]))
        _, paged = fresh_pages(torch.ones(73, 8), torch.ones(73, 4), Batch.of([70, 3]))
        rows, cu = batch.key_rows(2, 66, cache.page_size)
        return [batch.cu_seqlens, batch.cache_lengths, batch.positions, rows, cu, paged.slots(64)]

    with torch.inference_mode():
        first = of_fresh_sequences()
    monkeypatch.setattr(torch, "tensor", None)
    again = of_fresh_sequences()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(x.is_inference() for x in again)


def test_a_batch_serves_inside_a_graph_of_torch_compile() -> None:
    """Its properties are made there, under no lock."""

    def places(batch: Batch) -> torch.Tensor:
        return batch.positions + batch.cache_lengths[batch.sequences]

    torch._dynamo.reset()
    compiled = torch.compile(places, fullgraph=True, backend="eager")
    assert torch.equal(compiled(Batch.of([3, 2], [0, 4])), places(Batch.of([3, 2], [0, 4])))
