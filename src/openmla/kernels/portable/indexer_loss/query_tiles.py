"""Which queries a tile has, and which keys they see: as all passes of an indexer's loss ask."""

from __future__ import annotations

import triton
import triton.language as tl

from openmla.kernels.portable.indexer_loss.records import QueryTile
from openmla.kernels.portable.tiles import first_row, key_span, sequence_of, span


@triton.jit
def query_tile(
    tile, cu_q_ptr, cu_k_ptr, batch, total_q, total_k, CAUSAL: tl.constexpr, BM: tl.constexpr
):
    """The QueryTile of this number."""
    sequence = sequence_of(tile, cu_q_ptr, batch, total_q, 1, BM)
    q_start, q_len = span(sequence, cu_q_ptr, batch, total_q)
    k_start, k_len = key_span(sequence, cu_k_ptr, None, batch, total_k)
    first = first_row(tile, sequence, cu_q_ptr, total_q, 1, BM)
    stop = k_len
    if CAUSAL:
        last = tl.minimum(first + BM, q_len)
        stop = tl.minimum(tl.maximum(last + k_len - q_len, 0), k_len)
    return QueryTile(
        first=first,
        q_start=q_start,
        q_len=q_len,
        k_start=k_start,
        k_len=k_len,
        stop=tl.where(first < q_len, stop, 0),
    )
