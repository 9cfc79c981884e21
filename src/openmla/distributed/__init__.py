"""Context parallelism: several ranks prefill one batch, on torch.distributed process groups.

    shard = split(lengths, world, rank)                       which tokens this rank has
    out = prefill(q, latent, rope, expand, shard, group)      one dense layer on this rank's tokens
    out = prefill_latent(q, latent, rope, shard, group, scale=s)
    out = prefill_sparse(q, latent, rope, indices, shard, group, scale=s)

Queries stay where they are; latent rows are gathered, 71 times less than K and V of 128 heads.
Below those calls: `gather_latent` and `send_latent` for the rows alone, `merge_over_ranks` with
`local_indices` for pools that are sharded for memory. Gloo on CPUs, NCCL on GPUs. A tour with a
picture: docs/context-parallel.md.
"""

from openmla.distributed.attention import prefill, prefill_latent, prefill_sparse
from openmla.distributed.gather import Gathering, gather_latent, send_latent
from openmla.distributed.merge import local_indices, merge_over_ranks
from openmla.distributed.shard import ContextShard, Part, split
from openmla.errors import PeerLost

__all__ = [
    "ContextShard",
    "Gathering",
    "Part",
    "PeerLost",
    "gather_latent",
    "local_indices",
    "merge_over_ranks",
    "prefill",
    "prefill_latent",
    "prefill_sparse",
    "send_latent",
    "split",
]
