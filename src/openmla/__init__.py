"""openmla: Multi-head Latent Attention prefill for Python.

out = openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=cu)          dense, MHA form
out = openmla.mla_prefill_latent(q, cache, block_table, cache_lengths, cu_seqlens_q=cu, scale=s)
out = openmla.mla_prefill_sparse(q, kv, indices, scale=s)                 sparse, latent form
q, q_scale = openmla.quantize(q)                                          e4m3, a scale per token
rows = openmla.index_topk(q, index_cache, weights, 2048, ...)             which rows sparse reads
out, lse = openmla.merge_states(out_a, lse_a, out_b, lse_b)               two parts
out, lse = openmla.merge_many(outs, lses)                                 any number of parts
"""

from openmla.api import (
    merge_many,
    merge_states,
    mla_prefill,
    mla_prefill_latent,
    mla_prefill_sparse,
    quantize,
)
from openmla.cache import LatentCache
from openmla.errors import InvalidArgument, OpenMLAError, Unsupported
from openmla.indexer.api import index_topk, indexer_scores, select_topk
from openmla.indexer.cache import IndexCache
from openmla.planning import Plan, plan
from openmla.problem import Problem

__version__ = "0.2.0"
__all__ = [
    "IndexCache",
    "InvalidArgument",
    "LatentCache",
    "OpenMLAError",
    "Plan",
    "Problem",
    "Unsupported",
    "__version__",
    "index_topk",
    "indexer_scores",
    "merge_many",
    "merge_states",
    "mla_prefill",
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "plan",
    "quantize",
    "select_topk",
]
