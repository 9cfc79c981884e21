"""Runs the portable index loss in Triton's interpreter: `TRITON_INTERPRET=1 python … PART …`.

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
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import openmla.kernels.portable.indexer_loss as package
from indexer.small_layer import HIDDEN, small_layer
from kernels.far_memory import FarMemory
from kernels.mutants import load_mutant, once
from kernels.portable import interpreter
from openmla.dispatch import plan_for
from openmla.indexer import loss_ops
from openmla.indexer.loss_operands import LossGradients, LossOperands
from openmla.kernels.launch import calls
from openmla.kernels.portable.indexer_loss import launch, plan
from openmla.kernels.portable.indexer_loss.plan import select_config
from openmla.lab.testing.index_loss import LossCase, build_loss, faults, random_loss_case
from openmla.lab.testing.memory import Memory
from openmla.lab.testing.memory.guard import EDGES as EDGES_OF_PAGES
from openmla.lab.testing.memory.guard import GuardedMemory
from openmla.nn import Batch
from openmla.planning import Plan
from openmla.planning.target import target_by_name
from openmla.sequences import ragged_spans

TILES = ((16, 16), (32, 32), (16, 32), (32, 16))
BACKGROUNDS = (torch.nan, torch.inf, -3.0)
CAP = plan.SCORE_CAP
_INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Two groups of index heads, the second of one; widths that are no powers of two; several tiles of
# queries and blocks of keys, the last of one row.
EDGES = LossCase(
    (33, 1),
    (49, 1),
    heads=3,
    index_heads=17,
    d_nope=20,
    d_rope=12,
    width=24,
    sink=True,
    masked=True,
    dtype=torch.bfloat16,
)
Part = Callable[[int, int], Iterator[list[str]]]


def run(
    op: LossOperands,
    tile: tuple[int, int],
    together: int = 0,
    launch: ModuleType = launch,
    memory: Memory | None = None,
) -> dict[str, Tensor]:
    """Loss and gradients by name; every buffer starts full of NaN, the workspace as well.

    together: tiles of queries that share the workspace; 0: all. memory: where gradients lie, and
    workspaces where it has inaccessible pages.
    """
    gradients = LossGradients.allocate(op)
    if memory is not None:
        own = {name: memory.new(x.shape, x.dtype) for name, x in gradients.tensors().items()}
        own |= {name: own[name].contiguous() for name in ("k", "weights")}  # without strides
        gradients = LossGradients(**own)
    results: tuple[Tensor | LossGradients, ...] = (
        op.index_q.new_empty(op.index_q.shape[0], dtype=torch.float32),
        gradients,
    )
    found = {"loss": results[0], **results[1].tensors()}
    for x in found.values():
        x.fill_(torch.nan)
    for given, result in zip((replace(op, d_loss=None), op), results, strict=True):
        problem = given.problem()
        config = select_config(problem, target_by_name("h200"))
        config = replace(config, BM=tile[0], BN=tile[1])
        line = 2 * 4 * config.BM * config.columns(problem.total_k)
        plan.SCORE_CAP = together * line if together else CAP
        torch.use_deterministic_algorithms(True)  # fills what is not initialized with NaN
        chosen = Plan(problem, "h200", "portable", "index_loss", config)
        with workspaces_in(memory):
            calls_of_it = list(launch.calls(chosen, given, result))
        for call in calls_of_it:
            call.run()
        torch.use_deterministic_algorithms(False)
    return found


@contextmanager
def workspaces_in(memory: Memory | None) -> Iterator[None]:
    """Between inaccessible pages, where the tensors of a case are."""
    if not isinstance(memory, GuardedMemory):
        yield
        return

    def new_empty(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return memory.new(shape, dtype or x.dtype)

    def empty_like(x: Tensor) -> Tensor:
        return memory.new(x.shape, x.dtype)

    with (
        patch.object(Tensor, "new_empty", new_empty),
        patch.object(torch, "empty_like", empty_like),
    ):
        yield


def differing(got: dict[str, Tensor], want: dict[str, Tensor], how: str) -> list[str]:
    """The names of those whose bits differ."""
    return [
        f"{name} differs: {how}"
        for name, x in got.items()
        if not torch.equal(x.view(_INTEGER[x.dtype]), want[name].view(_INTEGER[x.dtype]))
    ]


def fuzz(first: int, number: int) -> Iterator[list[str]]:
    """The acceptance rule, on random cases."""
    for seed in range(first, first + number):
        case = replace(random_loss_case(seed), dtype=torch.bfloat16)
        tile, op = TILES[seed % len(TILES)], build_loss(case)
        wrong = faults(op, run(op, tile, together=seed % 3), rounds_dz=True)
        yield [f"seed {seed}, {case}, {tile}: {p}" for p in wrong]


def edges(first: int, number: int) -> Iterator[list[str]]:
    """Odd widths, two groups of heads, one into a block; rope of its own for every head."""
    shapes = (
        {},
        {"rope": "per_head", "causal": False},
        {"rope": "none", "d_rope": 0, "masked": False, "scale": -0.3},
        {"q_lens": (40, 0, 3), "k_lens": (20, 9, 3)},
    )
    for seed in range(first, first + number):
        case = replace(EDGES, seed=seed, **shapes[seed % len(shapes)])
        op = build_loss(case)
        wrong = faults(op, run(op, TILES[seed % len(TILES)], together=2), rounds_dz=True)
        yield [f"seed {seed}, {case}: {p}" for p in wrong]


def steep(first: int, number: int) -> Iterator[list[str]]:
    """Scores of hundreds, the largest of which decides a row, in lines of several blocks."""
    for seed in range(first, first + number):
        op = build_loss(replace(EDGES, seed=seed, k_lens=(70, 1)))
        op = replace(op, index_weights=op.index_weights * 10)
        with patch.object(launch, "ROW_BLOCK", 32):
            wrong = faults(op, run(op, TILES[seed % len(TILES)], together=2), rounds_dz=True)
        yield [f"seed {seed}: {p}" for p in wrong]


def apart(first: int, number: int) -> Iterator[list[str]]:
    """Tensors and workspaces between inaccessible pages, or operands and gradients past element
    2^31. No bit changes."""
    op = build_loss(replace(EDGES, seed=first, q_lens=(20, 1), k_lens=(33, 1), rope="per_head"))
    want = run(op, (16, 16), together=1)
    memories: dict[str, Memory] = {f"a page at the {e}": GuardedMemory(e) for e in EDGES_OF_PAGES}
    memories |= {f"far along axis {axis}": FarMemory(axis) for axis in (0, 1)}
    for name, memory in list(memories.items())[:number]:
        got = run(moved(op, memory), (16, 16), together=2, memory=memory)
        got = {name: x.contiguous() for name, x in got.items()}
        yield differing(got, want, name)


def moved(op: LossOperands, memory: Memory) -> LossOperands:
    """The same operands in another memory."""

    def copy(x: Tensor | None) -> Any:
        return None if x is None else memory.new(x.shape, x.dtype).copy_(x)

    a = op.attention
    own = {name: copy(getattr(a, name)) for name in ("q", "k_nope", "k_rope", "key_mask")}
    attention = replace(a, **own, v=own["k_nope"])
    names = ("index_q", "index_k", "index_weights", "lse")
    return replace(op, **{n: copy(getattr(op, n)) for n in names}, attention=attention)


def bits(first: int, number: int) -> Iterator[list[str]]:
    """Neither the workspace, nor neighbors, nor memory around changes a bit."""
    for seed in range(first, first + number):
        case, tile = replace(EDGES, seed=seed, masked=False), TILES[seed % len(TILES)]
        op = build_loss(case)
        every = run(op, tile)
        problems = []
        for together in (1, 2):
            problems += differing(run(op, tile, together), every, f"{together} tiles together")
        spans = list(ragged_spans(op.attention.cu_seqlens_q, op.attention.cu_seqlens_k))
        for i, span in enumerate(spans):
            q = slice(span.q_start, span.q_start + span.q_len)
            k = slice(span.k_start, span.k_start + span.k_len)
            alone = run(alone_of(op, q, k), tile)
            part = {name: x[k if name == "k" else q] for name, x in every.items()}
            problems += differing(alone, part, f"sequence {i} alone")
        for background in BACKGROUNDS:
            found = run(build_loss(case, spare=3, background=background), tile)
            rows = {name: len(x) for name, x in every.items()}
            inside = {name: x[: rows[name]] for name, x in found.items()}
            problems += differing(inside, every, f"{background} around")
            after = {name: x[rows[name] :] for name, x in found.items()}
            zeros = {name: torch.zeros_like(x) for name, x in after.items()}
            problems += differing(after, zeros, f"{background}, past the last sequence")
        yield [f"seed {seed}: {p}" for p in problems]


def alone_of(op: LossOperands, q: slice, k: slice) -> LossOperands:
    """One sequence of a call without a mask."""
    a = op.attention
    cu_q, cu_k = (torch.tensor([0, rows.stop - rows.start], dtype=torch.int32) for rows in (q, k))
    rope = None if a.k_rope is None else a.k_rope[k]
    rows = {"q": a.q[q], "k_nope": a.k_nope[k], "k_rope": rope, "v": a.v[k]}
    attention = replace(a, **rows, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    return LossOperands(
        op.index_q[q], op.index_k[k], op.index_weights[q], attention, op.lse[q], op.d_loss[q]
    )


def layer(first: int, number: int) -> Iterator[list[str]]:
    """A layer's indexer learns from these kernels what it learns from the CPU's."""
    for seed in range(first, first + number):
        module, batch = small_layer(seed), Batch.of([21, 4])
        x = torch.randn(25, HIDDEN, dtype=torch.bfloat16)
        problems = []
        for sparse in (False, True):
            found = []
            for run_call in (loss_ops.run_call, run_as_on_a_gpu):
                with patch.object(loss_ops, "run_call", run_call):
                    _, loss = module.forward_and_loss(x, batch.positions, batch, sparse)
                    module.zero_grad()
                    loss.mean().backward()
                named = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
                found.append({"loss": loss.detach(), **named})
            mine, theirs = found[1], found[0]
            problems += [f"{name} is not learned" for name in theirs.keys() ^ mine.keys()]
            for name, want in theirs.items():
                off = (mine[name].double() - want.double()).norm() / want.double().norm()
                problems += [f"{name}, sparse {sparse}: {off:.2g} off"] if not off < 1e-2 else []
        yield [f"seed {seed}: {p}" for p in problems]


def run_as_on_a_gpu(op: LossOperands, results: Any, backend: str) -> None:
    """What `run_call` does where the tensors are on an H200."""
    chosen = plan_for(op.problem(results), target_by_name("h200"), backend)
    assert chosen.backend == "portable"
    for call in calls(chosen, op, results):
        call.run()


class Defect(NamedTuple):
    """In `file`.py, `old` becomes `new`, where it first stands after `after`."""

    file: str
    old: str
    new: str
    after: str = ""


DEFECTS = {
    "the last head of attention is left out": Defect(
        "score_pass", "tl.range(0, heads)", "tl.range(0, heads - 1)"
    ),
    "the last index head is left out": Defect(
        "score_pass", "tl.range(0, index_heads)", "tl.range(0, index_heads - 1)"
    ),
    "rope is not multiplied": Defect(
        "score_pass", "tl.trans(k_rope), s)", "tl.trans(k_rope * 0), s)"
    ),
    "rope is that of the first head": Defect(
        "score_pass", "rope_row + head * tl", "rope_row + head * 0 * tl"
    ),
    "negative products count": Defect("score_pass", "tl.where(z < 0.0, 0.0, z)", "z"),
    "weights of a neighbor": Defect(
        "score_pass", "index_w_ptr + token * index", "index_w_ptr + (token ^ 1) * index"
    ),
    "the sink is forgotten": Defect("score_pass", "row_ok, sink_ptr, head)", "row_ok, None, head)"),
    "the mask is forgotten": Defect("score_pass", "visible & bits_of(", "visible | bits_of("),
    "causal is off by one": Defect("score_pass", "key[None, :] <= (row", "key[None, :] < (row"),
    "hidden keys have scores": Defect(
        "score_pass", "tl.where(visible, scores, MINUS_INF)", "scores"
    ),
    "p is not normalized": Defect(
        "row_pass", "tl.where(has_target, total, 1.0)", "tl.where(has_target, 1.0, 1.0)"
    ),
    "the row pass ends a block early": Defect("row_pass", "+ BN - 1) // BN * BN", "// BN * BN)"),
    "d_loss is forgotten": Defect("row_pass", "come * (tl.exp", "1.0 * (tl.exp"),
    "p has the wrong sign": Defect("row_pass", "tl.exp(s - lse) - p)", "tl.exp(s - lse) + p)"),
    "rows without a target have gradients": Defect("row_pass", "tl.where(has_target, d, 0.0)", "d"),
    "d_q without weights": Defect("query_pass", "d * w[:, None], 0.0)", "d, 0.0)"),
    "d_w of negative products": Defect("query_pass", "tl.maximum(z, 0.0)", "z"),
    "relu has a gradient everywhere": Defect("query_pass", "z > 0.0, d * w", "z == z, d * w"),
    "d_k ignores relu": Defect("key_pass", "z > 0.0, d * w", "z == z, d * w"),
    "d_k of the first tile that sees a key": Defect(
        "key_pass", "// BM\n    begin", "// BM + 1\n    begin"
    ),
    "d_k of the last tile": Defect("key_pass", "(q_len + BM - 1) // BM", "q_len // BM"),
    "the last head of a group": Defect(
        "key_pass", "first_head + GROUP, index_heads)", "first_head + GROUP - 1, index_heads)"
    ),
    "sums of d_k begin anew": Defect("key_pass", "    if FIRST:", "    if FIRST or True:"),
    "d_k reads lines of another tile": Defect("key_pass", "tile - before,", "tile - begin,"),
    "keys past the sequence": Defect(
        "query_pass", "key < tile.k_len, column", "key < tile.k_len + 1, column"
    ),
}


def sought() -> Iterator[tuple[LossOperands, int]]:
    """Operands that defects are sought with, and how many tiles share the workspace."""
    yield build_loss(replace(EDGES, q_lens=(40, 1), seed=1)), 1
    yield build_loss(replace(EDGES, rope="per_head", q_lens=(40, 5), masked=False, seed=2)), 0
    blind = build_loss(replace(EDGES, q_lens=(40, 3), k_lens=(20, 3), masked=False))
    assert blind.d_loss is not None
    blind.d_loss[:20] = torch.nan  # of queries that see no key
    yield blind, 0
    yield build_loss(replace(EDGES, masked=False), spare=2, background=torch.nan), 1


def defects(first: int, number: int) -> Iterator[list[str]]:
    """Every seeded defect is found."""
    for name, (file, old, new, after) in list(DEFECTS.items())[first : first + number]:
        edit = once(old, new, after)
        wrong = load_mutant(package, file, edit, "launch", Path(tempfile.mkdtemp()))
        cases = ((op, run(op, (16, 16), together, wrong)) for op, together in sought())
        found = any(faults(op, got, rounds_dz=True) for op, got in cases)
        yield [] if found else [f"not found: {name}"]


def controls(first: int, number: int) -> Iterator[list[str]]:
    """What defects are sought with is accepted without one."""
    del first, number
    for op, together in sought():
        yield faults(op, run(op, (16, 16), together), rounds_dz=True)


PARTS: dict[str, Part] = {
    "fuzz": fuzz,
    "edges": edges,
    "steep": steep,
    "apart": apart,
    "bits": bits,
    "defects": defects,
    "controls": controls,
    "layer": layer,
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
