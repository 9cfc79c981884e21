"""Runs portable backward kernels in Triton's interpreter: `TRITON_INTERPRET=1 python … PART …`.

A process of its own, because triton must be imported with that variable set. Prints one JSON line
per problem, and a last line with the counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

import openmla
from kernels.far_memory import FarMemory
from kernels.portable import interpreter
from kernels.portable.interpreted_sparse_backward import workspaces_in
from openmla.backward.operands import Gradients, Wanted
from openmla.backward.reference import Saved
from openmla.kernels.portable.backward import launch
from openmla.kernels.portable.backward.plan import select_config
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import (
    BuiltGradients,
    GradientCase,
    build_gradients,
    random_gradient_case,
)
from openmla.lab.testing.memory import BACKGROUNDS, Memory
from openmla.lab.testing.memory.guard import EDGES, GuardedMemory
from openmla.planning import Plan
from openmla.planning.target import target_by_name

TILES = ((16, 32), (32, 32), (16, 64), (64, 32), (16, 16))
MOST_WORK = 150_000  # multiply-adds of a forward pass
Part = Callable[[int, int], Iterator[list[str]]]


def forward(built: BuiltGradients) -> Saved:
    """out and lse, by the CPU kernel."""
    with torch.no_grad():
        return Saved(*openmla.mla_prefill(**built.built.arguments, return_lse=True))


def run(
    built: BuiltGradients,
    saved: Saved,
    tile: tuple[int, int],
    wanted: Wanted | None = None,
    memory: Memory | None = None,
) -> dict[str, Tensor]:
    """Gradients by name; every buffer starts full of NaN. memory: where gradients lie, and where it
    has inaccessible pages, workspaces too."""
    op = built.backward(saved)
    problem = op.problem()
    sizes = {"BM": tile[0], "BN": tile[1], "key_BM": tile[0], "key_BN": tile[1]}
    config = replace(select_config(problem, target_by_name("h200")), **sizes)
    gradients = Gradients.allocate(op.forward, wanted or Wanted())
    if memory is not None:
        names = ("q", "kv", "k_rope")
        own = {name: getattr(gradients, name) for name in names}
        own = {name: memory.new(x.shape, x.dtype) for name, x in own.items() if x is not None}
        gradients = replace(gradients, **own)
    for x in (gradients.q, gradients.kv, gradients.k_rope, gradients.sink):
        if x is not None:
            x.fill_(torch.nan)
    plan = Plan(problem, "h200", "portable", "backward", config)
    with workspaces_in(memory):
        calls = list(launch.calls(plan, op, gradients))
    for call in calls:
        call.run()
    return gradients.tensors()


def cases(first: int, number: int) -> Iterator[tuple[int, GradientCase, tuple[int, int]]]:
    """Usable random cases from seed `first` on, with the tiles taking turns."""
    found = 0
    for seed in count(first):
        case = random_gradient_case(seed)
        narrow = max(case.case.d_nope, case.case.d_rope, case.case.d_v) <= 256
        if narrow and case.case.cost < MOST_WORK:
            bf16 = replace(case, case=replace(case.case, dtype="bf16"))
            yield seed, bf16, TILES[found % len(TILES)]
            found += 1
        if found == number:
            return


def fuzz(first: int, number: int) -> Iterator[list[str]]:
    """The acceptance rule, both ways."""
    for seed, case, tile in cases(first, number):
        built = build_gradients(case)
        saved = forward(built)
        both = judge_twice(built, run(built, saved, tile), saved)
        yield [f"seed {seed}, {case}, {tile}: {p}" for v in both for p in v.problems]


def poison(first: int, number: int) -> Iterator[list[str]]:
    """Memory that the problem does not use changes no bit of any gradient."""
    for seed, case, tile in cases(first, number):
        spare = replace(case, case=replace(case.case, spare=3, layout="strided"))
        clean: dict[str, Tensor] = {}
        problems = []
        for background in BACKGROUNDS:
            built = build_gradients(spare, Memory(background=background))
            found = run(built, forward(built), tile)
            clean = clean or found
            problems += [
                f"seed {seed}, {spare}, {tile}: d_{name} differs with {background} around"
                for name, x in found.items()
                if not torch.equal(x.view(_INTEGER[x.dtype]), clean[name].view(_INTEGER[x.dtype]))
            ]
        yield problems


_INTEGER = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
_PAIR = Case("dense", 3, 16, 8, 16, q_lens=(40, 9), k_lens=(70, 9), sink="normal")
_LONG = Case("dense", 2, 16, 8, 16, q_lens=(75,), k_lens=(110,))


def neighbors(first: int, number: int) -> Iterator[list[str]]:
    """A request's bits are those it has alone."""
    for seed in range(first, first + number):
        tile = TILES[seed % len(TILES)]
        built = build_gradients(GradientCase(replace(_PAIR, seed=seed), d_lse=bool(seed % 2)))
        saved = forward(built)
        together = run(built, saved, tile)
        op, q_len, k_len = built.operands, *(x[-1] for x in (_PAIR.q_lens, _PAIR.k_lens))
        cu = torch.tensor([0, q_len], dtype=torch.int32)
        alone = replace(
            op,
            q=op.q[-q_len:],
            k_nope=op.k_nope[-k_len:],
            k_rope=op.k_rope[-k_len:],
            v=op.v[-k_len:],
            cu_seqlens_q=cu,
            cu_seqlens_k=torch.tensor([0, k_len], dtype=torch.int32),
        )
        d_lse = None if built.d_lse is None else built.d_lse[-q_len:]
        other = replace(
            built,
            built=replace(built.built, operands=alone),
            d_out=built.d_out[-q_len:],
            d_lse=d_lse,
        )
        apart = run(other, Saved(*(x[-q_len:] for x in saved)), tile)
        yield [
            f"seed {seed}: d_{name} of the second request depends on the first"
            for name, x in apart.items()
            if name != "sink" and not torch.equal(x, together[name][-len(x) :])
        ]


def parts(first: int, number: int) -> Iterator[list[str]]:
    """What is not wanted is not computed, and what is has the same bits."""
    for seed in range(first, first + number):
        built = build_gradients(GradientCase(replace(_PAIR, seed=seed)))
        saved = forward(built)
        whole = run(built, saved, TILES[0])
        some_of = (Wanted(kv=False, sink=False), Wanted(q=False), Wanted(q=False, kv=False))
        wanted = some_of[seed % 3]
        some = run(built, saved, TILES[0], wanted)
        yield [f"seed {seed}: {n}" for n, x in some.items() if not torch.equal(x, whole[n])] + [
            f"seed {seed}: {sorted(some)}" for _ in [0] if len(some) >= len(whole)
        ]


def unseen(first: int, number: int) -> Iterator[list[str]]:
    """Keys that nobody sees get exactly +0, with a negative scale too, and without any query."""
    shapes: tuple[dict[str, Any], ...] = (
        {"q_lens": (3, 0, 5), "k_lens": (40, 7, 2), "spare": 2},
        {"q_lens": (0,), "k_lens": (9,)},
        {"q_lens": (4,), "k_lens": (0,), "spare": 5},
        {"q_lens": (30,), "k_lens": (35,), "key_mask": "few"},
    )
    for seed in range(first, first + number):
        case = replace(_PAIR, scale=-0.3, seed=seed, **shapes[seed % 4])
        built = build_gradients(GradientCase(case, d_lse=True))
        saved = forward(built)
        found = run(built, saved, TILES[1 if seed < 4 else 4])
        problems = [p for v in judge_twice(built, found, saved) for p in v.problems]
        yield [f"seed {seed}: {p}" for p in problems]


def steps(first: int, number: int) -> Iterator[list[str]]:
    """Sequences of many tiles: some are seen by all queries, some lie on the diagonal or at the
    edge of a window, some are seen by none, and each counts once. Statistics lie head by head;
    keys before all windows may hold anything."""
    shapes: tuple[dict[str, Any], ...] = (
        {},
        {"window": 12},
        {"window": 30, "scale": 0.5},
    )
    for seed in range(first, first + number):
        case = replace(_LONG, seed=seed, **shapes[seed % 3])
        built = build_gradients(GradientCase(case))
        saved = forward(built)
        saved = saved._replace(lse=saved.lse.t().contiguous().t())
        tile = TILES[4] if seed % 2 else TILES[0]
        found = run(built, saved, tile)
        problems = [p for v in judge_twice(built, found, saved) for p in v.problems]
        if case.window:
            op = built.operands
            assert op.k_rope is not None
            for x in (op.k_nope, op.k_rope, op.v):
                x[: case.k_lens[0] - case.q_lens[0] + 1 - case.window] = torch.nan
            again = run(built, saved, tile)
            problems += [f"d_{n} differs" for n, x in again.items() if not torch.equal(x, found[n])]
        yield [f"seed {seed}: {p}" for p in problems]


def apart(first: int, number: int) -> Iterator[list[str]]:
    """Tensors and workspaces between inaccessible pages, or past element 2^31. No bit changes."""
    case = replace(_PAIR, seed=first, q_lens=(20, 5), k_lens=(37, 5), rope="per_head")
    memories: dict[str, Memory] = {f"a page at the {e}": GuardedMemory(e) for e in EDGES}
    memories |= {f"far along axis {axis}": FarMemory(axis) for axis in (0, 1)}
    found: dict[str, Tensor] = {}
    for name, memory in [("", Memory("cpu")), *list(memories.items())[:number]]:
        built = build_gradients(GradientCase(case, d_lse=True), memory)
        saved = Saved(*(memory.new(x.shape, x.dtype).copy_(x) for x in forward(built)))
        got = run(built, saved, TILES[4], memory=memory)
        bits = {n: x.contiguous().view(_INTEGER[x.dtype]) for n, x in got.items()}
        found = found or bits
        if name:
            yield [f"{name}: d_{n}" for n, x in bits.items() if not torch.equal(x, found[n])]


PARTS: dict[str, Part] = {
    "fuzz": fuzz,
    "poison": poison,
    "neighbors": neighbors,
    "parts": parts,
    "unseen": unseen,
    "steps": steps,
    "apart": apart,
}


def main(part: str, first: int, number: int) -> None:
    """Run a part and print what was wrong."""
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
