"""Random calls of the indexer: the package passes, and each seeded defect is found."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla.lab.testing import indexer_fuzz
from openmla.lab.testing.indexer_fuzz import CALLS, check_index_call

SEEDS = 60


def test_examples() -> None:
    assert doctest.testmod(indexer_fuzz).failed == 0


def test_every_call_is_drawn_and_right() -> None:
    results = [check_index_call(seed) for seed in range(SEEDS)]
    assert {result.status for result in results} == {"right"}
    assert {result.call for result in results} == set(CALLS)


def test_a_family_without_an_indexer_is_refused_not_failed() -> None:
    statuses = {check_index_call(seed, backend="cdna4").status for seed in range(6)}
    assert statuses == {"refused"}


def larger_position_on_ties(
    real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any
) -> Any:
    width = scores.shape[1]
    flipped = {"starts": width - rest["ends"].clamp(0, width), "ends": width - rest["starts"]}
    flipped = {name: x.to(torch.int32) for name, x in flipped.items()}
    out, counts, mask = real(scores.flip(1), topk, **{**rest, **flipped})
    length = rest["ends"].clamp(0, width) - rest["starts"].clamp(0, width)
    back = torch.where(out >= 0, length[:, None] - 1 - out, 1 << 30).sort(1).values
    out.copy_(torch.where(back == 1 << 30, -1, back))
    return out, counts, mask


def nan_first(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    return real(scores.nan_to_num(nan=torch.inf), topk, **rest)


def last_chunk_dropped(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    kept = scores.clone()
    kept[:, scores.shape[1] // 64 * 64 :] = -torch.inf
    return real(kept, topk, **rest)


def window_one_longer(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    return real(scores, topk, **{**rest, "ends": rest["ends"] + 1})


def mask_word_shifted(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    out, counts, mask = real(scores, topk, **rest)
    return out, counts, mask.roll(1, 1)


def counts_of_topk(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    out, counts, mask = real(scores, topk, **rest)
    return out, torch.full_like(counts, topk), mask


def written_beside(real: Callable[..., Any], scores: Tensor, topk: int, **rest: Any) -> Any:
    results = real(scores, topk, **rest)
    torch.as_strided(rest["out"], (1,), (1,), rest["out"].storage_offset() - 1).fill_(3)
    return results


def a_head_left_out(real: Callable[..., Any], q: Tensor, keys: Any, w: Tensor, **rest: Any) -> Any:
    dropped = w.clone()
    dropped[:, -1] = 0
    return real(q, keys, dropped, **rest)


def a_key_after_the_window(
    real: Callable[..., Any], q: Tensor, keys: Any, w: Tensor, **rest: Any
) -> Any:
    return real(q, keys, w, **{**rest, "ends": rest["ends"] + 1})


def pages_mixed_up(real: Callable[..., Any], q: Tensor, keys: Any, w: Tensor, *a: Any, **r: Any):
    used = -(-r["cache_lengths"] // keys.page_size)
    table = r["block_table"].clone()
    for b, n in enumerate(used.tolist()):
        table[b, :n] = table[b, :n].roll(1)
    return real(q, keys, w, *a, **{**r, "block_table": table})


def keys_of_the_future(
    real: Callable[..., Any], q: Tensor, keys: Any, w: Tensor, *a: Any, **r: Any
):
    lengths = r["cache_lengths"]
    longer = torch.where(lengths % keys.page_size == 0, lengths, lengths + 1)  # no other page
    return real(q, keys, w, *a, **{**r, "cache_lengths": longer})


DEFECTS: list[tuple[str, Callable[..., Any]]] = [
    ("select_topk", larger_position_on_ties),
    ("select_topk", nan_first),
    ("select_topk", last_chunk_dropped),
    ("select_topk", window_one_longer),
    ("select_topk", mask_word_shifted),
    ("select_topk", counts_of_topk),
    ("select_topk", written_beside),
    ("indexer_scores", a_head_left_out),
    ("indexer_scores", a_key_after_the_window),
    ("index_topk", pages_mixed_up),
    ("index_topk", keys_of_the_future),
]


@pytest.mark.parametrize(("name", "defect"), DEFECTS, ids=lambda x: getattr(x, "__name__", x))
def test_defect_is_found(name: str, defect: Callable[..., Any], monkeypatch: Any) -> None:
    real = getattr(openmla, name)
    monkeypatch.setattr(openmla, name, lambda *a, **k: defect(real, *a, **k))
    results = [check_index_call(seed) for seed in range(SEEDS)]
    failed = [r for r in results if r.status == "failed"]
    assert failed and {r.call for r in failed} == {name}
