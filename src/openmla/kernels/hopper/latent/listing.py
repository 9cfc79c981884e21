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
from openmla.kernels.hopper.latent.source import entries, list_of, whole_blocks


@gluon.jit
def listing_of(source, own, tile):
    """The `Listing` of a token, or its `TwoListings` where there is a second source. own: its
    `TokenList`, or the `WorkItem`; tile: its `ListedTile`."""
    if source.second_keys is None:
        return Listing(first_entry=own.first_entry, stop=own.stop)
    else:
        second = list_of(source.second, tile.token)
        start = own.skipped + whole_blocks(own.stop - own.skipped)
        return TwoListings(
            first_entry=own.first_entry,
            stop=own.stop,
            second_start=start,
            second_entry=second.first_entry,
            second_shift=second.skipped - start,
            second_stop=second.stop,
        )


@gluon.jit
def either(condition, a, b):
    """Of two listings the first where a condition holds, else the second."""
    first_entry = gl.where(condition, a.first_entry, b.first_entry)
    stop = gl.where(condition, a.stop, b.stop)
    if len(a) == 2:
        return Listing(first_entry=first_entry, stop=stop)
    else:
        return TwoListings(
            first_entry=first_entry,
            stop=stop,
            second_start=gl.where(condition, a.second_start, b.second_start),
            second_entry=gl.where(condition, a.second_entry, b.second_entry),
            second_shift=gl.where(condition, a.second_shift, b.second_shift),
            second_stop=gl.where(condition, a.second_stop, b.second_stop),
        )


@gluon.jit
def look_up(source, listing, place, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """(what is listed for NUMBER places of a block, 1 if by the second source, else 0)."""
    if source.second_keys is None:
        return entries(source, listing.first_entry, listing.stop, place, LAYOUT, NUMBER), 0
    else:
        is_second = place >= listing.second_start
        listed = gl.full([NUMBER], -1, gl.int32, LAYOUT)
        if is_second:
            at = place + listing.second_shift
            first, stop = listing.second_entry, listing.second_stop
            listed = entries(source.second, first, stop, at, LAYOUT, NUMBER)
        else:
            listed = entries(source, listing.first_entry, listing.stop, place, LAYOUT, NUMBER)
        return listed, is_second.to(gl.int32)


@gluon.jit
def in_pool(source, listed):
    """Physical rows that are listed; -1 where there is no such row."""
    return gl.where((listed >= 0) & (listed < source.pool_rows), listed, -1)
