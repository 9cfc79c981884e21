"""Masks: three kinds, and sequences made ragged without waiting."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from openmla.integrations.transformers.masks import Ragged, causal_mask, full_mask, selected
from unstable_sorts import unstable_sorts


def mask(queries: int, keys: int, offset: Any = 0, keep: Any = None, **more: Any) -> Any:
    given = None if keep is None else torch.tensor(keep).bool()
    lengths = {"batch_size": 2, "q_length": queries, "kv_length": keys, "q_offset": offset}
    return causal_mask(**lengths, attention_mask=given, **more)


def test_no_mask_where_every_key_is_used():
    assert mask(4, 4) is None
    assert mask(2, 6, offset=4) is None
    assert mask(4, 4, keep=[[1] * 4, [1] * 4]) is None


def test_a_static_cache_is_masked_even_without_padding():
    assert mask(4, 9, offset=torch.tensor(2)).tolist() == [[True] * 6] * 2
    assert mask(4, 9, keep=[[1] * 4, [1] * 4]).tolist() == [[True] * 4] * 2


@pytest.mark.parametrize("longer", [0, 3])
def test_the_last_columns_are_the_queries(longer: int):
    """Whatever lies behind them."""
    keep = [[0, 1, 1, 1] + [0] * longer, [1, 1, 1, 1] + [0] * longer]
    got = mask(2, 4 + longer, offset=2, keep=keep)
    assert got.tolist() == [[False, True, True, True], [True] * 4]


def test_a_token_that_the_mask_does_not_reach_is_padding():
    assert mask(4, 4, keep=[[1, 1], [1, 1]]).tolist() == [[True, True, False, False]] * 2


def test_anything_but_causal_is_spelled_out():
    window = mask(4, 4, mask_function=sliding_window_causal_mask_function(2))
    assert window[0, 0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]


def test_indexers_get_the_whole_mask():
    keep = [[0, 1, 1], [1, 1, 1]]
    got = mask(3, 3, keep=keep, config=SimpleNamespace(index_topk=2))
    assert got.shape == (2, 1, 3, 3)
    assert torch.equal(got, full_mask(torch.tensor(keep).bool(), 3, 3, "cpu"))


def test_full_mask_of_a_chunk_over_a_static_cache():
    got = full_mask(torch.tensor([[False, True, True, True]]), 2, 6, "cpu")
    assert got[0, 0].int().tolist() == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
    assert full_mask(None, 2, 3, "cpu")[0, 0].int().tolist() == [[1, 1, 0], [1, 1, 1]]


def test_ragged_moves_padding_to_the_end():
    """The worked example of its docstring."""
    keep = torch.tensor([[False, True, True], [True, True, True]])
    with unstable_sorts():
        ragged = Ragged.of(keep, 2, 3, 3, "cpu")
    rows = torch.arange(6).view(2, 3, 1)
    assert ragged.keys(rows).flatten().tolist() == [1, 2, 3, 4, 5, 0]
    assert ragged.cu_k.tolist() == [0, 2, 5]
    assert torch.equal(ragged.restored(ragged.queries(rows), 2), rows)


def test_layers_share_what_was_made_of_their_mask():
    keep = torch.tensor([[False, True, True], [True, True, True]])
    first = Ragged.of(keep, 2, 3, 3, "cpu")
    assert Ragged.of(keep, 2, 3, 3, "cpu") is first
    assert Ragged.of(keep, 2, 1, 3, "cpu").cu_q.tolist() == [0, 1, 2]  # other queries
    keep[1, 0] = False  # another mask
    assert Ragged.of(keep, 2, 3, 3, "cpu").cu_k.tolist() == [0, 2, 4]
    with torch.inference_mode():
        assert Ragged.of(keep.clone(), 2, 3, 3, "cpu").cu_k.tolist() == [0, 2, 4]


def test_ragged_queries_of_a_chunk():
    keep = torch.tensor([[False, True, True, False], [True, True, True, True]])
    ragged = Ragged.of(keep, 2, 2, 4, "cpu")
    assert (ragged.cu_q.tolist(), ragged.cu_k.tolist()) == ([0, 1, 3], [0, 2, 6])
    rows = torch.tensor([[2, 3], [2, 3]])
    assert ragged.queries(rows).tolist() == [2, 2, 3, 3]
    assert torch.equal(ragged.restored(ragged.queries(rows), 2), rows)


def test_selected_ignores_what_names_no_key():
    got = selected(torch.tensor([[[1, -1], [0, 2]]]), keys=3)
    assert got[0, 0].int().tolist() == [[0, 1, 0], [1, 0, 1]]
