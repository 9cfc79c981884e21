"""Gluon kernels stay inside their tensors, and end, whatever offsets, tables and lists hold.

The portable kernels have theirs in portable/interpreted.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import kernels.blackwell.simulated as blackwell
import kernels.cdna4.simulated as cdna4
from gluon_sim import Kind, Limits, intercept
from indexer.score_cases import paged, pair
from kernels.hopper import simulated as hopper
from kernels.hopper.few.test_few import few_plan
from kernels.hopper.indexer import test_select as selection
from kernels.judging import on
from kernels.shared_keys import with_shared_keys
from kernels.test_indexer_scores import CHIPS, Chip
from kernels.wild_values import KINDS, make_wild, with_wild_values
from openmla.indexer.operands import SelectOperands
from openmla.kernels.launch import calls
from openmla.lab.testing.build import BuiltCase
from openmla.lab.testing.case import Case
from openmla.lab.testing.simulate import new_results
from openmla.planning import Plan

# CI looks at one draw of each kind; a changed kernel needs OPENMLA_SIM_SEEDS=10.
SEEDS = int(os.environ.get("OPENMLA_SIM_SEEDS", "1"))
LIMITS = Limits(steps=200_000, load_alignment=16)
DENSE = Case("dense", 2, 64, 32, 64, q_lens=(70, 33, 5), k_lens=(70, 150, 2), spare=3)
PAGED = replace(DENSE, rope="cache", kv="bf16", page_size=16)
FP8 = replace(DENSE, dtype="e4m3", side_dtype="bf16", rope_dtype="e4m3", q_scale=True, k_scale=True)
LATENT = Case(
    "latent",
    4,
    128,
    32,
    128,
    q_lens=(7, 2, 3),
    k_lens=(7, 150, 2),
    scale=0.05,
    kv="bf16",
    page_size=16,
    spare=2,
)
WIDE = replace(LATENT, d_nope=512, d_rope=64, d_v=512)
ROWS = Case(
    "sparse",
    4,
    128,
    32,
    128,
    q_lens=(5,),
    k_lens=(150,),
    topk=70,
    scale=0.1,
    topk_lengths="ragged",
    return_max_logits=True,
)
WIDE_ROWS = replace(ROWS, d_nope=512, d_rope=64, d_v=512, kv="fp8_656", page_size=16)
FP8_KINDS = ("early", "anything")
PlanOf = Callable[[BuiltCase], Plan]


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_nothing_can_be_overwritten(kind: str):
    """Lists of 0 rows are drawn too, and torch makes floats of a Python list of nothing."""
    make_wild(torch.empty(3, 0, dtype=torch.int32), kind, random.Random(0))


def in_kernel(built: BuiltCase) -> Plan:
    """FP8 rows are dequantized where they are read."""
    chosen = hopper.plan_of(built)
    read = replace(chosen.config.cache_read, mode="in_kernel")
    return replace(chosen, config=replace(chosen.config, cache_read=read))


def few(built: BuiltCase) -> Plan:
    return few_plan(hopper.plan_of(built), 64)


def one_query_tile(built: BuiltCase) -> Plan:
    return hopper.plan_of(built, 2, 1)


RUNS: dict[str, tuple[PlanOf, Case]] = {
    "hopper dense": (hopper.plan_of, DENSE),
    "hopper dense, one block": (
        one_query_tile,
        replace(DENSE, q_lens=(60,), k_lens=(50,), d_nope=128, d_v=128),
    ),
    "hopper dense, 40 requests": (
        hopper.plan_of,
        replace(DENSE, q_lens=(3,) * 40, k_lens=(9,) * 40),
    ),
    "hopper dense, pages": (hopper.plan_of, PAGED),
    "hopper dense, mask": (hopper.plan_of, replace(DENSE, key_mask="half")),
    "hopper dense, split": (
        partial(hopper.plan_of, sm_count=12),
        replace(DENSE, heads=1, q_lens=(5, 3), k_lens=(4500, 4400)),
    ),
    "hopper dense, window": (hopper.plan_of, replace(DENSE, window=40)),
    "hopper dense, window, split": (
        partial(hopper.plan_of, sm_count=12),
        replace(DENSE, heads=1, q_lens=(5, 3), k_lens=(4500, 4400), window=4300),
    ),
    "hopper dense fp8": (hopper.plan_of, FP8),
    "hopper dense fp8, pages": (
        hopper.plan_of,
        replace(FP8, rope="cache", kv="bf16", page_size=16, rope_dtype=""),
    ),
    "hopper pages": (hopper.plan_of, LATENT),
    "hopper pages, boxes": (hopper.plan_of, replace(LATENT, page_size=64)),
    "hopper pages, split": (
        hopper.plan_of,
        replace(LATENT, q_lens=(2, 1, 3), k_lens=(4500, 600, 2800)),
    ),
    "hopper pages, fp8 in a workspace": (hopper.plan_of, replace(WIDE, kv="fp8_656")),
    "hopper pages, fp8 in the kernel": (in_kernel, replace(WIDE, kv="fp8_656")),
    "hopper pages, fp8 queries": (
        hopper.plan_of,
        replace(WIDE, dtype="e4m3", kv="fp8_token", q_scale=True),
    ),
    "hopper rows": (hopper.plan_of, ROWS),
    "hopper rows, pages": (hopper.plan_of, replace(ROWS, kv="bf16", page_size=24)),
    "hopper rows, fp8": (in_kernel, WIDE_ROWS),
    "hopper rows, few": (few, replace(ROWS, q_lens=(2,), topk=270)),
    "hopper rows, few, fp8": (few, replace(WIDE_ROWS, q_lens=(2,), topk=270)),
    "hopper rows, fp8 queries": (
        hopper.plan_of,
        replace(WIDE_ROWS, dtype="e4m3", kv="plain", q_scale=True, k_scale=True),
    ),
    "blackwell dense": (blackwell.plan_of, replace(DENSE, d_nope=128, d_rope=64, d_v=128)),
    "blackwell dense, pages": (
        blackwell.plan_of,
        replace(PAGED, d_nope=128, d_rope=64, d_v=128, page_size=64),
    ),
    "blackwell dense, fp8 pages": (
        blackwell.plan_of,
        replace(PAGED, d_nope=128, d_rope=64, d_v=128, page_size=64, kv="fp8_block32"),
    ),
    "blackwell pages": (blackwell.plan_of, WIDE),
    "blackwell pages, fp8": (blackwell.plan_of, replace(WIDE, kv="fp8_block32")),
    "blackwell rows": (blackwell.plan_of, replace(WIDE_ROWS, kv="plain")),
    "blackwell rows, fp8": (blackwell.plan_of, WIDE_ROWS),
    "cdna4 dense": (cdna4.plan_of, replace(DENSE, d_nope=128, d_rope=64, d_v=128)),
    "cdna4 dense fp8, scales": (
        cdna4.plan_of,
        replace(DENSE, d_nope=128, d_rope=64, d_v=128, dtype="e4m3", q_scale=True, k_scale=True),
    ),
    "cdna4 dense, mask": (
        cdna4.plan_of,
        replace(DENSE, d_nope=128, d_rope=64, d_v=128, key_mask="half"),
    ),
    "cdna4 dense, pages": (cdna4.plan_of, replace(PAGED, d_nope=128, d_rope=64, d_v=128)),
    "cdna4 pages": (cdna4.plan_of, WIDE),
    "cdna4 pages, fp8": (cdna4.plan_of, replace(WIDE, kv="fp8_block32")),
    "cdna4 rows": (cdna4.plan_of, replace(WIDE_ROWS, kv="plain")),
    "cdna4 rows, fp8": (cdna4.plan_of, WIDE_ROWS),
}


SHARING: dict[str, tuple[PlanOf, Case]] = {
    "hopper, bf16": (hopper.plan_of, DENSE),
    "hopper, fp8": (hopper.plan_of, FP8),
    "hopper, pages": (hopper.plan_of, PAGED),
    "blackwell": RUNS["blackwell dense"],
    "blackwell, mask": (blackwell.plan_of, replace(RUNS["blackwell dense"][1], key_mask="half")),
}
# Requests that overlap are written by several programs at once; what lands is not promised.
EXPECTED = (Kind.RACE,)


def problems_of(plan_of: PlanOf, built: BuiltCase) -> list[str]:
    """What the simulator found, and counters that are not zero for the next launch."""
    results = new_results(built)
    prepared = list(calls(plan_of(built), built.operands, results))
    with intercept(limits=LIMITS, ignore=EXPECTED) as reports:
        for call in prepared:
            call.run()
    found = [str(report) for report in reports if not report.ok]
    counters = [call.arguments.get("counter_ptr") for call in prepared]
    return found + ["a counter is left" for x in counters if x is not None and int(x)]


def seeds(kind: str) -> range:
    """Seeds of a kind; the first of every other kind is odd: one tensor alone is wild."""
    first = KINDS.index(kind)
    return range(first, first + SEEDS)


def kinds_of_runs() -> list[Any]:
    """Kernels that read FP8 rows find them as the others do: `make test` has two kinds of these,
    numbers below all that are right, and extreme ones."""
    long = [pytest.mark.long]
    return [
        pytest.param(name, kind, marks=long if "fp8" in name and kind not in FP8_KINDS else [])
        for name in RUNS
        for kind in KINDS
    ]


@pytest.mark.parametrize(("name", "kind"), kinds_of_runs())
def test_kernels_stay_inside_their_tensors(name: str, kind: str) -> None:
    plan_of, case = RUNS[name]
    for seed in seeds(kind):
        assert problems_of(plan_of, with_wild_values(on(case), kind, seed)) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SHARING)
def test_shared_keys_too(name: str, kind: str) -> None:
    plan_of, case = SHARING[name]
    for seed in seeds(kind):
        built = with_wild_values(with_shared_keys(on(case), seed), kind, seed)
        assert problems_of(plan_of, built) == []


@pytest.mark.parametrize("kind", KINDS)
def test_shared_keys_on_cdna4(kind: str) -> None:
    case = replace(DENSE, d_nope=128, d_rope=64, d_v=128)
    for seed in seeds(kind):
        built = with_wild_values(with_shared_keys(on(case), seed), kind, seed)
        assert problems_of(cdna4.plan_of, built) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.family)
def test_scores_stay_inside_their_tensors(chip: Chip, kind: str) -> None:
    for seed in seeds(kind):
        rng = random.Random(f"{kind} {seed}")
        pages = paged([5, 0, 4], [300, 9, 70], 64, 64)
        rows = pair([3, 130, 64, 0], [5, 400, 64, 300], 400, 64)
        for op in (pages, rows):
            windows = op.windows
            for x in (windows.starts, windows.ends, windows.longest, op.block_table):
                if x is not None:
                    make_wild(x, kind, rng)
            chip.run(op, 320, seed=seed, limits=LIMITS)  # fails where the simulator finds anything


@pytest.mark.parametrize("kind", KINDS)
def test_the_selection_stays_inside_its_tensors(kind: str) -> None:
    for seed in seeds(kind):
        rng = random.Random(f"{kind} {seed}")
        table = torch.arange(200, dtype=torch.int32).view(2, 100)
        op: SelectOperands = selection.operands("random", 700, 100, block_table=table, page_size=8)
        for x in (op.windows.starts, op.windows.ends, table):
            make_wild(x, kind, rng)
        got = selection.results_of(op)
        with intercept(limits=LIMITS, ignore=EXPECTED) as reports:
            for call in selection.calls(selection.plan_of(op, got), op, got):
                call.run()
        assert [str(report) for report in reports if not report.ok] == []
