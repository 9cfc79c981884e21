"""Runs portable kernels in Triton's interpreter: `TRITON_INTERPRET=1 python interpreted.py PART …`.

A process of its own, because triton must be imported with that variable set. Prints one JSON line
per problem, and a last line with the counts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice, product
from types import ModuleType
from unittest import mock

import torch
import triton
import triton.language as tl

from kernels.chunks import Prompt, new_results, other_bits
from kernels.far_memory import FarMemory
from kernels.portable import cache_parts, edges, interpreter
from kernels.shared_keys import with_shared_keys
from kernels.wild_values import KINDS, with_wild_values
from openmla.cache import LatentCache
from openmla.formats import FORMATS
from openmla.kernels.portable import launch, plan
from openmla.kernels.portable.family import PORTABLE
from openmla.kernels.portable.plan import select_portable_config
from openmla.kernels.portable.tiles import latent_ranges, split_count
from openmla.lab.testing.build import BuiltCase, Outcome, build
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.draw import random_case
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.guard import EDGES, GuardedMemory
from openmla.lab.testing.memory.poison import differences, poison_problems
from openmla.operands import LatentOperands, Results
from openmla.planning import Plan, latent_split, split
from openmla.planning.dequantize import PLAIN, CacheRead
from openmla.planning.target import target_by_name

MOST_WORK = 2_000_000  # multiply-adds of a case; larger ones take minutes here


@dataclass(frozen=True)
class Tile:
    """What is other than planned, and how small a split range may be."""

    BM: int
    BN: int
    target: str = "h200"
    bulk_copies: bool = False
    branches: bool = False
    min_keys: int = 1024
    group_heads: int = 4
    dequantizes: bool = False
    workspace: int = split.PARTIAL_CAP
    """Bytes of the partial results of a group of split requests."""
    sm_count: int = 0
    """SMs of the chip; 0: as many as it has."""


# a100 reads e4m3 by its bits; 32 keys make a range, so that short requests are split as well.
TILES = (
    Tile(16, 16),
    Tile(32, 16, "a100", bulk_copies=True),
    Tile(16, 32, branches=True),
    Tile(16, 16, "a100", min_keys=32, dequantizes=True),
    Tile(32, 32, bulk_copies=True, min_keys=32, group_heads=2),
)
# Every request is a group of its own.
GROUPS = Tile(16, 16, min_keys=32, workspace=1)
# A request of one tile is split into four ranges, as many as a workspace has slots for.
FULL = Tile(16, 16, min_keys=16, sm_count=2)


def run(built: BuiltCase, tile: Tile, launch: ModuleType = launch) -> Outcome:
    """Launch a built case on outputs full of NaN."""
    case, q = built.case, built.operands.q
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    dtype = torch.float32 if case.fp32_out else dtype
    shape = (*q.shape[:2], case.d_v)
    gaps = {"strided": case.out == "strided", "aligned": case.out == "aligned"}
    out = built.memory.new(shape, dtype, **gaps)
    by_head = (q.shape[1], q.shape[0])  # heads are the rows of these two: any strides are served
    lse = built.memory.new(by_head, torch.float32).t() if case.return_lse else None
    logits = built.memory.new(by_head, torch.float32).t() if case.return_max_logits else None
    results = Results(out, lse, logits)
    for rows in (out, lse, logits):
        if rows is not None:
            rows.fill_(torch.nan)
    split.PARTIAL_CAP = tile.workspace
    _shorten_ranges(tile.min_keys)
    with _workspaces_in(built.memory):
        calls = list(launch.calls(_plan(built, results, tile), built.operands, results))
    for call in calls:
        call.run()
    return Outcome(out, lse, logits)


@contextmanager
def _workspaces_in(memory: Memory) -> Iterator[None]:
    """Between inaccessible pages, where the tensors of the case are."""
    if not isinstance(memory, GuardedMemory):
        yield
        return

    def new_empty(x: torch.Tensor, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return memory.new(shape, dtype)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield


def _shorten_ranges(min_keys: int) -> None:
    """Both rules with other numbers: rows are few where tensors are small."""
    small = min_keys < Tile.min_keys
    plan.least_keys_per_split = lambda row_bytes, d_v: min_keys
    split.KEY_STEP = min(min_keys, 128)
    latent_split.MIN_RANGE = min_keys if small else 512
    latent_split.SHORT = 0 if small else 4096
    latent_split.KEYS_PER_ROW = min_keys // 8 if small else 64
    latent_split.STEP = min(min_keys, 128)
    latent_split.FIXED_RANGE = min_keys if small else 2048


def _plan(built: BuiltCase, results: Results, tile: Tile) -> Plan:
    """The planner's widths with the tile of a test."""
    problem = built.operands.problem(results)
    config = select_portable_config(problem, target_by_name(tile.target))
    has_cache = getattr(built.operands, "cache", None) is not None
    changed = replace(
        config,
        BM=tile.BM,
        BN=tile.BN,
        bulk_copies=tile.bulk_copies,
        branches=tile.branches,
        group_heads=tile.group_heads,
        sm_count=tile.sm_count or config.sm_count,
        cache_read=_workspace(built) if tile.dequantizes and has_cache else PLAIN,
    )
    return Plan(problem, tile.target, "portable", "tiled", changed)


def _workspace(built: BuiltCase) -> CacheRead:
    """Dequantize every FP8 cache, however small."""
    cache = built.operands.cache
    fp8 = isinstance(cache, LatentCache) and cache.format != "bf16"
    return CacheRead("workspace", cache.rows, 2 * cache.width, 0) if fp8 else PLAIN


def cases(first: int, number: int, most_work: int) -> Iterator[tuple[int, Case, Tile]]:
    """Usable random cases from seed `first` on, with the tiles taking turns."""
    found = 0
    for seed in count(first):
        case = random_case(seed)
        if case.dtype != "fp32" and case.cost < most_work and _is_served(case):
            yield seed, case, TILES[found % len(TILES)]
            found += 1
        if found == number:
            return


def _is_served(case: Case) -> bool:
    """Whether the planner would let the call through; of one source it does."""
    if not case.sources:
        return True
    built = build(case)
    tiled = PORTABLE.kernel_named("tiled")
    return not tiled.serves.why_not(built.operands.problem(Results(built.new_out())))


def fuzz(first: int, number: int) -> Iterator[list[str]]:
    """The acceptance rule, first on a split request whose tile is merged by two programs, with rope
    that fills no tile."""
    built = build(replace(edges.LATENT, d_rope=24, q_lens=(20,), k_lens=(97,)))
    yield list(judge(built, run(built, TILES[4])).problems)
    for seed, case, tile in cases(first, number, MOST_WORK):
        built = build(case)
        problems = judge(built, run(built, tile)).problems
        yield [f"seed {seed}, {case}, {tile}: {problem}" for problem in problems]


def shared(first: int, number: int) -> Iterator[list[str]]:
    """Sequences whose keys begin anywhere, so that they share some."""
    # Split requests: the kernel that merges must count the same keys.
    built = with_shared_keys(build(edges.DENSE), first, all_keys=True)
    problems = judge(built, run(built, TILES[3])).problems
    built = with_shared_keys(build(edges.DENSE), 1)  # both sequences begin after the first key
    yield [*problems, *judge(built, run(built, TILES[0])).problems]
    drawn = cases(first, 100 * number, MOST_WORK // 4)
    for seed, case, tile in islice((x for x in drawn if x[1].form == "dense"), number - 1):
        built = with_shared_keys(build(case), seed)
        problems = judge(built, run(built, tile)).problems
        yield [f"seed {seed}, {case}, {tile}: {problem}" for problem in problems]


def packed(first: int, number: int) -> Iterator[list[str]]:
    """Rows of several types, at any address or at multiples of 16 bytes, poison around them."""
    for name, format in FORMATS.items():
        for latent, rope in format.widths:
            rows = Case(
                "latent",
                2,
                latent,
                rope,
                latent,
                q_lens=(3,),
                k_lens=(21,),
                kv=name,
                page_size=8,
                spare=1,
                scale=0.05,
                seed=first,
            )
            drawn = [rows, replace(rows, form="sparse", topk=19, index_kind="mixed")]
            if rope:
                dense = replace(rows, form="dense", d_nope=32, d_v=32, rope="cache", scale=None)
                drawn.append(dense)
            # Rows of bytes alone are read by the same code wherever they begin.
            words = format.bf16_columns or (format.scales_in_row and format.scale == "fp32")
            layouts = ("aligned", "strided") if words else ("strided",)
            for case in (replace(c, layout=x) for c in drawn for x in layouts):
                for tile in TILES[1 : number + 1]:
                    problems = [*judge(build(case), run(build(case), tile)).problems]
                    problems += poison_problems(case, partial(run, tile=tile))
                    yield [f"{case}, {tile}: {problem}" for problem in problems]


def poison(first: int, number: int) -> Iterator[list[str]]:
    """NaN, Inf and 0xFF in memory that a problem does not address change nothing."""
    for seed, case, tile in cases(first, number, MOST_WORK // 20):
        problems = poison_problems(case, partial(run, tile=tile))
        yield [f"seed {seed}, {case}, {tile}: {problem}" for problem in problems]


def far(first: int, number: int) -> Iterator[list[str]]:
    """Rows past element 2^31. A 32-bit offset ends the process, or reads other rows."""
    for seed, case, tile in cases(first, number, MOST_WORK // 20):
        built = build(case, memory=FarMemory(seed % 2))
        problems = judge(build(case), run(built, tile)).problems
        yield [f"seed {seed}, {case}, {tile}: {problem}" for problem in problems]


def wild(first: int, number: int) -> Iterator[list[str]]:
    """Offsets, lengths, tables and lists that hold anything, between inaccessible pages: whoever
    leaves a tensor ends the process."""
    fp8 = replace(edges.LATENT, d_nope=512, d_rope=64, d_v=512, kv="fp8_656", page_size=16)
    drawn = {
        **edges.CASES,
        "latent, fp8": fp8,
        "sparse, pages": replace(
            edges.SPARSE, kv="bf16", page_size=16, topk_lengths="ragged", q_scale=False
        ),
    }
    for name, case in drawn.items():
        for kind, edge in product(KINDS, EDGES):
            for seed in range(first, first + number):
                built = build(case, memory=GuardedMemory(edge))
                if name == "dense, mask" or (name == "dense" and seed % 2):
                    built = with_shared_keys(built, seed)
                run(with_wild_values(built, kind, seed), TILES[seed % len(TILES)])
        yield []


def used(first: int, number: int) -> Iterator[list[str]]:
    """A query that is not finite shows in its row and in no other. Its scores are all NaN, of which
    the largest is no number."""
    for name, case in edges.CASES.items():
        problems = []
        for tile, value in product(TILES[first : first + number], (math.nan, math.inf)):
            built = build(case)
            q = built.operands.q
            q[0, 0, 1] = q[q.shape[0] // 2, -1, 0] = value
            found = judge(built, run(built, tile)).problems
            problems += [f"{name}, {value}, {tile}: {problem}" for problem in found]
        yield problems


def neighbors(first: int, number: int) -> Iterator[list[str]]:
    """A request alone has the bits it has in a batch, split or not."""
    tile = Tile(16, 16, min_keys=16)
    for form in ("dense", "latent"):
        for seed in range(first, first + number // 2):
            lens = {"q_lens": (seed % 7 + 1,), "k_lens": (50 + 30 * (seed % 3),)}
            alone = Case(form, 2, 32, 16, 32, **lens, kv="bf16", page_size=16, scale=0.2, seed=seed)
            yield _beside_others(alone, tile)


def chunks(first: int, number: int) -> Iterator[list[str]]:
    """However an invariant prompt is cut, its rows have the same bits: in parts, token by token,
    beside others, in pages of any size, and with a workspace for few tokens."""
    parts = ((0, 20), (20, 33), (32, 33), (47, 48), (48, 49), (60, 70), (69, 70), (0, 1))
    for tile in (Tile(16, 16, min_keys=32), Tile(32, 16, min_keys=16, branches=True))[:number]:
        for heads, window in ((1, 0), (3, 0), (3, 40)):
            prompt = Prompt.of(tokens=70, heads=heads, d_v=32, rope=16, seed=first)

            def call(
                *parts: tuple[int, int], page: int = 16, of: Prompt = prompt, window: int = window
            ) -> LatentOperands:
                return replace(of.call(*parts, page=page), window=window)

            whole = _planned(call((0, 70)), tile)
            found = [other_bits(whole, _planned(call(*parts, page=5), tile), parts)]
            for part in parts[1::3]:
                found.append(other_bits(whole, _planned(call(part), tile), (part,)))
            latent_split.PARTIAL_CAP = 4 * 34 * heads * 5 * 7  # bytes of about 7 tokens
            found.append(other_bits(whole, _planned(call(*parts), tile), parts))
            latent_split.PARTIAL_CAP = split.PARTIAL_CAP
            plain = _planned(replace(call((0, 70)), invariant=False), tile)
            found.append([] if other_bits(whole, plain, ((0, 70),)) else [(0, 70)])
            name = f"{heads} heads, window {window}, {tile}"
            yield [f"{name}: {part}" for wrong in found for part in wrong]


def _planned(op: LatentOperands, tile: Tile) -> Results:
    """A call of the latent form on outputs full of NaN."""
    _shorten_ranges(tile.min_keys)
    results = new_results(op)
    problem = op.problem(results)
    config = select_portable_config(problem, target_by_name(tile.target))
    config = replace(config, BM=tile.BM, BN=tile.BN, branches=tile.branches)
    chosen = Plan(problem, tile.target, "portable", "tiled", config)
    for call in launch.calls(chosen, op, results):
        call.run()
    return results


@triton.jit
def ranges_kernel(
    got_ptr, rows, keys, RULE: tl.constexpr, PROGRAMS: tl.constexpr, MIN_KEYS: tl.constexpr
):
    """The device's rules for one request; in the dense form, `rows` are tiles."""
    parts, each = latent_ranges(rows, keys, RULE)
    tl.store(got_ptr, parts)
    tl.store(got_ptr + 1, each)
    tl.store(got_ptr + 2, split_count(rows, keys, PROGRAMS, MIN_KEYS))


def ranges(first: int, number: int) -> Iterator[list[str]]:
    """tiles.latent_ranges and LatentSplit are the same function, split_count and SplitRule too."""
    rule, got = latent_split.LatentSplit(16, 512), torch.zeros(3, dtype=torch.int32)
    dense = split.SplitRule(1, 1, min_keys=512, sm_count=132, d_v=128)
    constants = latent_split.constants(), dense.programs, dense.min_keys
    for rows in (1, 16, 130, 2000, 2**24 * 128 - 1)[first : first + number]:
        for keys in (0, 1, 513, 4500, 8192, 32768, 65537, 2**20):
            ranges_kernel[(1,)](got, rows, keys, *constants)
            want = [rule.ranges(rows, keys), rule.keys_of_range(rows, keys)]
            want.append(dense.splits(rows, keys))
            if got.tolist() != want:
                yield [f"{rows} rows, {keys} keys: {got.tolist()}, not {want}"]
        yield []


def _beside_others(alone: Case, tile: Tile) -> list[str]:
    """Put the same tensors between two other requests by giving them as part of a batch."""
    more = replace(
        alone, q_lens=(9, *alone.q_lens, 3), k_lens=(40, *alone.k_lens, 20), seed=alone.seed + 1
    )
    single, batch = build(alone), build(more)
    a, b = single.operands, batch.operands
    q_len, k_len = alone.q_lens[0], alone.k_lens[0]
    b.q[9 : 9 + q_len] = a.q
    if alone.form == "dense":
        for name in ("k_nope", "k_rope", "v"):
            getattr(b, name)[40 : 40 + k_len] = getattr(a, name)
    else:
        for key in range(k_len):
            page, place = divmod(key, 16)
            source = a.cache.data[a.block_table[0, page], place]
            b.cache.data[b.block_table[1, page], place] = source
    got = run(batch, tile)
    mine = Outcome(got.out[9 : 9 + q_len], got.lse[9 : 9 + q_len])
    return [f"{alone}: {problem}" for problem in differences(mine, run(single, tile))]


def light(first: int, number: int) -> Iterator[list[str]]:
    """A weight of exp(-24) counts where the heavy key's value is 0: FP8 never becomes fp16."""
    for form in ("dense", "sparse"):
        lens = {"q_lens": (1,), "k_lens": (2,)}
        case = Case(
            form,
            1,
            16,
            0,
            16,
            dtype="e4m3",
            rope="none",
            causal=False,
            **lens,
            topk=2,
            scale=1.0,
            seed=first,
        )
        built = build(case)
        op = built.operands
        op.q.fill_(0.0)
        op.q[..., 0] = 24.0
        if form == "dense":
            op.k_nope.fill_(0.0)
            op.v.fill_(0.0)
            op.k_nope[0, :, 0], op.v[1] = 1.0, 1.0
        else:
            op.cache.fill_(0.0)
            op.cache[0, 0], op.cache[1, 1:] = 1.0, 1.0
            op.indices.copy_(torch.tensor([[0, 1]]))
        last = float(run(built, TILES[0]).out[0, 0, -1])
        right = abs(last / math.exp(-24) - 1) < 0.01
        yield [] if right else [f"{form}: got {last}"]


def at_edges(first: int, number: int) -> Iterator[list[str]]:
    """Cases at the edges of blocks of 16 and 32 keys and of ranges."""
    for name in list(edges.CASES)[first : first + number]:
        usual = (*TILES[1:4], GROUPS, *([FULL] if name in edges.SPLIT else []))
        for tile in (TILES[4],) if name in edges.WIDE else usual:
            yield edges.problems_of(name, tile.BN, partial(run, tile=tile))


def defects(first: int, number: int) -> Iterator[list[str]]:
    """Every seeded defect is found."""
    for defect in edges.DEFECTS[first : first + number]:
        tile = (*TILES, GROUPS, FULL)[defect.tile]
        yield edges.unfound(defect, tile.BN, partial(run, tile=tile))


PARTS: dict[str, Callable[[int, int], Iterator[list[str]]]] = {
    "fuzz": fuzz,
    "shared": shared,
    "packed": packed,
    "poison": poison,
    "far": far,
    "wild": wild,
    "used": used,
    "neighbors": neighbors,
    "ranges": ranges,
    "chunks": chunks,
    **cache_parts.PARTS,
    "light": light,
    "edges": at_edges,
    "defects": defects,
}


def main(part: str, first: int, number: int) -> None:
    """Run one part and print what it found."""
    interpreter.repair()
    torch.set_num_threads(1)
    done = rejected = 0
    for problems in PARTS[part](first, number):
        done += 1
        rejected += bool(problems)
        for problem in problems:
            print(json.dumps({"problem": problem}), flush=True)
    print(json.dumps({"done": done, "rejected": rejected}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
