"""Top-k of rows of scores, plain Triton: a radix search for the cut, then one ordered walk.

| | |
|---|---|
| a program computes | one row |
| cut | 4 digits of 8 bits, from the highest: a histogram of the scores that share the digits so |
| | far says in which bin the k-th largest is |
| walk | scores above the cut, and as many equal to it as are missing, in order of position |
| writes | positions (or physical rows), the count, the bits |

No atomics on positions: a score's place is the number of selected ones before it. The time depends
on the length of the row, never on its scores. A row of at most topk scores is not read.
"""

# Device code: Triton gives its values their types.
# ruff: noqa: PLR0913

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def order_keys(x):
    """fp32 as uint32 of the same order: -0.0 as +0.0, NaN below everything."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | -0x80000000)
    return tl.where(x == x, ordered, 0).to(tl.uint32, bitcast=True)


@triton.jit
def load_keys(row_ptr, position, n, keep_first, keep_last, KEEPS: tl.constexpr):
    """The keys of positions. Kept positions have the highest key, those past the end the lowest."""
    keys = order_keys(tl.load(row_ptr + position, mask=position < n, other=float("nan")))
    if KEEPS:
        kept = (position < keep_first) | ((position >= n - keep_last) & (position < n))
        keys = tl.where(kept, 0xFFFFFFFF, keys)
    return keys


@triton.jit
def find_cut(row_ptr, n, topk, keep_first, keep_last, KEEPS: tl.constexpr, BLOCK: tl.constexpr):
    """(the topk-th largest key, how many equal to it are selected)."""
    digit = tl.arange(0, 256)
    prefix = tl.zeros([], tl.uint32)
    rank = topk
    for place in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for at in tl.range(0, n, BLOCK):
            position = at + tl.arange(0, BLOCK)
            keys = load_keys(row_ptr, position, n, keep_first, keep_last, KEEPS)
            member = position < n
            if place > 0:
                member = member & ((keys >> (32 - 8 * place)) == prefix)
            bins = ((keys >> (24 - 8 * place)) & 255).to(tl.int32)
            counts += tl.histogram(bins, 256, mask=member)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (above < rank) & (above + counts >= rank)
        prefix = (prefix << 8) | tl.sum(tl.where(here, digit, 0), 0).to(tl.uint32)
        rank -= tl.sum(tl.where(here, above, 0), 0)
    return prefix, rank


@triton.jit
def as_written(position, chosen, start, table_ptr, pages, PAGE: tl.constexpr, ADD: tl.constexpr):
    """Positions as physical rows (-1 where the table ends), as columns, or as they are."""
    if PAGE > 0:
        entry = position // PAGE
        page = tl.load(table_ptr + entry, mask=chosen & (entry < pages), other=0)
        position = tl.where(entry < pages, page * PAGE + position % PAGE, -1)
    elif ADD:
        position += start
    return position


@triton.jit
def pack_bits(chosen, BLOCK: tl.constexpr):
    """[BLOCK] flags -> [BLOCK / 32] words."""
    bits = tl.reshape(chosen.to(tl.int32), [BLOCK // 32, 32]) << tl.arange(0, 32)[None, :]
    return tl.sum(bits, 1)


@triton.jit(do_not_specialize=["width", "topk", "pages", "words", "keep_first", "keep_last"])
def select_kernel(
    scores_ptr,
    starts_ptr,
    ends_ptr,
    sequences_ptr,
    table_ptr,
    out_ptr,
    counts_ptr,
    mask_ptr,
    width,
    topk,
    pages,
    words,
    keep_first,
    keep_last,
    scores_stride,
    table_stride,
    out_stride,
    PAGE: tl.constexpr,
    ADD: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; see the top of the file."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(starts_ptr + row), 0)
    n = tl.maximum(tl.minimum(tl.load(ends_ptr + row), width), start) - start
    row_ptr = scores_ptr + row * scores_stride + start
    out_row = out_ptr + row * out_stride
    if PAGE > 0:
        table_ptr += tl.load(sequences_ptr + row).to(tl.int64) * table_stride
    if counts_ptr is not None:
        tl.store(counts_ptr + row, tl.minimum(n, topk))
    cut = tl.zeros([], tl.uint32)
    ties = n
    if n > topk:
        cut, ties = find_cut(row_ptr, n, topk, keep_first, keep_last, KEEPS, BLOCK)
    base = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    for at in tl.range(0, n, BLOCK):
        position = at + tl.arange(0, BLOCK)
        inside = position < n
        chosen = inside
        if n > topk:
            keys = load_keys(row_ptr, position, n, keep_first, keep_last, KEEPS)
            equal = (inside & (keys == cut)).to(tl.int32)
            rank = equal_before + tl.cumsum(equal, 0)
            chosen = inside & ((keys > cut) | ((equal > 0) & (rank <= ties)))
            equal_before += tl.sum(equal, 0)
        one = chosen.to(tl.int32)
        place = base + tl.cumsum(one, 0) - one
        base += tl.sum(one, 0)
        written = as_written(position, chosen, start, table_ptr, pages, PAGE, ADD)
        tl.store(out_row + place, written, mask=chosen)
        if mask_ptr is not None:
            word = at // 32 + tl.arange(0, BLOCK // 32)
            bits = pack_bits(chosen, BLOCK)
            tl.store(mask_ptr + row * words + word, bits, mask=word < words)
    for at in tl.range(base, topk, BLOCK):
        place = at + tl.arange(0, BLOCK)
        tl.store(out_row + place, -1, mask=place < topk)
    if mask_ptr is not None:
        for at in tl.range((n + BLOCK - 1) // BLOCK * (BLOCK // 32), words, BLOCK):
            word = at + tl.arange(0, BLOCK)
            tl.store(mask_ptr + row * words + word, 0, mask=word < words)
