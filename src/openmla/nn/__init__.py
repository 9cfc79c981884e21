"""Layers around the kernels: Multi-head Latent Attention, whole.

layer = MLAAttention.from_config(hf_config)
layer.load(hf_model.model.layers[0].self_attn)            # or a state dict, with a prefix
out = layer(x, batch.positions, cache, batch)             # [tokens, hidden]
out = layer(x, shard.positions(), shard=shard, group=g)   # this rank's tokens: ranks.py
"""

from openmla.nn.batch import Batch
from openmla.nn.config import MLAConfig
from openmla.nn.indexer import Indexer, IndexerConfig
from openmla.nn.mla import MLAAttention
from openmla.nn.ranks import split_heads

__all__ = ["Batch", "Indexer", "IndexerConfig", "MLAAttention", "MLAConfig", "split_heads"]
