"""The way back of a gathering: gradients of rows, from all ranks to the one whose rows they are.

A row is used by every rank whose queries see it, so its gradient is the sum of theirs. Each rank
sends the others what it has of theirs, as many bytes as the gathering moved, and adds what comes
in the order of the ranks, in fp32, rounded once. So the sum has the same bits every time, whatever
the network: a reduction by the backend promises no order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from openmla.distributed.agreement import Group, loud
from openmla.distributed.indexes import arrival
from openmla.distributed.shard import ContextShard


def give_back(d_rows: Tensor, shard: ContextShard, group: Group, call: str) -> Tensor:
    """[all tokens, width] of every rank -> the sums of this rank's rows, [shard.tokens, width].

    All ranks call it together.
    """
    due = arrival(shard, None, d_rows.device)
    in_order = d_rows.index_select(0, due.rows)
    if shard.world == 1 or not due.most:
        return in_order
    width = d_rows.shape[1]
    sent = in_order
    if due.places is not None:
        sent = d_rows.new_zeros(shard.world * due.most, width)
        sent.index_copy_(0, due.places, in_order)
    got = torch.empty_like(sent)
    with loud(f"backward pass of {call}", group):
        dist.all_to_all_single(got, sent, group=group)
    total = torch.zeros(due.most, width, dtype=torch.float32, device=d_rows.device)
    for part in got.view(shard.world, due.most, width):
        total += part
    return total[: shard.tokens].to(d_rows.dtype)
