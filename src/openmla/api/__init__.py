"""The public calls, but for the indexer's, which are in `openmla.indexer.api`."""

from openmla.api.attention import (
    mla_attend,
    mla_prefill,
    mla_prefill_latent,
    mla_prefill_sparse,
)
from openmla.api.merging import merge_many, merge_states
from openmla.api.quantizing import quantize

__all__ = [
    "merge_many",
    "merge_states",
    "mla_attend",
    "mla_prefill",
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "quantize",
]
