"""Splitting the keys of a short chunk on a long context, so that no SM stands idle.

A chunk of 64 queries and 16 heads makes 16 tiles for 132 SMs. With 131072 keys each tile's work can
be cut into ranges of keys, computed by different SMs and merged through their LSE.

A request's bits must not depend on its neighbors, so the number of ranges follows from the
request's own q_len and k_len and from nothing else: not the batch, not the number of tokens.
"""

from dataclasses import dataclass

from openmla.arithmetic import ceildiv, round_up
from openmla.problem import Problem

# A partial result is written and read once more. It may cost this fraction of the K and V traffic.
MERGE_SHARE = 16
MIN_KEYS = 1024
TILE_ROWS = 64
KEY_STEP = 128  # ranges are multiples of it, so that no block of keys is cut
FP32 = 4  # bytes
# Partial results of a launch; requests beyond it go in further groups.
PARTIAL_CAP = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SplitRule:
    """When and how the keys of a request are split.

    >>> rule = SplitRule(heads_tiles=16, tokens_per_tile=64, min_keys=2048, sm_count=132, d_v=128)
    >>> rule.splits(q_len=64, k_len=131072), rule.keys_per_split(64, 131072)
    (16, 8192)
    >>> rule.splits(q_len=64, k_len=2048), rule.splits(q_len=4096, k_len=131072)
    (1, 1)
    """

    heads_tiles: int
    """Tiles that one block of tokens makes: one per head, or per 64 heads in the latent form."""
    tokens_per_tile: int
    min_keys: int
    """No range is shorter, or merging would cost too much."""
    sm_count: int
    d_v: int
    rows_per_tile: int = TILE_ROWS

    @property
    def programs(self) -> int:
        """Most ranges of all tiles of a request that is split: two per SM."""
        return 2 * self.sm_count

    def tiles(self, q_len: int) -> int:
        """Tiles of a request."""
        return self.heads_tiles * ceildiv(q_len, self.tokens_per_tile)

    def splits(self, q_len: int, k_len: int) -> int:
        """Ranges of keys: 1 unless the request alone leaves at least half of the SMs idle."""
        tiles = self.tiles(q_len)
        if tiles == 0 or 2 * tiles > self.sm_count:
            return 1
        return max(1, min(k_len // self.min_keys, self.programs // tiles))

    def keys_per_split(self, q_len: int, k_len: int) -> int:
        """Keys of a range, in whole steps; the last may be shorter."""
        return round_up(ceildiv(max(k_len, 1), self.splits(q_len, k_len)), KEY_STEP)

    @property
    def longest_split_chunk(self) -> int:
        """The most queries a request may have and still be split."""
        return self.sm_count // 2 // self.heads_tiles * self.tokens_per_tile

    def workspace_bytes(self, requests: int) -> int:
        """Partial outputs and LSEs, fp32: at most two waves of tiles per request, and the cap."""
        if not self.longest_split_chunk:
            return 0
        one = self.programs * self.rows_per_tile * (self.d_v + 1) * FP32
        return min(requests * one, PARTIAL_CAP)

    def explain(self, q_len: int, k_len: int, requests: int) -> str:
        """The rule in numbers, for a request of q_len queries and k_len keys."""
        if not self.longest_split_chunk:
            return (
                f"split-KV: never, one block of tokens makes {self.heads_tiles} tiles, more than "
                f"half of {self.sm_count} SMs"
            )
        count, keys = self.splits(q_len, k_len), self.keys_per_split(q_len, k_len)
        here = f"{count} ranges of {keys} keys" if count > 1 else "not split"
        return (
            f"split-KV: requests of up to {self.longest_split_chunk} queries, at least "
            f"{self.min_keys} keys a range, by the request's own lengths; {q_len} queries x "
            f"{k_len} keys: {self.tiles(q_len)} tiles on {self.sm_count} SMs, {here}; workspace "
            f"at most {self.workspace_bytes(requests)} bytes"
        )


def least_keys_per_split(row_bytes: int, d_v: int) -> int:
    """The shortest range worth a merge, a power of two; from the dims alone.

    A tile's partial result is 64 x d_v x 4 bytes, written and read: 64 x 128 x 4 x 2 = 65536 for
    DeepSeek-V3. At 640 bytes of K and V per key, 16 times that much is 1638 keys: 2048.

    >>> least_keys_per_split(row_bytes=640, d_v=128)
    2048
    """
    merge_bytes = 2 * TILE_ROWS * d_v * FP32
    keys = ceildiv(MERGE_SHARE * merge_bytes, row_bytes)
    return max(MIN_KEYS, 1 << (keys - 1).bit_length())


def split_lines(rule: SplitRule | None, problem: Problem) -> list[str]:
    """The rule for requests of mean length; nothing where there is none."""
    if rule is None:
        return []
    requests = max(problem.batch, 1)
    queries = ceildiv(problem.total_q, requests)
    keys = problem.keys_seen(queries, ceildiv(problem.total_k, requests))
    return [rule.explain(queries, keys, requests)]


def query_tile_lines(problem: Problem, rows: int) -> list[str]:
    """Why blocks of one query tile of `rows` rows were preferred to blocks of two."""
    requests = max(problem.batch, 1)
    mean = ceildiv(problem.total_q, requests)
    if mean <= rows:
        return [f"1Q: {mean} queries a request fit one tile of {rows} rows"]
    blocks = (ceildiv(problem.total_q, 2 * rows) + requests - 1) * problem.heads
    return [f"1Q: two tiles a block would make {blocks} blocks, too few"]
