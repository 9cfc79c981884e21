"""Cases of the portable kernels at the edges of their blocks, and seeded defects that show there.

Tiles are 16 or 32 rows by 16 or 32 keys. 3 queries on 33 keys: the last block has one key, and the
first row sees 31, one less than a block. 33 queries: one row into a tile. 65 keys in ranges of at
least 32: the last range has one. The longest request is the last, so its line of the block table
ends where the table's memory does.

All tensors, workspaces too, lie against an inaccessible page: reading past one ends the process. A
defect is therefore looked for in a child.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import openmla.kernels.portable as package
from kernels.judging import as_built, ends_with_invalid
from kernels.mutants import load_mutant, once
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.memory.guard import GuardedMemory

LENS = {"q_lens": (3, 33), "k_lens": (33, 65)}
DENSE = Case("dense", 1, 32, 16, 32, **LENS)
LATENT = Case("latent", 1, 32, 16, 32, **LENS, kv="bf16", page_size=16, scale=0.2)
SPARSE = Case("sparse", 3, 32, 16, 32, q_lens=(2,), k_lens=(80,), topk=33, scale=0.2)
CASES = {
    "dense": DENSE,
    "dense, pages": replace(DENSE, rope="cache", kv="bf16", page_size=16),
    # One tile each; the second has a range for each of four slots where ranges have 16 keys.
    "dense, split": replace(DENSE, q_lens=(3, 2)),
    # More than the 16 rows of a tile that one program merges, in tiles of 32.
    "dense, split, wide": replace(DENSE, q_lens=(3, 21)),
    "dense, mask": replace(DENSE, key_mask="half"),
    "dense, grouped": replace(DENSE, heads=4, group=2, rope="per_head"),
    # The first row of a tile sees one key of a block, the last begins the next.
    "dense, window": replace(DENSE, window=18),
    "dense, window and pages": replace(
        DENSE, rope="cache", kv="bf16", page_size=16, window=18, key_mask="half"
    ),
    # Windows longer than a range, of which several are split.
    "dense, window, split": replace(DENSE, q_lens=(3, 2), k_lens=(165, 133), window=97),
    "latent": LATENT,
    "dense, fp32 out": replace(DENSE, q_lens=(3, 2), out="given", fp32_out=True),
    "latent, fp32 out": replace(LATENT, dtype="fp16", out="given", fp32_out=True),
    "latent, window": replace(LATENT, heads=3, q_lens=(3, 11), window=41),
    "latent, window, split": replace(LATENT, heads=3, q_lens=(3, 2), k_lens=(165, 133), window=97),
    "latent, window, invariant": replace(
        LATENT, heads=3, q_lens=(3, 11), window=41, invariant=True
    ),
    "latent, 3 heads": replace(LATENT, heads=3, q_lens=(3, 11)),
    # Four ranges and three: rows are few.
    "latent, split": replace(LATENT, heads=3, q_lens=(3, 2), k_lens=(97, 65)),
    # 42 rows in two tiles of four that there is room for; with an odd number of them a program that
    # takes its tile for another's would still meet every one.
    "latent, split, wide": replace(LATENT, heads=7, q_lens=(1, 6), k_lens=(97, 417)),
    # Ranges are fixed, and the second request has a row that sees one key of its last range.
    "latent, invariant": replace(LATENT, heads=3, q_lens=(3, 11), invariant=True),
    # Two ranges, of which the second has one key, that one row sees; and one.
    "latent, named ranges": replace(
        LATENT, heads=3, q_lens=(3, 2), k_lens=(129, 65), range_keys=128
    ),
    "sparse": SPARSE,
    # The first index that does not count is the last of a block of 16 or of 32.
    "sparse, ends": replace(SPARSE, topk=70),
}
SPLIT = [name for name in CASES if "split" in name]
WIDE = [name for name in CASES if "wide" in name]
"""These show their edges in tiles of 32 rows alone."""
Run = Callable[..., Outcome]  # of a built case, on the kernels of a launch module
GROUPS = 5  # the number of the tile with which every split request is a group of its own
FULL = 6  # the one whose workspace is filled by requests of 64 keys
WRONG = 3  # how a child says so; an exception is another matter


@dataclass(frozen=True)
class Defect:
    """In `file`.py, `old` becomes `new`; shown by `case` on tile number `tile`."""

    name: str
    file: str
    old: str
    new: str
    case: str
    tile: int = 0


SECOND = "if (parts > 1) | (row_start >= {0}):"
DEFECTS = [
    Defect(
        "a block but for one key needs no mask",
        "dense",
        "middle // BN * BN",
        "(middle + 1) // BN * BN",
        "dense",
    ),
    Defect(
        "the last row's last key is not visited",
        "dense",
        "q_len) - 1 + offset, k_stop)",
        "q_len) - 2 + offset, k_stop)",
        "dense",
    ),
    Defect(
        "one query into a tile is not a tile",
        "dense",
        SECOND.format("q_len"),
        SECOND.format("q_len - 1"),
        "dense",
    ),
    Defect(
        "one key into a range is not a range",
        "tiles",
        "tl.minimum((part + 1) * keys, k_len)",
        "tl.minimum((part + 1) * keys, k_len - 1)",
        "dense",
        3,
    ),
    Defect(
        "words of a mask are those of the next 32 keys",
        "dense",
        "at = start // 32 +",
        "at = start // 32 + 1 +",
        "dense, mask",
        2,
    ),
    Defect(
        "the last word of a mask is dropped",
        "dense",
        "(at < words)",
        "(at < words - 1)",
        "dense, mask",
    ),
    Defect(
        "a block of 16 keys begins with bit 0",
        "dense",
        "bit = start % 32 +",
        "bit = 0 +",
        "dense, mask",
    ),
    Defect(
        "only blocks that causal masks are masked",
        "dense",
        "if mask_ptr is not None:",
        "if mask_ptr is not None and loop == 2:",
        "dense, mask",
    ),
    Defect(
        "query heads take turns with the heads of K and V",
        "dense",
        "else head // KEY_GROUP",
        "else head % (heads // KEY_GROUP)",
        "dense, grouped",
    ),
    Defect(
        "a window has one key more",
        "tiles",
        "tl.maximum(seen, 0) - window, 0)",
        "tl.maximum(seen, 0) - window - 1, 0)",
        "dense, window",
    ),
    Defect(
        "a window has one key less, in latent form",
        "latent",
        "here[None, :] >= since[:, None]",
        "here[None, :] > since[:, None]",
        "latent, window",
    ),
    Defect(
        "keys before the window are read: they may be anything",
        "dense",
        "here_ok = here_ok & (here >= earliest)",
        "here_ok = here_ok & (here >= k_first)",
        "dense, window",
    ),
    Defect(
        "likewise, of pages",
        "latent",
        "here_ok = here_ok & (here >= earliest)",
        "here_ok = here_ok & (here >= k_first)",
        "latent, window",
    ),
    Defect(
        "what all rows see begins with the window of the first",
        "dense",
        "tl.minimum(row_start + BM, q_len) - 1 + offset, window)",
        "row_start + offset, window)",
        "dense, window",
    ),
    Defect(
        "likewise, in latent form",
        "latent",
        "latest = first_key(last_query + offset, window)",
        "latest = earliest",
        "latent, window",
    ),
    Defect(
        "ranges of a window are those of all keys where they are merged",
        "split",
        "k_len -= window_origin(q_len, k_len, window, KEY_STEP)",
        "k_len -= 0",
        "dense, window, split",
        3,
    ),
    Defect(
        "likewise, in latent form",
        "split",
        "k_len -= window_origin(q_len, k_len, window, KEY_STEP)",
        "k_len -= 0",
        "latent, window, split",
        3,
    ),
    Defect(
        "ranges of a window begin with the first key",
        "latent",
        "k_first += origin",
        "k_first += 0",
        "latent, window, split",
        3,
    ),
    Defect(
        "a block of latent rows but for one needs no mask",
        "latent",
        "middle // BN * BN",
        "(middle + 1) // BN * BN",
        "latent",
        2,
    ),
    Defect(
        "the last head's last key is not visited",
        "latent",
        "last = (tl.minimum(row_start + BM, rows) - 1) // heads",
        "last = (tl.minimum(row_start + BM, rows) - 2) // heads",
        "latent",
    ),
    Defect(
        "one row into a tile is not a tile",
        "latent",
        SECOND.format("rows"),
        SECOND.format("rows - 1"),
        "latent, 3 heads",
    ),
    Defect(
        "the last page is not in the pool",
        "rows",
        "cut(page, line.last_page)",
        "cut(page, line.last_page - 1)",
        "latent",
        2,
    ),
    Defect(
        "the last entry of a line is not in the table",
        "rows",
        "entries - 1)",
        "entries - 2)",
        "dense, pages",
        2,
    ),
    Defect(
        "an index that does not count is taken for one that does",
        "sparse",
        "tl.where(ok, count, at)",
        "tl.where(ok, count, at + 1)",
        "sparse, ends",
    ),
    Defect(
        "likewise, in a block of 32",
        "sparse",
        "middle = good // BN * BN",
        "middle = (good + 1) // BN * BN",
        "sparse, ends",
        2,
    ),
    Defect(
        "one index into a block is not a block",
        "sparse",
        "            end = count\n",
        "            end = count - 1\n",
        "sparse",
    ),
    Defect(
        "every program that merges has a tile of its own",
        "split",
        "unit = program // blocks % most_units",
        "unit = program % most_units",
        "dense, split, wide",
        4,
    ),
    Defect(
        "likewise, in latent form",
        "split",
        "unit = program // blocks % most_units",
        "unit = program % most_units",
        "latent, split, wide",
        4,
    ),
    Defect(
        "every program merges the first rows of its tile",
        "split",
        "place = program % blocks * ROWS",
        "place = program % 1 * ROWS",
        "latent, split, wide",
        4,
    ),
    Defect(
        "the first group is merged again",
        "split",
        "sequence = first_sequence + local",
        "sequence = local",
        "dense",
        GROUPS,
    ),
    Defect(
        "likewise, in latent form",
        "split",
        "sequence = first_sequence + local",
        "sequence = local",
        "latent, split",
        GROUPS,
    ),
    Defect(
        "partial results have a slot less than ranges",
        "launch",
        "part_out = op.q.new_empty(space.group * slots,",
        "part_out = op.q.new_empty(space.group * slots - 1,",
        "dense, split",
        FULL,
    ),
    Defect(
        "maxima and sums of ranges have a slot less",
        "launch",
        "part_state = op.q.new_empty(space.group * slots,",
        "part_state = op.q.new_empty(space.group * slots - 1,",
        "dense, split",
        FULL,
    ),
    Defect(
        "fixed ranges have a row less",
        "launch",
        "rows = (space.slots * space.tokens * op.q.shape[1],)",
        "rows = (space.slots * space.tokens * op.q.shape[1] - 1,)",
        "latent, invariant",
        3,
    ),
    Defect(
        "ranges are not as long as the caller says",
        "launch",
        "fixed=plan.config.split.keys_of_range",
        "fixed=latent_split.FIXED_RANGE",
        "latent, named ranges",
        3,
    ),
]


def built_case(name: str, block: int) -> BuiltCase:
    """Every tensor ends where its memory does, and is NaN where the case does not address it."""
    change = partial(ends_with_invalid, block=block) if name == "sparse, ends" else as_built
    return change(build(CASES[name], memory=GuardedMemory("end")))


def problems_of(name: str, block: int, run: Run) -> list[str]:
    """What is wrong with a case at an edge."""
    outcome = run(built_case(name, block))
    return [f"{name}: {problem}" for problem in judge(built_case(name, block), outcome).problems]


def unfound(defect: Defect, block: int, run: Run) -> list[str]:
    """The defect's name, unless a child that runs its case gets wrong numbers or is killed."""
    folder = Path(tempfile.mkdtemp())
    mutant = load_mutant(package, defect.file, once(defect.old, defect.new), "launch", folder)
    child = os.fork()
    if child == 0:
        status = 0
        try:
            status = WRONG if problems_of(defect.case, block, partial(run, launch=mutant)) else 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [] if status in (WRONG, -signal.SIGSEGV) else [f"{defect.name}: not found"]
