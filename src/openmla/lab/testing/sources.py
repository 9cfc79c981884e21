"""Calls of `mla_attend`, as plain data, and whether a kernel computes them right.

Rows are DeepSeek-V4's or bf16, and tokens end at every edge of a block. Pages lie as engines have
them: all rows of a page, behind them their scales, a gap before the next page. Rows that nobody
sees, scales, gaps and entries that do not count may be poisoned: NaN in the cache, wild numbers in
lists and tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from openmla import LatentCache, Listed, Span, TurnBack, reference
from openmla.dispatch import plan_call
from openmla.errors import InvalidArgument, Unsupported
from openmla.formats import FORMATS
from openmla.kernels.launch import launch
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.lab.testing.memory.poison import differences
from openmla.lab.testing.result import Result, refusal
from openmla.operands import AttendOperands, Results, Weights
from openmla.records import decode
from openmla.sources import Source

ROW, SCALES = 576, 8  # bytes
GAP = 48  # bytes between pages
V41_NAMES = ("fp8_528_v41", "fp4_288")  # with scales in the row, and behind the rows of a page


@dataclass(frozen=True)
class SourcesCase:
    """One call; token t sees first[t] rows of its first source and second[t] of its second.

    >>> case = SourcesCase(kinds=("span",), first=(3, 65))
    >>> SourcesCase.from_json(case.to_json()) == case
    True
    >>> print(case)
    span fp8_584 pages of 64, 3 heads, rows (3, 65), sink, seed 0
    """

    kinds: tuple[str, ...] = ("list", "list")
    first: tuple[int, ...] = (0, 1, 63, 64, 65, 128, 64, 0)
    second: tuple[int, ...] = (65, 64, 0, 1, 63, 66, 64, 0)
    pages: tuple[int, ...] = (64, 2)
    """Rows of a page of each source."""
    formats: tuple[str, ...] = ("fp8_584", "fp8_584")
    heads: int = 3
    sink: bool = True
    lengths: bool = True
    """Whether lists have lengths; without them, entries that do not count are -1."""
    scale: float = 0.05
    seed: int = 0
    spare: int = 0
    """Pages of each pool that nobody sees, behind the others."""
    turned: int = 0
    """Columns of results that are turned back; 0: none."""

    @property
    def tokens(self) -> int:
        """Queries of the call."""
        return len(self.first)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(values: dict[str, Any]) -> SourcesCase:
        """The way back from `to_json`; raises InvalidArgument that names a wrong field."""
        case: SourcesCase = decode("case", SourcesCase, values)
        return case

    def __str__(self) -> str:
        parts = [
            f"{kind} {format} pages of {page}"
            for kind, format, page in zip(self.kinds, self.formats, self.pages, strict=False)
        ]
        seen = [str(rows) for rows in (self.first, self.second)[: len(self.kinds)]]
        parts += [f"{self.heads} heads", "rows " + " + ".join(seen)]
        parts += ["sink"] * self.sink + ["lengths"] * (self.lengths and "list" in self.kinds)
        parts += [f"{self.spare} spare pages"] * (self.spare > 0)
        parts += [f"{self.turned} columns turned back"] * (self.turned > 0)
        return ", ".join([*parts, f"seed {self.seed}"])


def generator_of(seed: int) -> torch.Generator:
    """Numbers that follow from a seed."""
    return torch.Generator().manual_seed(seed)


def v4_cache(pages: int, page_size: int, poisoned: bool, device: Any = "cpu") -> LatentCache:
    """Pages of 584 bytes a row with gaps; NaN or zeros."""
    step = -(-(page_size * (ROW + SCALES) + GAP) // 16) * 16
    raw = torch.full((pages, step), 0xFF if poisoned else 0, dtype=torch.uint8, device=device)
    data = raw.as_strided((pages, page_size, ROW), (step, ROW, 1))
    scales = raw.as_strided((pages, page_size, SCALES), (step, SCALES, 1), page_size * ROW)
    return LatentCache(data, scales, 512, 0, "fp8_584")


def bf16_cache(pages: int, page_size: int, poisoned: bool, device: Any = "cpu") -> LatentCache:
    """Pages of 512 bf16 columns a row with gaps; NaN or zeros."""
    step = page_size * 512 + GAP
    value = torch.nan if poisoned else 0.0
    raw = torch.full((pages, step), value, dtype=torch.bfloat16, device=device)
    return LatentCache(
        raw.as_strided((pages, page_size, 512), (step, 512, 1)), None, 512, 0, "bf16"
    )


def engine_cache(
    format: str, pages: int, page_size: int, poisoned: bool, device: Any = "cpu"
) -> LatentCache:
    """Pages of rows of any format, with gaps; bytes of ones, which are NaN somewhere in each block,
    or zeros."""
    bytes_of_rows = page_size * FORMATS[format].layout(512, 0).row_bytes
    step = -(-(bytes_of_rows + GAP) // 16) * 16
    raw = torch.full((pages, step), 0xFF if poisoned else 0, dtype=torch.uint8, device=device)
    return LatentCache.from_pages(raw, page_size=page_size, format=format, rope=0)


CACHES: dict[str, Callable[..., LatentCache]] = {
    "fp8_584": v4_cache,
    "bf16": bf16_cache,
    **{name: partial(engine_cache, name) for name in FORMATS if name.startswith(V41_NAMES)},
}


def ints(values: Any) -> Tensor:
    """int32, as lists, tables and lengths are."""
    return torch.tensor(values, dtype=torch.int32)


def _listed(case: SourcesCase, counts: tuple[int, ...], which: int, seed: int) -> Source:
    """Lists with duplicates, and entries that name nothing: -1, far below, past the pool."""
    draw = generator_of(seed)
    size = case.pages[which]
    pages = -(-200 // size)
    pool = CACHES[case.formats[which]](pages + case.spare, size, True)
    lists = torch.randint(0, pages * size, (case.tokens, max(*counts, 1)), generator=draw).int()
    strange = torch.rand(lists.shape, generator=draw)
    lists[strange < 0.06] = -1
    lists[strange < 0.04] = -(2**31)
    lists[strange < 0.02] = pool.rows
    if not case.lengths:
        for token, count in enumerate(counts):
            lists[token, count:] = -1
        return Listed(pool, lists)
    # What lies past a length is a row that must not be read.
    lengths = list(counts)
    lengths[0] = lengths[0] or -3
    longest = counts.index(max(counts))
    lengths[longest] = 2**31 - 1
    return Listed(pool, lists, ints(lengths))


def _span(case: SourcesCase, counts: tuple[int, ...], which: int, seed: int) -> Source:
    """Two requests whose pages lie in any order; pages and requests that are not there."""
    draw = generator_of(seed)
    size = case.pages[which]
    across = -(-(max(counts) + 40) // size) + 1
    pool = CACHES[case.formats[which]](2 * across + case.spare, size, True)
    table = torch.randperm(2 * across, generator=draw).int().view(2, across)
    request, begin, end = [], [], []
    for token, count in enumerate(counts):
        start = int(torch.randint(0, 40, (), generator=draw))
        line = token % 2 if count else (-1, 2, 0)[token % 3]
        request.append(line)
        begin.append(start)
        end.append(start + (count if line in (0, 1) else 30))
    begin[0], end[0] = -(2**31), counts[0]  # from before the first position on
    last = counts.index(max(counts))
    begin[last] = across * size - counts[last]
    end[last] = 2**31 - 1  # past the table
    table[1, 0] = -1
    table[0, 1] = pool.num_pages if size < 4 else 2**32 // size  # 0 in 32 bits, times its rows
    return Span(pool, table, *(ints(x) for x in (request, begin, end)))


KINDS = {"list": _listed, "span": _span}


def operands(case: SourcesCase, poisoned: bool = True) -> AttendOperands:
    """The call. What nobody sees is NaN if poisoned, else zeros; its rows are the same."""
    counts, sources = (case.first, case.second), []
    for i, kind in enumerate(case.kinds):
        seed = 1000 * i + case.seed
        source = KINDS[kind](case, counts[i], i, seed)
        used = torch.cat([source.seen(token) for token in range(case.tokens)])
        used = torch.unique(used)
        pool = source.rows
        assert isinstance(pool, LatentCache)
        fresh = CACHES[pool.format](pool.num_pages, pool.page_size, poisoned)
        seen = pool.rows - case.spare * pool.page_size
        values = torch.randn(seen, 512, generator=generator_of(seed + 1))[used]
        fresh.append(values, None, used)
        sources.append(_over(source, fresh))
    draw = generator_of(case.seed + 7)
    q = torch.randn(case.tokens, case.heads, 512, generator=draw).bfloat16()
    sink = torch.randn(case.heads, generator=draw) if case.sink else None
    turn = turn_back_of(case, poisoned) if case.turned else None
    return AttendOperands(q, tuple(sources), 512, Weights(case.scale, sink), turn)


POSITIONS = 40  # lines of the table of angles
STRANGE_POSITIONS = (-1, POSITIONS, -(2**31), 2**31 - 1)
"""What no table has: a query of each is turned by nothing."""


def turn_back_of(case: SourcesCase, poisoned: bool) -> TurnBack:
    """Any angles, in a table whose lines lie apart. The first query has position 0, every fourth
    one a position that the table does not have. Lines that no query names, and what lies around
    lines, are NaN if poisoned, else zeros."""
    draw = generator_of(case.seed + 13)
    angles = torch.rand(POSITIONS, case.turned // 2, generator=draw) * 6.28
    positions = torch.randint(0, POSITIONS, (case.tokens,), generator=draw)
    positions[0] = 0
    for i, token in enumerate(range(3, case.tokens, 4)):
        positions[token] = STRANGE_POSITIONS[(i + case.seed + 1) % len(STRANGE_POSITIONS)]
    named = torch.unique(positions[(positions >= 0) & (positions < POSITIONS)])
    table = _table_of_angles(case.turned, poisoned)
    table[named] = torch.cat([angles.cos(), angles.sin()], 1)[named]
    return TurnBack(table, positions if case.seed % 2 else positions.int())


def _table_of_angles(columns: int, poisoned: bool, device: Any = "cpu") -> Tensor:
    """Lines of a table with gaps, and lines before and behind them; NaN or zeros."""
    value = torch.nan if poisoned else 0.0
    return torch.full((POSITIONS + 2, columns + 8), value, device=device)[1:-1, 4:-4]


def on_device(op: AttendOperands, device: str) -> AttendOperands:
    """A copy of the call elsewhere; its pages keep their gaps."""
    sources: list[Source] = []
    for source in op.sources:
        pool = source.rows
        assert isinstance(pool, LatentCache)
        fresh = CACHES[pool.format](pool.num_pages, pool.page_size, True, device)
        fresh.data.copy_(pool.data)
        if fresh.scales is not None and pool.scales is not None:
            fresh.scales.copy_(pool.scales)
        sources.append(_moved(source, fresh, device))
    sink = None if op.weights.sink is None else op.weights.sink.to(device)
    weights, turn = replace(op.weights, sink=sink), op.turn_back
    if turn is not None:
        table = _table_of_angles(turn.columns, True, device).copy_(turn.table)
        turn = TurnBack(table, turn.positions.to(device))
    q = op.q.to(device)
    return replace(op, q=q, sources=tuple(sources), weights=weights, turn_back=turn)


def _over(source: Source, pool: LatentCache) -> Source:
    """A source's places in another pool."""
    if isinstance(source, Listed):
        return replace(source, rows=pool)
    return replace(source, cache=pool)


def _moved(source: Source, pool: LatentCache, device: str) -> Source:
    """A source's places in a pool on another device."""
    if isinstance(source, Listed):
        lengths = None if source.lengths is None else source.lengths.to(device)
        return Listed(pool, source.indices.to(device), lengths)
    places = (source.block_table, source.request, source.begin, source.end)
    return Span(pool, *(x.to(device) for x in places))


def new_results(op: AttendOperands) -> Results:
    """Outputs full of NaN."""
    shape, device = op.q.shape[:2], op.q.device
    out = torch.full((*shape, op.d_v), torch.nan, dtype=torch.bfloat16, device=device)
    return Results(out, torch.full(shape, torch.nan, device=device))


def checked(case: SourcesCase, backend: str, device: str, deep: bool) -> Result:
    """One call by a family's kernel, judged by the acceptance rule; `deep`: also whether rows that
    nobody sees change a bit."""
    op = operands(case)
    here = on_device(op, device)
    try:
        outcome, family = _ran(here, backend)
    except (Unsupported, InvalidArgument) as error:
        return Result("refused", message=refusal(error))
    found = judged(op, outcome)
    if found.status != "right" or not deep:
        return replace(found, family=family)
    clean, _ = _ran(on_device(operands(case, poisoned=False), device), backend)
    if problems := differences(clean, outcome):
        return Result("failed", "poison", "\n".join(problems), family)
    return replace(found, family=family, poisoned=True)


def judged(op: AttendOperands, outcome: Outcome) -> Result:
    """A result on any device against the definition; `op` on the CPU."""
    lse = None if outcome.lse is None else outcome.lse.cpu()
    verdict = compare(Outcome(outcome.out.cpu(), lse), reference.of(op), columns=op.d_v)
    if not verdict.ok:
        return Result("failed", "accuracy", verdict.report())
    return Result("right", bound=verdict.bound, lse=verdict.lse)


def _ran(op: AttendOperands, backend: str) -> tuple[Outcome, str]:
    """What the kernel wrote, and whose it is."""
    results = new_results(op)
    chosen = plan_call(op, results, backend)
    launch(chosen, op, results)
    return Outcome(results.out, results.lse), chosen.backend
