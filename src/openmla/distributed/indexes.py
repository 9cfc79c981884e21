"""Index tensors of a shard: made once, kept for the layers of a model.

All are small beside the rows they index, and made on the CPU; a GPU gets its copy once.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from openmla.distributed.shard import ContextShard, Part, ranges
from openmla.kept import kept

MOST_KEPT = 16
"""Waves of batches in flight. An index of a million tokens has 8 MB."""


class Arrival(NamedTuple):
    """How the rows of all ranks arrive, and where they belong. Every rank sends `most` rows, the
    last of them perhaps padding, so row i of rank r arrives at r * most + i."""

    local: slice
    """The rows that this rank sends, among its own of all waves."""
    most: int
    rows: Tensor
    """Rows of the batch, in the order they arrive."""
    places: Tensor | None
    """Where each of them arrives; None if there is no padding, so that they arrive in order."""


@kept(MOST_KEPT)
def arrival(shard: ContextShard, wave: int | None, device: torch.device) -> Arrival:
    """How the rows of one wave arrive, or of all waves at once."""
    waves = slice(None) if wave is None else slice(wave, wave + 1)
    starts, sizes, counts = [], [], []
    for rank in range(shard.world):
        parts = [part for found in shard.at(rank).waves[waves] for part in found]
        starts += [shard.offsets[part.sequence] + part.start for part in parts]
        sizes += [part.tokens for part in parts]
        counts.append(sum(part.tokens for part in parts))
    before = 0 if wave is None else sum(shard.wave_tokens[:wave])
    most = max(counts)
    places = None
    if min(counts) < most:
        places = ranges([most * rank for rank in range(shard.world)], counts).to(device)
    local = slice(before, before + counts[shard.rank])
    return Arrival(local, most, ranges(starts, sizes).to(device), places)


@kept(MOST_KEPT)
def key_rows(
    parts: tuple[Part, ...], offsets: tuple[int, ...], device: torch.device
) -> Tensor | slice:
    """Rows of the keys of parts, one part after the other, where sequences begin at `offsets`.

    A slice where they are consecutive, so that it picks a view.
    """
    starts = [offsets[part.sequence] for part in parts]
    ends = [start + part.keys for start, part in zip(starts, parts, strict=True)]
    if starts and starts[1:] == ends[:-1]:
        return slice(starts[0], ends[-1])
    return ranges(starts, [part.keys for part in parts]).to(device)


@kept(MOST_KEPT)
def key_places(parts: tuple[Part, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and position of the keys of parts, one part after the other."""
    sizes = [part.keys for part in parts]
    numbers, counts = (
        torch.tensor(x, dtype=torch.int64, device="cpu")
        for x in ([part.sequence for part in parts], sizes)
    )
    sequences = torch.repeat_interleave(numbers, counts)
    return sequences.to(device), ranges([0] * len(parts), sizes).to(device)


class Union(NamedTuple):
    """What parts see together: of every sequence the part that sees most."""

    parts: tuple[Part, ...]
    offsets: tuple[int, ...]
    """Where the keys of each sequence begin, one sequence after the other."""


@lru_cache(maxsize=MOST_KEPT)
def union(parts: tuple[Part, ...]) -> Union:
    """Keys of a sequence begin at its first token, so the part that sees most sees them all."""
    most = {part.sequence: part for part in sorted(parts, key=lambda part: part.keys)}
    ordered = [most[sequence] for sequence in sorted(most)]
    offsets, first = [0] * (max(most, default=-1) + 1), 0
    for part in ordered:
        offsets[part.sequence] = first
        first += part.keys
    return Union(tuple(ordered), tuple(offsets))


@kept(MOST_KEPT)
def first_keys(parts: tuple[Part, ...], once: Union, device: torch.device) -> Tensor:
    """int32 [parts]: where the keys of each part begin among those of all."""
    starts = [once.offsets[part.sequence] for part in parts]
    return torch.tensor(starts, dtype=torch.int32, device=device)


class Ragged(NamedTuple):
    """Parts as sequences of a call: what openmla's calls take."""

    sequences: Tensor
    """int64 [parts]: the sequence of each part."""
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    lengths: Tensor
    """int32 [parts]: keys of each part."""


@kept(MOST_KEPT)
def ragged(parts: tuple[Part, ...], device: torch.device) -> Ragged:
    """Every part is a sequence whose keys end where it ends: causal is aligned bottom-right."""
    numbers = torch.tensor([part.sequence for part in parts], dtype=torch.int64, device=device)
    keys = [part.keys for part in parts]
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    cu_q = _offsets([part.tokens for part in parts], device)
    return Ragged(numbers, cu_q, _offsets(keys, device), lengths)


@kept(MOST_KEPT)
def new_tokens(shard: ContextShard, device: torch.device) -> tuple[Tensor, Tensor]:
    """Sequence and position of every new token of the batch, in its order."""
    numbers = torch.arange(len(shard.lengths), dtype=torch.int64, device="cpu")
    sizes = torch.tensor(shard.lengths, dtype=torch.int64, device="cpu")
    sequences = torch.repeat_interleave(numbers, sizes)
    return sequences.to(device), ranges(shard.cached, shard.lengths).to(device)


@kept(MOST_KEPT)
def fresh_table(pages: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [sequences, most pages]: so many pages for each sequence, one after another.

    >>> fresh_table((1, 2), torch.device("cpu")).tolist()
    [[0, 0], [1, 2]]
    """
    ends, most = accumulate(pages), max(pages, default=0)
    lines = [
        [*range(end - count, end), *[0] * (most - count)]
        for end, count in zip(ends, pages, strict=True)
    ]
    table = torch.tensor(lines, dtype=torch.int32, device="cpu")
    return table.view(len(pages), most).to(device)


def slots_of(table: Tensor, page_size: int, sequences: Tensor, positions: Tensor) -> Tensor:
    """Physical rows of positions of sequences, by a block table."""
    pages = table[sequences, positions // page_size].to(torch.int64)
    return pages * page_size + positions % page_size


def _offsets(sizes: list[int], device: torch.device) -> Tensor:
    cu = [0]
    for size in sizes:
        cu.append(cu[-1] + size)
    return torch.tensor(cu, dtype=torch.int32, device=device)
