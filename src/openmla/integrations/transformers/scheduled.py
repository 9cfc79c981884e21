"""What the host knows of the batch that continuous batching has scheduled: lengths and blocks.

The engine tells a forward pass of it by tensors on the device. To learn a length from these, the
host would have to wait for the device in every step, and one of them, a list of all rows that a
batch reads, grows with every token of every context: built in Python, it takes longer than the
attention it is for. So the requests are noted here while the engine prepares them, and that list
stays empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from openmla.errors import Unsupported

_SCHEDULED = "openmla_scheduled"


class Request(NamedTuple):
    """New tokens first_query.. of a batch, over `keys` rows, theirs included, in these blocks."""

    first_query: int
    new: int
    keys: int
    blocks: Sequence[int]
    """The engine's own list, which may be longer and which changes between forward passes."""


class Scheduled:
    """The requests of one forward pass, and what its first layer makes of them for the others."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.batch: Any = None


def watch(processor: Any) -> None:
    """Note every batch that an engine's processor prepares, and list no rows to be read."""
    cache, inputs = processor.cache, processor.inputs_and_outputs
    cache.extend_read_and_write_indices = partial(_write_only, cache.extend_read_and_write_indices)
    inputs.prepare_batch_tensors = partial(_prepare, inputs.prepare_batch_tensors, cache)


def of(cache: Any) -> Scheduled:
    """The batch of the forward pass that is running."""
    found: Scheduled | None = getattr(cache, _SCHEDULED, None)
    if found is None:
        raise Unsupported(
            "a cache that openmla did not make", nearest="optimize(model), then generate_batch"
        )
    return found


def _write_only(
    extend: Any, request_id: str, past: int, new: int, read_index: Any, write_index: Any
) -> None:
    """The cache's `extend_read_and_write_indices`; without a list to fill, it fills none."""
    extend(request_id, past, new, None, write_index)


def _prepare(prepare: Any, cache: Any, requests_in_batch: Any, *args: Any, **kwargs: Any) -> None:
    """The processor's `prepare_batch_tensors`: it counts the new tokens into every offset."""
    prepare(requests_in_batch, *args, **kwargs)
    blocks, requests, first = _blocks(cache), [], 0
    for scheduled in requests_in_batch:
        state, new = scheduled.state, scheduled.query_length
        requests.append(Request(first, new, state.position_offset, blocks[state.request_id]))
        first += new
    setattr(cache, _SCHEDULED, Scheduled(requests))


def _blocks(cache: Any) -> dict[str, list[int]]:
    """Blocks of every request: of Transformers 5.22's only allocator, or 5.17's only manager."""
    allocators = getattr(cache, "cache_allocators", None)
    (owner,) = cache.group_cache_managers if allocators is None else allocators.values()
    found: dict[str, list[int]] = owner.block_table
    return found
