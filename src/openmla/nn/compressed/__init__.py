"""Layers of DeepSeek-V4: attention to a window of tokens and to rows that stand for several.

layer = CompressedAttention.from_config(hf_config, layer=2)
layer.load(hf_model.model.layers[2].self_attn)
cache = CompressedCache.allocate(layer.config, pages=64, row_pages=16, requests=8)
out = layer(x, cache, batch, Rows(row_table, requests))         # [tokens, hidden]

Layers of DeepSeek-V4.1 share such rows: openmla.nn.compressed.shared.
"""

from openmla.nn.compressed.attention import CompressedAttention
from openmla.nn.compressed.cache import CompressedCache, CompressorState, Rows
from openmla.nn.compressed.config import CompressedConfig
from openmla.nn.compressed.shared import Selected, SharedRowsAttention, SharedRowsConfig

__all__ = [
    "CompressedAttention",
    "CompressedCache",
    "CompressedConfig",
    "CompressorState",
    "Rows",
    "Selected",
    "SharedRowsAttention",
    "SharedRowsConfig",
]
