"""openmla: Multi-head Latent Attention for PyTorch.

out = openmla.mla_prefill(q, k_nope, k_rope, v, cu_seqlens_q=cu)          dense, MHA form
out = openmla.mla_prefill_latent(q, cache, block_table, cache_lengths, cu_seqlens_q=cu, scale=s)
                                                                          latent, decode too
out = openmla.mla_prefill_sparse(q, kv, indices, scale=s)                 sparse, latent form
out = openmla.mla_attend(q, [window, listed], scale=s, sink=sink)         two sources, one softmax
q, q_scale = openmla.quantize(q)                                          e4m3, a scale per token
rows = openmla.index_topk(q, index_cache, weights, 2048, ...)             which rows sparse reads
loss = openmla.indexer_loss(q, k, weights, ..., lse, cu_seqlens_q=cu)      what trains an indexer
out, lse = openmla.merge_states(out_a, lse_a, out_b, lse_b)               two parts
out, lse = openmla.merge_many(outs, lses)                                 any number of parts
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openmla.api import (
        merge_many,
        merge_states,
        mla_attend,
        mla_prefill,
        mla_prefill_latent,
        mla_prefill_sparse,
        quantize,
    )
    from openmla.cache import LatentCache
    from openmla.errors import InvalidArgument, OpenMLAError, Unsupported
    from openmla.indexer.api import index_topk, indexer_scores, select_topk
    from openmla.indexer.cache import IndexCache
    from openmla.indexer.loss_api import indexer_loss
    from openmla.planning import Plan, plan
    from openmla.problem import Problem
    from openmla.sources import Listed, Span, TurnBack

__version__ = "0.3.0"
__all__ = [
    "IndexCache",
    "InvalidArgument",
    "LatentCache",
    "Listed",
    "OpenMLAError",
    "Plan",
    "Problem",
    "Span",
    "TurnBack",
    "Unsupported",
    "__version__",
    "index_topk",
    "indexer_loss",
    "indexer_scores",
    "merge_many",
    "merge_states",
    "mla_attend",
    "mla_prefill",
    "mla_prefill_latent",
    "mla_prefill_sparse",
    "plan",
    "quantize",
    "select_topk",
]
_MODULES = {
    "openmla.api": (
        "merge_many",
        "merge_states",
        "mla_attend",
        "mla_prefill",
        "mla_prefill_latent",
        "mla_prefill_sparse",
        "quantize",
    ),
    "openmla.cache": ("LatentCache",),
    "openmla.errors": ("InvalidArgument", "OpenMLAError", "Unsupported"),
    "openmla.indexer.api": ("index_topk", "indexer_scores", "select_topk"),
    "openmla.indexer.cache": ("IndexCache",),
    "openmla.indexer.loss_api": ("indexer_loss",),
    "openmla.planning": ("Plan", "plan"),
    "openmla.problem": ("Problem",),
    "openmla.sources": ("Listed", "Span", "TurnBack"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name or a module, imported when it is first asked for.

    torch takes seconds to import: `openmla --help` and plans do without it.
    """
    if name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        module = f"{__name__}.{name}"
        try:
            value = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
