"""Runs the portable sparse backward in Triton's interpreter: `TRITON_INTERPRET=1 python … PART …`.

A process of its own, because triton must be imported with that variable set. Prints one JSON line
per problem, and a last line with the counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import openmla
import openmla.kernels.portable.sparse_backward as package
from gluon_sim import unreserved
from kernels.far_memory import FarMemory
from kernels.mutants import load_mutant, once
from kernels.portable import interpreter
from openmla.backward.reference import Saved
from openmla.backward.sparse_operands import RowGradients, WantedRows
from openmla.kernels.portable.sparse_backward import launch, plan
from openmla.kernels.portable.sparse_backward.plan import select_config
from openmla.kernels.portable.sparse_backward.row_sum import sparse_row_sum_kernel
from openmla.lab.testing.case import Case
from openmla.lab.testing.gradients import GradientCase
from openmla.lab.testing.memory import BACKGROUNDS, Memory
from openmla.lab.testing.memory.guard import EDGES as EDGES_OF_PAGES
from openmla.lab.testing.memory.guard import GuardedMemory
from openmla.lab.testing.row_gradients import (
    BuiltRowGradients,
    build_row_gradients,
    judge_rows_twice,
    random_row_gradient_case,
)
from openmla.planning import Plan
from openmla.planning.target import target_by_name

TILES = ((16, 16), (32, 32), (16, 32))
MOST_WORK = 300_000  # multiply-adds of a forward pass
CAP = plan.PART_CAP
_INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Several blocks of heads and of entries, the last of one; a list of duplicates, ignored entries.
# No width fills its tile.
EDGES = Case(
    "sparse",
    17,
    24,
    12,
    24,
    q_lens=(3,),
    k_lens=(20,),
    topk=17,
    index_kind="mixed",
    topk_lengths="ragged",
    sink="normal",
    scale=0.2,
)
Part = Callable[[int, int], Iterator[list[str]]]


@contextmanager
def workspaces_in(memory: Memory | None) -> Iterator[None]:
    """Between inaccessible pages, where the tensors of a case are."""
    if not isinstance(memory, GuardedMemory):
        yield
        return

    def new_empty(x: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
        return memory.new(shape, dtype)

    with patch.object(Tensor, "new_empty", new_empty):
        yield


def forward(built: BuiltRowGradients) -> Saved:
    """out and lse, by the CPU kernel."""
    with torch.no_grad():
        return Saved(*openmla.mla_prefill_sparse(**built.built.arguments, return_lse=True))


def run(
    built: BuiltRowGradients,
    saved: Saved,
    tile: tuple[int, int],
    wanted: WantedRows | None = None,
    tokens: int = 0,
    launch: ModuleType = launch,
    memory: Memory | None = None,
) -> dict[str, Tensor]:
    """Gradients by name; every buffer starts full of NaN. tokens: queries of one workspace. memory:
    where gradients and workspaces lie."""
    op = built.backward(saved)
    problem = op.problem()
    plan.PART_CAP = tokens * problem.topk * problem.d_qk * 4 if tokens else CAP
    config = replace(select_config(problem, target_by_name("h200")), BM=tile[0], BN=tile[1])
    gradients = RowGradients.allocate(op.forward, wanted or WantedRows())
    if memory is not None:
        own = {name: memory.new(x.shape, x.dtype) for name, x in gradients.tensors().items()}
        own["rows"] = own["rows"].contiguous()
        gradients = replace(gradients, **own)
    for x in gradients.tensors().values():
        x.fill_(torch.nan)
    chosen = Plan(problem, "h200", "portable", "sparse_backward", config)
    with workspaces_in(memory):
        calls = list(launch.calls(chosen, op, gradients))
    for call in calls:
        call.run()
    return gradients.tensors()


def cases(first: int, number: int) -> Iterator[tuple[int, GradientCase, tuple[int, int]]]:
    """Usable random cases from seed `first` on, with the tiles taking turns."""
    found = 0
    for seed in count(first):
        case = random_row_gradient_case(seed)
        rope = case.case.d_qk - case.case.d_v
        if case.case.d_v <= 128 and rope <= 64 and case.case.cost < MOST_WORK:
            bf16 = replace(case, case=replace(case.case, dtype="bf16"))
            yield seed, bf16, TILES[found % len(TILES)]
            found += 1
        if found == number:
            return


def fuzz(first: int, number: int) -> Iterator[list[str]]:
    """The acceptance rule, both ways."""
    for seed, case, tile in cases(first, number):
        built = build_row_gradients(case)
        saved = forward(built)
        both = judge_rows_twice(built, run(built, saved, tile, tokens=seed % 3), saved)
        yield [f"seed {seed}, {case}, {tile}: {p}" for v in both for p in v.problems]


def edges(first: int, number: int) -> Iterator[list[str]]:
    """One into a block, duplicates, with and without rope and a gradient of lse."""
    for seed in range(first, first + number):
        kinds: dict[str, Any] = {"index_kind": ("mixed", "duplicates")[seed % 2], "seed": seed}
        kinds["d_rope"] = 0 if seed % 2 else EDGES.d_rope
        built = build_row_gradients(GradientCase(replace(EDGES, **kinds), d_lse=seed % 3 == 0))
        saved = forward(built)
        both = judge_rows_twice(built, run(built, saved, TILES[seed % len(TILES)]), saved)
        yield [f"seed {seed}: {p}" for v in both for p in v.problems]


def bits(first: int, number: int) -> Iterator[list[str]]:
    """Neither the workspace, nor what is asked for, nor memory around changes a bit."""
    for seed in range(first, first + number):
        case = GradientCase(replace(EDGES, seed=seed, q_lens=(5,), spare=2), d_lse=True)
        built = build_row_gradients(case)
        saved, tile = forward(built), TILES[seed % len(TILES)]
        every = run(built, saved, tile)
        others = {f"{n} queries": run(built, saved, tile, tokens=n) for n in (1, 2)}
        for i, name in enumerate(("q", "rows", "sink")):
            wanted = WantedRows(*(j == i for j in range(3)))
            others[f"{name} alone"] = run(built, saved, tile, wanted)
        for background in BACKGROUNDS:
            around = build_row_gradients(case, Memory(background=background))
            others[background] = run(around, forward(around), tile)
        yield [
            f"seed {seed}: d_{name} differs: {how}"
            for how, found in others.items()
            for name, x in found.items()
            if not torch.equal(x.view(_INTEGER[x.dtype]), every[name].view(_INTEGER[x.dtype]))
        ]


def apart(first: int, number: int) -> Iterator[list[str]]:
    """Tensors and workspaces between inaccessible pages, or past element 2^31, with lists that lie
    column by column; and row 0, which no list names, full of NaN. No bit changes."""
    case = GradientCase(replace(EDGES, seed=first, q_lens=(5,)), d_lse=True)
    want = _unread_row(case, Memory("cpu"), 0.0)
    memories: dict[str, Memory] = {
        f"a page at the {edge}": GuardedMemory(edge) for edge in EDGES_OF_PAGES
    }
    memories |= {f"far along axis {axis}": FarMemory(axis) for axis in (0, 1)}
    for name, memory in list(memories.items())[:number]:
        got = _unread_row(case, memory, torch.nan)
        yield [f"{name}: d_{n}" for n, x in want.items() if not _same(x, got[n])]


def _unread_row(case: GradientCase, memory: Memory, value: float) -> dict[str, Tensor]:
    """Gradients of a case whose row 0 is named by no list, and has this value."""
    built = build_row_gradients(case, memory)
    op = built.operands
    lists = torch.where(op.indices == 0, 1, op.indices)
    lists = lists.t().contiguous().t() if isinstance(memory, FarMemory) else lists
    op = replace(op, indices=lists)
    assert isinstance(op.cache, Tensor)
    op.cache[0] = value
    arguments = {**built.built.arguments, "indices": lists}
    built = replace(built, built=replace(built.built, operands=op, arguments=arguments))
    saved = Saved(*(memory.new(x.shape, x.dtype).copy_(x) for x in forward(built)))
    return run(built, saved, (16, 16), tokens=2, memory=memory)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are."""
    integer = _INTEGER[one.dtype]
    return torch.equal(one.contiguous().view(integer), other.contiguous().view(integer))


def last_row(first: int, number: int) -> Iterator[list[str]]:
    """The sum of a row past what 32 bits address: the last program of millions, run alone."""
    width, row = 576, 2**31 // 576 + 7
    for seed in range(first, first + number):
        torch.manual_seed(seed)
        part = torch.randn(3, width)
        starts = torch.frombuffer(unreserved((row + 2) * 8), dtype=torch.int64)
        starts[row], starts[row + 1] = 0, 3
        d_rows = torch.frombuffer(unreserved((row + 1) * width * 2), dtype=torch.bfloat16)
        with interpreter.numbered_from(row):
            sparse_row_sum_kernel[(1,)](
                *(part, torch.tensor([2, 0, 1]), starts, None, d_rows),
                WIDTH=width,
                COLUMNS=1024,
                FIRST=True,
                LAST=True,
            )
        want = ((part[2] + part[0]) + part[1]).bfloat16()
        yield [] if torch.equal(d_rows[row * width :], want) else [f"seed {seed}: row {row}"]


class Defect(NamedTuple):
    """In `file`.py, `old` becomes `new`."""

    file: str
    old: str
    new: str


DEFECTS = {
    "a block of one entry is no block": Defect(
        "row_pass", "if first >= count:", "if first >= count - 1:"
    ),
    "what does not count is row 0": Defect(
        "lists", ".to(tl.int64), ok", ".to(tl.int64), entry < count"
    ),
    "lengths do not count": Defect(
        "lists", "lengths_ptr + token), 0)", "lengths_ptr + token), topk)"
    ),
    "the last block of heads is skipped": Defect(
        "row_pass", "tl.range(0, heads, BM)", "tl.range(0, heads - 1, BM)"
    ),
    "the scale is not in d_rows": Defect("row_pass", "(d_s * scale)", "(d_s * 1.0)"),
    "rows are no values": Defect("row_pass", "(p.to(q.dtype))", "((p * 0).to(q.dtype))"),
    "delta of another query": Defect(
        "row_pass", "delta_ptr + token * heads", "delta_ptr + local * 0 * heads"
    ),
    "sums begin anew": Defect("row_sum", "if FIRST:", "if FIRST or LAST:"),
    "the last entry of a row is left out": Defect("row_sum", "row + 1)):", "row + 1) - 1):"),
    "rope of d_q is not scaled": Defect(
        "query_pass", "(acc_rope * scale + 0.0)", "(acc_rope + 0.0)"
    ),
    "a duplicate counts once": Defect("launch", "= by_row(op,", "= _once(op,"),
}
_ONCE = """

def _once(op, first, last):
    import dataclasses

    indices = op.indices.clone()
    for i, line in enumerate(indices.tolist()):
        for j, x in enumerate(line):
            indices[i, j] = -1 if x in line[:j] else x
    return by_row(dataclasses.replace(op, indices=indices), first, last)
"""


def defects(first: int, number: int) -> Iterator[list[str]]:
    """Every seeded defect is found."""
    # With this seed lists name row 0 and rows that there are not, and lengths are less than topk.
    built = build_row_gradients(GradientCase(replace(EDGES, seed=3), d_lse=True))
    duplicates = replace(EDGES, index_kind="duplicates", topk_lengths="none")
    twice = build_row_gradients(GradientCase(duplicates, d_lse=True))
    for name, (file, old, new) in list(DEFECTS.items())[first : first + number]:

        def edit(text: str, old: str = old, new: str = new) -> str:
            return once(old, new)(text) + (_ONCE if "_once" in new else "")

        wrong = load_mutant(package, file, edit, "launch", Path(tempfile.mkdtemp()))
        found = []
        for case in (built, twice):
            saved = forward(case)
            got = run(case, saved, (16, 16), tokens=1, launch=wrong)
            found += [p for v in judge_rows_twice(case, got, saved) for p in v.problems]
        yield [] if found else [f"not found: {name}"]


PARTS: dict[str, Part] = {
    "fuzz": fuzz,
    "edges": edges,
    "bits": bits,
    "apart": apart,
    "last row": last_row,
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
