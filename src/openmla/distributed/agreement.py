"""Failure is loud: ranks that disagree, or one that is gone, raise on every rank.

A collective whose ranks disagree about sizes hangs, or gives rows that belong to another sequence.
So the ranks first tell each other what they are about to do, in a few hundred bytes, and whoever
finds a difference raises, which is all of them. A rank whose own arguments are wrong takes part too
and says so: otherwise the others would wait for it.

That exchange waits for the GPU. Ranks that agreed in the first layer of a model agree in the
others, so those may pass `verify=False`: all ranks or none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from openmla.errors import InvalidArgument, OpenMLAError, PeerLost

Group = dist.ProcessGroup | None
Facts = Mapping[str, object]


def world_of(group: Group) -> int:
    """Ranks in a group; 1 where torch.distributed was not initialized and none is given."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    return dist.get_world_size(group)


def check_group(group: Group, world: int, rank: int) -> None:
    """A shard must be that of this rank in this group. One rank alone needs no group."""
    if world == 1 and group is None:
        return
    if world_of(group) != world:
        raise InvalidArgument("group", f"{world} ranks, as the shard has", world_of(group))
    if dist.get_rank(group) != rank:
        raise InvalidArgument("shard", f"that of rank {dist.get_rank(group)}", f"rank {rank}")


def check_together(call: str, group: Group, world: int, check: Callable[[], Facts]) -> None:
    """Run every rank's own checks; raise on all ranks what is wrong on any of them.

    `check` raises, or returns what must be the same everywhere, by name. `world` is the number of
    ranks that the caller counts on; where it is 1, nobody is asked.
    """
    wrong: OpenMLAError | None = None
    mine: dict[str, object] = {"call": call}
    try:
        mine.update(check())
    except OpenMLAError as error:
        wrong, mine = error, {"wrong": str(error)}
    if world > 1 and world_of(group) > 1:
        found: list[Any] = [None] * world_of(group)
        with loud(call, group):
            dist.all_gather_object(found, mine, group=group)
        if wrong is None:
            _compare(found)
    if wrong is not None:
        raise wrong


def _compare(found: list[dict[str, object]]) -> None:
    """Raise for the first rank that is wrong, or that says something else than rank 0."""
    for rank, facts in enumerate(found):
        if "wrong" in facts:
            raise InvalidArgument(f"rank {rank}", "arguments that pass its checks", facts["wrong"])
    for rank, facts in enumerate(found):
        for name, value in found[0].items():
            if facts.get(name) != value:
                raise InvalidArgument(
                    name, "the same on every rank", _difference(value, facts.get(name), rank)
                )


def _difference(first: object, other: object, rank: int) -> str:
    """Two values that differ, cut down to the first entry where they do.

    >>> _difference((5, 7, 9), (5, 8, 9), rank=3)
    '7 for sequence 1 on rank 0, 8 on rank 3'
    >>> _difference("torch.bfloat16", "torch.float16", rank=1)
    'torch.bfloat16 on rank 0, torch.float16 on rank 1'
    """
    if isinstance(first, tuple) and isinstance(other, tuple):
        if len(first) != len(other):
            return f"{len(first)} sequences on rank 0, {len(other)} on rank {rank}"
        place = next(i for i, pair in enumerate(zip(first, other, strict=True)) if len({*pair}) > 1)
        return f"{first[place]} for sequence {place} on rank 0, {other[place]} on rank {rank}"
    return f"{first} on rank 0, {other} on rank {rank}"


def all_gather(call: str, got: Tensor, sent: Tensor, group: Group) -> dist.Work:
    """Begin to gather `sent` of every rank in `got`, one rank after the other."""
    # torch 2.13 renamed the function; older ones know the old name alone.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with loud(call, group):
        work: dist.Work = gather(got, sent, group=group, async_op=True)
    return work


@contextmanager
def loud(call: str, group: Group) -> Iterator[None]:
    """What a backend reports about a peer, as a PeerLost that says which call ended so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, OpenMLAError):
            raise
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        raise PeerLost(call, rank, world, str(error).strip().splitlines()[0]) from error
