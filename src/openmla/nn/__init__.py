"""Layers around the kernels: Multi-head Latent Attention, whole.

layer = MLAAttention.from_config(hf_config)
layer.load(hf_model.model.layers[0].self_attn)            # or a state dict, with a prefix
out = layer(x, batch.positions, cache, batch)             # [tokens, hidden]
out = layer(x, shard.positions(), shard=shard, group=g)   # this rank's tokens: ranks.py
layer = CompressedAttention.from_config(v4_config, layer=2)   # DeepSeek-V4: openmla.nn.compressed
layer = SharedRowsAttention.from_config(v41_config, layer=8)  # V4.1: openmla.nn.compressed.shared
"""

from openmla.nn.batch import Batch
from openmla.nn.compressed import (
    CompressedAttention,
    CompressedCache,
    CompressedConfig,
    Rows,
    Selected,
    SharedRowsAttention,
    SharedRowsConfig,
)
from openmla.nn.config import MLAConfig
from openmla.nn.indexer import Indexer, IndexerConfig
from openmla.nn.mla import MLAAttention
from openmla.nn.pooled import PoolCache, PoolIndexer, PoolIndexerConfig
from openmla.nn.ranks import split_heads
from openmla.nn.rope import Rope

__all__ = [
    "Batch",
    "CompressedAttention",
    "CompressedCache",
    "CompressedConfig",
    "Indexer",
    "IndexerConfig",
    "MLAAttention",
    "MLAConfig",
    "PoolCache",
    "PoolIndexer",
    "PoolIndexerConfig",
    "Rope",
    "Rows",
    "Selected",
    "SharedRowsAttention",
    "SharedRowsConfig",
    "split_heads",
]
