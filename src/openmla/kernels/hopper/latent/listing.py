"""The rows that a token sees, block by block: of one source, or of two in one softmax.

The places of a token are those of its first source and, from the next block on, those of the
second: a block has rows of one source, and which one is a number like any other. So there is one
softmax, and the warp-groups know of one list. With lists of 100 and 40 rows:

| block | 0 | 1 | 2 |
|---|---|---|---|
| places | 0 … 63 | 64 … 99, none up to 127 | 128 … 167, none up to 191 |
| rows | first list, 0 … 63 | first list, 64 … 99 | second list, 0 … 39 |

Where the second source begins follows from the token's own list alone, as its bits must.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.latent.records import Listing, TwoListings
from openmla.kernels.hopper.latent.source import entries, range_of, whole_blocks


@gluon.jit
def listing_of(source, own, tile):
    """The `Listing` of a token, or its `TwoListings` where there is a second source. own: its
    `TokenList`, or the `WorkItem`; tile: its `ListedTile`."""
    if source.second_keys is None:
        return Listing(first_entry=own.first_entry, stop=own.stop)
    else:
        first = range_of(source, tile.token)
        second = range_of(source.second, tile.token)
        return TwoListings(
            line=first.line,
            skipped=first.skipped,
            stop=first.stop,
            second_line=second.line,
            second_skipped=second.skipped,
            second_stop=second.stop,
        )


@gluon.jit
def either(condition, a, b):
    """Listing `a` where a condition holds, else `b`; both are of one kind."""
    stop = gl.where(condition, a.stop, b.stop)
    if len(a) == 2:
        return Listing(first_entry=gl.where(condition, a.first_entry, b.first_entry), stop=stop)
    else:
        return TwoListings(
            line=gl.where(condition, a.line, b.line),
            skipped=gl.where(condition, a.skipped, b.skipped),
            stop=stop,
            second_line=gl.where(condition, a.second_line, b.second_line),
            second_skipped=gl.where(condition, a.second_skipped, b.second_skipped),
            second_stop=gl.where(condition, a.second_stop, b.second_stop),
        )


@gluon.jit
def look_up(source, listing, place, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """(what is listed for NUMBER places of a block, 1 if by the second source, else 0)."""
    if source.second_keys is None:
        return entries(source, listing.first_entry, listing.stop, place, LAYOUT, NUMBER), 0
    else:
        start = whole_blocks(listing.stop - listing.skipped)
        is_second = place >= start
        listed = gl.full([NUMBER], -1, gl.int32, LAYOUT)
        if is_second:
            first = listing.second_line.to(gl.int64) * source.second.table_stride
            at = place - start + listing.second_skipped
            listed = entries(source.second, first, listing.second_stop, at, LAYOUT, NUMBER)
        else:
            first = listing.line.to(gl.int64) * source.table_stride
            at = place + listing.skipped
            listed = entries(source, first, listing.stop, at, LAYOUT, NUMBER)
        return listed, is_second.to(gl.int32)


@gluon.jit
def in_pool(source, listed):
    """Physical rows that are listed; -1 where there is no such row."""
    return gl.where((listed >= 0) & (listed < source.pool_rows), listed, -1)
