"""Which rows of which sequence a program owns, and into how many ranges its keys are split.

Sequence b owns the tile numbers from first_tile(b) to first_tile(b+1)-1: enough for its rows, at
least one, found without knowing the lengths on the host. Tokens after the last sequence belong to
one more, number `batch`, that has no keys, so every row of the outputs is written.

BM 4, one row per token, cu_seqlens [0, 5, 5, 7], 8 tokens:

| tile | 0 | 1 | 2 | 3 | 4 |
|---|---|---|---|---|---|
| sequence | 0 | 0 | 1 | 2 | 3 (no keys) |
| rows of it | 0-3 | 4 | none | 0-1 | 0 |
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cut(x, most):
    """Clamp x to 0 … `most`. The host never validates offsets, lengths and tables, and whatever
    they hold, no row outside a tensor is read or written."""
    return tl.minimum(tl.maximum(x, 0), most)


@triton.jit
def first_tile(sequence, cu_ptr, total, rows_per_token, BM: tl.constexpr):
    """Number of a sequence's first tile."""
    rows = cut(tl.load(cu_ptr + sequence), total).to(tl.int64) * rows_per_token
    return (rows // BM).to(tl.int32) + sequence


@triton.jit
def sequence_of(tile, cu_ptr, batch, total, rows_per_token, BM: tl.constexpr):
    """The last sequence whose first tile is not after `tile`, by bisection."""
    low = tl.cast(0, tl.int32)
    high = tl.cast(batch, tl.int32)
    while low < high:
        middle = (low + high + 1) // 2
        before = first_tile(middle, cu_ptr, total, rows_per_token, BM) <= tile
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def first_row(tile, sequence, cu_ptr, total, rows_per_token, BM: tl.constexpr):
    """The first row of a tile, counted within its sequence. Offsets that go back give 0."""
    return tl.maximum(tile - first_tile(sequence, cu_ptr, total, rows_per_token, BM), 0) * BM


@triton.jit
def span(sequence, cu_ptr, batch, total):
    """(start, length) of a sequence's tokens; number `batch` owns what is left of `total`."""
    start = cut(tl.load(cu_ptr + sequence), total)
    stop = tl.load(cu_ptr + tl.minimum(sequence + 1, batch))
    stop = tl.where(sequence < batch, stop, total)
    # Clamped before the subtraction: the difference of arbitrary offsets may overflow 32 bits.
    return start, tl.maximum(tl.minimum(stop, total), start) - start


@triton.jit
def key_span(sequence, cu_ptr, start_ptr, batch, total):
    """(first row, number) of a sequence's keys, none for number `batch`.

    With `start_ptr` they begin at the row it names, and the offsets say only how many there are.
    """
    if start_ptr is None:
        start, length = span(sequence, cu_ptr, batch, total)
    else:
        real = sequence < batch
        start = cut(tl.load(start_ptr + sequence, mask=real, other=0), total)
        offset = tl.load(cu_ptr + sequence)
        length = tl.load(cu_ptr + tl.minimum(sequence + 1, batch)) - offset
        length = tl.maximum(tl.minimum(length, total - start), 0)
    return start, tl.where(sequence < batch, length, 0)


@triton.jit
def first_key(seen, window):
    """The first key of a row that sees the last `window` of its first `seen` keys."""
    # Clamped before the subtraction: seen may be negative, and the difference overflow 32 bits.
    return tl.maximum(tl.maximum(seen, 0) - window, 0)


@triton.jit
def window_origin(q_len, k_len, window, STEP: tl.constexpr):
    """Where the keys of a request begin that any of its queries sees, in whole steps. Its ranges
    are those of the keys from there on."""
    return first_key(k_len - q_len + 1, window) // STEP * STEP


@triton.jit
def split_count(tiles, k_len, PROGRAMS: tl.constexpr, MIN_KEYS: tl.constexpr):
    """Ranges of keys of a request with `tiles` tiles: 1 unless it leaves half of the GPU idle.

    PROGRAMS, two per SM, is the most that a request is split into; 0 splits nothing. The request
    alone decides, as in SplitRule of openmla.planning.split: its bits must not depend on others.
    """
    fill = tl.where(4 * tiles > PROGRAMS, 1, PROGRAMS // tl.maximum(tiles, 1))
    return tl.maximum(tl.minimum(fill, k_len // MIN_KEYS), 1)


@triton.jit
def power_of_two(x):
    """The smallest power of two that is not below x, 1 … 2^30."""
    power = x * 0 + 1
    while power < x:
        power *= 2
    return power


@triton.jit
def latent_ranges(rows, k_len, RULE: tl.constexpr):
    """(ranges, keys of each) of a request of the latent form, by its own rows and keys alone: see
    LatentSplit. Of an invariant call by its keys alone: see FixedSplit. RULE: RuleConstants; None
    splits nothing.
    """
    keys = tl.maximum(k_len, 1)
    parts = 1
    if RULE is None:
        pass
    elif RULE.fixed > 0:
        keys = keys * 0 + RULE.fixed
        parts = tl.maximum((k_len + keys - 1) // keys, 1)
    else:
        PART_ROWS: tl.constexpr = RULE.most_part_rows
        STEP: tl.constexpr = RULE.step
        # With more rows than partial results may have, nothing is split.
        few = power_of_two(tl.minimum(tl.maximum(rows, 1), 2 * PART_ROWS))
        long = RULE.keys_per_row * few
        each = tl.where(keys >= RULE.long_ranges * long, long, long // 2)
        room = tl.maximum(PART_ROWS // few, 1)  # ranges that there is room for
        each = tl.maximum(tl.maximum(each, RULE.min_range), power_of_two((keys - 1) // room + 1))
        whole = (keys <= tl.maximum(long, RULE.short)) | (few > PART_ROWS)
        keys = tl.where(whole, ((keys - 1) // STEP + 1) * STEP, each)
        parts = tl.maximum((k_len + keys - 1) // keys, 1)
    return parts, keys


@triton.jit
def key_range(part, parts, k_len, STEP: tl.constexpr):
    """(first, last+1) key of a part; all parts but the last are equal multiples of STEP."""
    keys = ((k_len + parts - 1) // parts + STEP - 1) // STEP * STEP
    return tl.minimum(part * keys, k_len), tl.minimum((part + 1) * keys, k_len)
