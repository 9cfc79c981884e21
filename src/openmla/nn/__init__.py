"""Layers around the kernels: Multi-head Latent Attention, whole.

layer = MLAAttention.from_config(hf_config)
layer.load(hf_model.model.layers[0].self_attn)            # or a state dict, with a prefix
out = layer(x, batch.positions, cache, batch)             # [tokens, hidden]
"""

from openmla.nn.batch import Batch
from openmla.nn.config import MLAConfig
from openmla.nn.indexer import Indexer, IndexerConfig
from openmla.nn.mla import MLAAttention

__all__ = ["Batch", "Indexer", "IndexerConfig", "MLAAttention", "MLAConfig"]
