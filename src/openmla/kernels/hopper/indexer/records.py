"""Records of the indexer's kernels on Hopper; kernels/gluon/indexer_records.py has more."""

from typing import Any, NamedTuple


class Registers(NamedTuple):
    """Registers of a thread in the partitions of the scores kernel."""

    consumer: int
    producer: int
    converter: int = 0
    """Registers of the partition that converts FP4 keys."""


class Scores(NamedTuple):
    """Operands of the scores of many queries, and what its consumers share."""

    smem: Any
    """SharedTiles."""
    bars: Any
    """ScoresBarriers."""
    windows: Any
    """WindowPointers."""
    weights: Any
    """Matrix."""
    out: Any
    """Matrix."""
    total_q: Any
    columns: Any
    """Columns of the scores that can be written."""


class DecodeScoresConfig(NamedTuple):
    """Constants of the scores of requests with few queries (CFG), chosen by their plan."""

    consumers: int
    """Warp-groups that divide a work item's blocks of keys among them."""
    queries: int
    """Queries of a tile, 1 or 2; a work item is those of one request."""
    block_keys: int
    """Keys of one stage."""
    key_stages: int
    """A multiple of the consumers, so that a stage is always the same consumer's."""
    query_stages: int
    group: int
    """Requests whose blocks are added up at once: a multiple of 32."""


class DecodeScores(NamedTuple):
    """Operands of that kernel and what its partitions share."""

    smem: Any
    """SharedTiles."""
    bars: Any
    """ScoresBarriers."""
    requests: Any
    """RequestPointers."""
    total_q: Any
    columns: Any
    """Columns of the scores that can be written."""
    part: Any
    """1 / programs: what a program has of all blocks."""
    zero: Any
    """0, which the compiler does not know: loops that it bounds are not unrolled."""


class RequestPointers(NamedTuple):
    """Offsets and lengths of the requests, from which windows follow."""

    cu_ptr: Any
    lengths_ptr: Any
    batch: Any
    reach: Any
    """The largest power of two that is at most `batch`: where a bisection begins."""
    first_query: Any
    """Number of this launch's first query in the offsets."""
    least: Any
    """Queries that see at most so many keys need no scores."""


class Group(NamedTuple):
    """Neighboring requests, one element each: what they have, and how much work that is."""

    request: Any
    """The line of the block table."""
    start: Any
    """The first query."""
    stop: Any
    """The query after the last."""
    end: Any
    """The key after the last that its last query sees; may be negative, or past the columns."""
    blocks: Any
    """Blocks of keys of all its tiles of queries."""


class KeyRange(NamedTuple):
    """Blocks of keys of one request."""

    first: Any
    """The first key, a multiple of the keys of a block."""
    last: Any
    """The key after the request's last; may be beyond the blocks."""
    blocks: Any


class TileWindows(NamedTuple):
    """Windows of the queries of one tile; a tile of fewer than four repeats the first."""

    first: Any
    second: Any
    third: Any
    fourth: Any


class Fp4Tiles(NamedTuple):
    """Rings of keys that are FP4, beside SharedTiles: as they are loaded, and what was found."""

    tiles: Any
    """e4m3 tiles of 64 keys that they become: SharedTiles.k."""
    codes: Any
    """e2m1, two columns to a byte."""
    exponents: Any
    """The exponents of a key, in one word."""
    wide: Any
    """The exponents of keys that are wide, 0 of all others (fp4_keys.py)."""
    any_wide: Any
    """For each warp that converts, whether it found one in the stage."""
