"""Bits of a key mask as the two passes walk it: a word for each row that a pass owns.

A mask has a bit for every query and key, a line for every query. A pass has rows of its own and
walks the other side in blocks, so for a block it wants the words of its rows side by side, aligned
to 16 bytes as bulk copies are:

| for | lines | columns of a line | bit |
|---|---|---|---|
| the query pass: `by_query` | blocks of keys of a sequence | its words of every query | key |
| the key pass: `by_key` | blocks of 32 queries | a word of every key of the sequence | query |

Queries lie where their statistics do (work_items.py), so lines and columns of a tile are its own.
Keys are in tiles of 128, the sequence's last tile first: a tile knows how many keys are left from
its first one to the end, not how many are before it. With 300 keys, keys 256 … 299 have columns 0 …
43, keys 128 … 255 the columns 128 … 255, and keys 0 … 127 the columns 256 … 383.

Each program transposes 128 queries x 128 keys. Words past the mask and queries past a sequence have
no bits; those of keys past a sequence are the mask's, and in rows that nobody stores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.call import Call, vector
from openmla.kernels.gluon.gradients.plan import OWN_ROWS
from openmla.kernels.gluon.gradients.records import Sequences, Tiling
from openmla.kernels.gluon.gradients.work_items import find_work_item
from openmla.operands import DenseOperands

WORD_BITS = 32
TILE_ROWS = OWN_ROWS
TILE_WORDS = TILE_ROWS // WORD_BITS
WARPS = gl.constexpr(4)
OWN = gl.constexpr(TILE_ROWS)
BITS = gl.constexpr(WORD_BITS)
WORDS = gl.constexpr(TILE_WORDS)


class SeenBits(NamedTuple):
    """Both orders of a mask's bits, int32."""

    by_query: Tensor
    """[blocks of keys, words of one x rows of statistics]"""
    by_key: Tensor
    """[rows of statistics / 32, keys]"""

    @staticmethod
    def allocate(key_mask: Tensor, rows: int, step: int) -> SeenBits:
        """Uninitialized; rows: those of the statistics of a head, step: keys of a block."""
        tiles, each = tiles_of_keys(key_mask), step // WORD_BITS
        return SeenBits(
            by_query=key_mask.new_empty(tiles * TILE_WORDS // each, each * rows),
            by_key=key_mask.new_empty(rows // WORD_BITS, tiles * TILE_ROWS),
        )

    def transposed(self, op: DenseOperands) -> Call:
        """The launch that fills both."""
        mask = op.key_mask
        assert mask is not None
        tiles, rows = tiles_of_keys(mask), self.by_key.shape[0] * WORD_BITS
        arguments: dict[str, Any] = {
            "mask_ptr": mask,
            "by_query_ptr": self.by_query,
            "by_key_ptr": self.by_key,
            "cu_q_ptr": vector(op.cu_seqlens_q),
            "cu_k_ptr": vector(op.cu_seqlens_k),
            "mask_stride": mask.stride(0),
            "words": mask.shape[1],
            "tiles_of_keys": tiles,
            "batch": op.cu_seqlens_q.shape[0] - 1,
            "total_q": op.q.shape[0],
            "total_k": op.k_nope.shape[0],
            "rows": rows,
            "STEP": self.by_query.shape[1] // rows * WORD_BITS,
            "num_warps": WARPS.value,
        }
        return Call(seen_bits_kernel, rows // TILE_ROWS * tiles, arguments)


def tiles_of_keys(key_mask: Tensor) -> int:
    """Tiles of 128 keys that a mask has words of; one at least, as no descriptor is of nothing."""
    return max(1, -(-key_mask.shape[1] // TILE_WORDS))


COUNTS = ["mask_stride", "words", "tiles_of_keys", "batch", "total_q", "total_k", "rows"]
VECTORS = ["mask_ptr", "cu_q_ptr", "cu_k_ptr"]


@gluon.jit
def write_by_query(mask_ptr, mask_stride, words, item, base, rows, first, STEP: gl.constexpr):
    """128 queries x words first … first + 3: in each line, the words of STEP keys side by side.

    item: WorkItem, base: by_query, rows: of the statistics.
    """
    EACH: gl.constexpr = STEP // BITS
    L: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [WARPS, 1], [1, 0])
    row = gl.arange(0, OWN, gl.SliceLayout(1, L))
    word = first + gl.arange(0, WORDS, gl.SliceLayout(0, L))
    line = mask_ptr + (item.token + row).to(gl.int64) * mask_stride
    here = (row < item.rows)[:, None] & (word < words)[None, :]
    bits = gl.load(line[:, None] + word[None, :], mask=here, other=0)
    target = base + (word // EACH).to(gl.int64) * (EACH * rows) + word % EACH
    column = (item.place + row) * EACH
    exists = item.blocks > 0
    gl.store(target[None, :] + column[:, None], bits, mask=(row < OWN)[:, None] & exists)


@gluon.jit
def write_by_key(mask_ptr, mask_stride, words, item, base, columns, number):
    """A word of 32 queries for each of 128 keys, those of the sequence's tile `number` from the
    end; of four such words, a warp makes one.

    item: WorkItem, base: by_key, columns: of one of its lines.
    """
    L: gl.constexpr = gl.BlockedLayout([1, BITS, 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])
    QL: gl.constexpr = gl.SliceLayout(2, L)  # [blocks, queries]
    KL: gl.constexpr = gl.SliceLayout(1, L)  # [blocks, keys]
    block = gl.arange(0, OWN // BITS, gl.SliceLayout(1, QL))[:, None]
    query = gl.arange(0, BITS, gl.SliceLayout(0, QL))[None, :]
    row = block * BITS + query
    line = mask_ptr + (item.token + row).to(gl.int64) * mask_stride
    key = gl.arange(0, BITS, gl.SliceLayout(0, KL))[None, :]
    of_block = gl.arange(0, OWN // BITS, gl.SliceLayout(1, KL))[:, None]
    target = base + (item.place // BITS + of_block).to(gl.int64) * columns + (number * OWN + key)
    tile = (item.length + OWN - 1) // OWN - 1 - number
    exists = (item.blocks > 0) & (tile >= 0)
    for i in gl.static_range(WORDS):
        word = tile * WORDS + i
        here = (row < item.rows) & (word < words) & exists
        bits = gl.load(line + word, mask=here, other=0)[:, :, None] >> key[:, None, :]
        seen = gl.sum((bits & 1) << query[:, :, None], 1)
        gl.store(target + i * BITS, seen, mask=(key < BITS) & exists)


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=VECTORS)
def seen_bits_kernel(  # noqa: PLR0913
    mask_ptr,
    by_query_ptr,
    by_key_ptr,
    cu_q_ptr,
    cu_k_ptr,
    mask_stride,
    words,
    tiles_of_keys,
    batch,
    total_q,
    total_k,
    rows,
    STEP: gl.constexpr,
):
    """Programs: tiles of queries x tiles of keys. rows: of the statistics of a head, STEP: keys of
    a block of the query pass."""
    sequences = Sequences(
        cu_seqlens_q=cu_q_ptr,
        cu_seqlens_k=cu_k_ptr,
        batch=batch,
        total_q=total_q,
        total_k=total_k,
        heads=1,
    )
    TILE: gl.constexpr = Tiling(
        own_rows=OWN, step_rows=STEP, by_keys=False, is_causal=False, head_group=1
    )
    x = gl.program_id(0)
    number = x % tiles_of_keys
    item = find_work_item(x // tiles_of_keys, sequences, TILE, WARPS)
    stride = mask_stride.to(gl.int64)
    first = number * WORDS
    write_by_query(mask_ptr, stride, words, item, by_query_ptr, rows.to(gl.int64), first, STEP)
    columns = tiles_of_keys.to(gl.int64) * OWN
    write_by_key(mask_ptr, stride, words, item, by_key_ptr, columns, number)
