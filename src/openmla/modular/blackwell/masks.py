"""Which key tiles a query tile visits, and which keys of a tile its rows see.

A causal query at score row r sees keys 0..r. With 128-key tiles, a tile of 256 query rows that
starts at row 128 visits keys 0..383, hence 3 tiles, of which the first needs no masking:

>>> CausalMask.iters(BM=256, BN=128, score_row=128, num_keys=4096)
KeyTiles(total_iters=3, num_unmasked_end=1, partial_end=3)
"""

from typing import NamedTuple

from openmla.arithmetic import ceildiv

MASK_BITS = 32  # a mask word covers 32 keys; bit i is key col_start + i


class KeyTiles(NamedTuple):
    """Tiles [0, num_unmasked_end) need no mask, [num_unmasked_end, partial_end) do.

    ``num_unmasked_end`` counts what the diagonal alone leaves unmasked, so it exceeds
    ``total_iters`` when the keys end first; a loop stops at the smaller of the two.
    """

    total_iters: int
    num_unmasked_end: int
    partial_end: int


class CausalMask:
    """Row r sees keys 0..r. ``score_row`` is a row's position among the keys."""

    @staticmethod
    def iters(BM: int, BN: int, score_row: int, num_keys: int) -> KeyTiles:
        """Tiles for BM query rows that start at ``score_row``."""
        total = ceildiv(min(score_row + BM, num_keys), BN)
        return KeyTiles(total, (score_row + 1) // BN, total)

    @staticmethod
    def mask_bits(score_row: int, col_start: int) -> int:
        """The keys of a word that one row sees: ``mask_bits(32, 16) == 2**17 - 1``."""
        return low_bits(score_row + 1 - col_start)


class NullMask:
    """Every row sees every key; only the tile that the keys end in needs a mask."""

    @staticmethod
    def iters(BM: int, BN: int, score_row: int, num_keys: int) -> KeyTiles:
        """All tiles."""
        return KeyTiles(ceildiv(num_keys, BN), num_keys // BN, ceildiv(num_keys, BN))

    @staticmethod
    def mask_bits(score_row: int, col_start: int, num_keys: int) -> int:
        """The keys of a word that exist: ``mask_bits(0, 4090, 4096) == 0b111111``."""
        return low_bits(num_keys - col_start)


def low_bits(count: int) -> int:
    """A mask word with its lowest ``count`` bits set; none below 0, all from 32 on."""
    return (1 << min(max(count, 0), MASK_BITS)) - 1
