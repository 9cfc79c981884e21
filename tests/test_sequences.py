"""Ragged and paged arithmetic, against brute force."""

from __future__ import annotations

import pytest
import torch

from openmla.sequences import SequenceSpan, page_rows, paged_spans, ragged_spans, visible_keys


def test_ragged_spans_walk_queries_and_keys():
    q = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    k = torch.tensor([0, 4, 7, 7], dtype=torch.int32)
    assert list(ragged_spans(q, k)) == [
        SequenceSpan(0, 0, 2, 0, 4),
        SequenceSpan(1, 2, 0, 4, 3),
        SequenceSpan(2, 2, 3, 7, 0),
    ]


def test_paged_spans_take_key_counts_from_the_cache():
    q = torch.tensor([0, 1, 4], dtype=torch.int32)
    lengths = torch.tensor([9, 3], dtype=torch.int32)
    assert list(paged_spans(q, lengths)) == [
        SequenceSpan(0, 0, 1, 0, 9),
        SequenceSpan(1, 1, 3, 0, 3),
    ]


def test_a_batch_of_none_has_no_spans():
    nothing = torch.tensor([0], dtype=torch.int32)
    assert list(ragged_spans(nothing, nothing)) == []
    assert list(paged_spans(nothing, torch.empty(0, dtype=torch.int32))) == []


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_visible_keys_counts_what_the_mask_shows(causal: bool):
    for q_len in range(5):
        for k_len in range(6):
            for query in range(q_len):
                position = k_len - q_len + query
                shown = sum(1 for key in range(k_len) if not causal or key <= position)
                assert visible_keys(query, q_len, k_len, causal) == shown


def test_the_last_query_sees_every_key_and_a_longer_q_starts_blind():
    assert [visible_keys(i, q_len=2, k_len=5) for i in range(2)] == [4, 5]
    assert [visible_keys(i, q_len=3, k_len=1) for i in range(3)] == [0, 0, 1]


@pytest.mark.parametrize("page_size", [1, 3, 4, 64], ids="page={}".format)
def test_page_rows_follow_the_table(page_size: int):
    pages = torch.tensor([7, 2, 9], dtype=torch.int32)
    rows = page_rows(pages, page_size, 1, 3 * page_size)
    expected = [
        int(pages[key // page_size]) * page_size + key % page_size
        for key in range(1, 3 * page_size)
    ]
    assert rows.tolist() == expected
    assert rows.dtype == torch.int64


def test_page_rows_do_not_wrap_at_two_to_the_31():
    pages = torch.tensor([2**31 - 1], dtype=torch.int32)
    assert page_rows(pages, 64, 63, 64).tolist() == [(2**31 - 1) * 64 + 63]


def test_page_rows_of_no_keys_read_no_table():
    assert page_rows(torch.empty(0, dtype=torch.int32), 4, 0, 0).tolist() == []
