"""Pools that are sharded for memory: every rank holds some of the rows, all have all queries.

A rank attends to the rows it has, with lists of indices cut down to those (`local_indices`), and
`merge_over_ranks` makes the whole of the partial results. That moves far more bytes than gathering
rows does (docs/context-parallel.md), so it is for pools that do not fit, not for speed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from openmla import checks
from openmla.api import merge_many
from openmla.distributed.agreement import Facts, Group, all_gather, check_together, loud, world_of
from openmla.errors import InvalidArgument

CALL = "merge_over_ranks"


def local_indices(indices: Tensor, first: int, last: int) -> Tensor:
    """Global rows -> rows of a shard that holds first … last-1; others become -1, which counts not.

    Args:
        indices: int32 [total_q, topk], rows of all shards; negative ones stay -1.
        first: the first row of this rank's shard.
        last: the row after its last.

    Raises:
        InvalidArgument: indices have another shape or dtype, or first and last are out of order.

    >>> local_indices(torch.tensor([[0, 7, 5, -1]], dtype=torch.int32), 4, 8).tolist()
    [[-1, 3, 1, -1]]
    """
    checks.tensor("indices", indices, ("total_q", "topk"), (torch.int32,))
    if not 0 <= first <= last:
        raise InvalidArgument("first, last", "0 <= first <= last", f"{first}, {last}")
    return torch.where((indices >= first) & (indices < last), indices - first, -1)


def merge_over_ranks(
    out: Tensor, lse: Tensor, group: Group = None, *, verify: bool = True
) -> tuple[Tensor, Tensor]:
    """Partial results over disjoint keys, one per rank -> the whole, the same bits on every rank.

    Returns out and lse over all keys. Every rank merges total_q / world of the queries, all parts
    at once in fp32, and hands them to the others: two collectives, and one rounding whatever the
    number of ranks.

    Args:
        out: [total_q, H, d_v], bf16, fp16 or fp32, of the same queries on every rank, computed
            without a sink.
        lse: fp32 [total_q, H], natural log; -inf where this rank's keys were not seen.
        group: the ranks that hold the keys; None is torch's default group.
        verify: check first that all ranks agree, which waits for the GPU; False on all ranks or on
            none.

    Raises:
        InvalidArgument: an argument is wrong, or ranks disagree; the message names it.
        Unsupported: a tensor requires gradients.
        PeerLost: another rank has ended, or did not make this call within the group's timeout.
    """

    def facts() -> Facts:
        checks.tensor("out", out, ("total_q", "heads", "d_v"), checks.Q_DTYPES[:3])
        checks.tensor("lse", lse, tuple(out.shape[:2]), (torch.float32,), out.device)
        checks.no_gradients(out=out, lse=lse)
        return {"shape": f"{list(out.shape)}", "dtype": str(out.dtype)}

    world = world_of(group)
    if verify:
        check_together(CALL, group, world, facts)
    else:
        facts()
    if world == 1 or not out.numel():
        return merge_many([out], [lse])
    queries, heads, d_v = out.shape
    each = -(-queries // world)
    sent = _packed(out, lse, each * world)
    got = torch.empty_like(sent)
    with loud(CALL, group):
        dist.all_to_all_single(got, sent, group=group)
    parts = [_unpacked(part, heads, d_v, out.dtype) for part in got.chunk(world)]
    merged = _packed(*merge_many([p[0] for p in parts], [p[1] for p in parts]), each)
    with loud(CALL, group):
        all_gather(CALL, got, merged, group).wait()
    whole, states = _unpacked(got[:queries], heads, d_v, out.dtype)
    return whole, states


def _packed(out: Tensor, lse: Tensor, rows: int) -> Tensor:
    """out and lse of a query side by side as bytes, [rows, …]; rows past the queries are empty."""
    queries = out.shape[0]
    values, states = (_bytes(x) for x in (out, lse))
    both = values.new_zeros(rows, values.shape[1] + states.shape[1])
    both[:queries, : values.shape[1]] = values
    both[:queries, values.shape[1] :] = states
    return both


def _bytes(rows: Tensor) -> Tensor:
    return rows.resolve_neg().contiguous().flatten(1).view(torch.uint8)


def _unpacked(rows: Tensor, heads: int, d_v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The way back."""
    width = heads * d_v * dtype.itemsize
    parts = ((rows[:, :width], dtype), (rows[:, width:], torch.float32))
    out, lse = (x.clone(memory_format=torch.contiguous_format).view(kind) for x, kind in parts)
    return out.view(-1, heads, d_v), lse.view(-1, heads)
