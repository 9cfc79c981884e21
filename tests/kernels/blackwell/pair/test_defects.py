"""Every seeded defect of the kernel of a CTA pair is found in a few runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import openmla.kernels.blackwell.pair.launch as launcher
from gluon_sim import Kind
from kernels.blackwell.pair.test_kernel import CASES, ONE_PAIR, V32
from kernels.blackwell.sparse.defects import SparseDefect, load_defect
from kernels.blackwell.sparse.test_defects import run_on
from kernels.mutants import NOTHING, RUNS, assert_found
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.triton_version import TRITON

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(TRITON < FIRST_ROWS_PAIR, reason="no pairs in this Triton"),
]
TURNS = {
    "two steps": V32,
    "rising": replace(CASES["rising, five steps"], topk=520),
    "in turn": CASES["three tokens in turn"],
    "e4m3": CASES["e4m3"],
    # Nine ranges of two tokens, nine of one.
    "split": replace(CASES["split"], q_lens=(2, 1), k_lens=(4200, 4100), values="normal"),
    "window": CASES["window"],
    "32 requests": CASES["split, 32 requests"],
    "one step each": replace(V32, dtype="e4m3", q_lens=(3,), topk=100),  # more slots than V fills
}


def split(name: str, old: str, new: str, file: str = "items", case: str = "split") -> SparseDefect:
    """A defect of requests that are split; only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


@pytest.fixture(autouse=True)
def new_memory_is_full_of_nan() -> Iterator[None]:
    """Otherwise a part that nobody wrote may be one that a run before left there, and right."""
    torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
    yield
    torch.use_deterministic_algorithms(False)


DEFECTS = [
    SparseDefect(
        "a slot is filled before it is free",
        Kind.RACE,
        "load",
        "mbarrier.wait(empty.index(slot), phase)",
        NOTHING,
        "two steps",
        "for atom in",
    ),
    SparseDefect(
        "every CTA announces the bytes of both",
        Kind.DEADLOCK,
        "load",
        "KEYS // 2 * GATHERED * BYTES",
        "KEYS * GATHERED * BYTES",
        "two steps",
    ),
    SparseDefect(
        "Q of the next token is loaded under products",
        Kind.RACE,
        "load",
        "                            mbarrier.wait(bars.q_free.index(0), turn & 1)\n",
        "",
        "one step each",
    ),
    SparseDefect(
        "Q is taken to be free a token early",
        Kind.RACE,
        "load",
        "q_free.index(0), turn & 1)",
        "q_free.index(0), (turn & 1) ^ 1)",
        "one step each",
    ),
    SparseDefect(
        "validity bits are read before they are there",
        Kind.RACE,
        "softmax",
        "wait_for_step(bars.valid_full, step, 2)",
        NOTHING,
        "two steps",
    ),
    SparseDefect(
        "V of the step after",
        None,
        "load",
        "item, lists, pool, k - 1, part",
        "item, lists, pool, k, part",
        "two steps",
    ),
    SparseDefect(
        "V is not waited for",
        Kind.RACE,
        "multiply",
        "mbarrier.wait(full.index(slot), phase)",
        NOTHING,
        "two steps",
        "for atom in",
    ),
    SparseDefect(
        "weights are not waited for",
        Kind.RACE,
        "multiply",
        "                mbarrier.wait(bars.p_full.index(0), (step - 1) & 1)\n",
        "",
        "two steps",
    ),
    SparseDefect(
        "the output of the token before is kept",
        None,
        "multiply",
        "kept = (k > 1) | (part > 0) | (i > 0)",
        "kept = (number > 0) | (k > 1) | (part > 0)",
        "in turn",
    ),
    SparseDefect(
        "the first CTA does not wait for the weights of the second",
        Kind.RACE,
        "kernel",
        "p_full = barriers(1, True)",
        "p_full = barriers(1, False)",
        "two steps",
    ),
    SparseDefect(
        "the second CTA does not hear of finished products",
        Kind.DEADLOCK,
        "kernel",
        "o_done = barriers(1, False)",
        "o_done = barriers(1, True)",
        "two steps",
    ),
    SparseDefect(
        "only one atom of the output is multiplied",
        None,
        "softmax",
        "    for atom in gl.static_range(2):\n        O[atom].store(",
        "    for atom in gl.static_range(1):\n        O[atom].store(",
        "rising",
    ),
    SparseDefect(
        "missing fence of the weights",
        Kind.FENCE,
        "softmax",
        "            fence_async_shared()\n            mbarrier.arrive(bars.p_full",
        "            mbarrier.arrive(bars.p_full",
        "two steps",
    ),
    SparseDefect(
        "the rest of 8-bit weights is lost",
        None,
        "softmax",
        "rest = (weights - rounded.to(gl.float32))",
        "rest = (weights - weights)",
        "e4m3",
    ),
    SparseDefect(
        "out is stored from a buffer that is overwritten",
        Kind.RACE,
        "softmax",
        "        tma.store_wait(0)\n",
        "",
        "two steps",
    ),
    split(
        "a range begins a step late",
        "gl.where(parts > 1, part << bits, 0)",
        "gl.where(parts > 1, (part << bits) + part * KEYS, 0)",
    ),
    split(
        "a range ends a step early",
        "gl.where(part + 1 < parts, (part + 1) << bits, keys)",
        "gl.where(part + 1 < parts, ((part + 1) << bits) - KEYS, keys)",
    ),
    split("ranges lie over each other", "row = part * tokens + tokens", "row = tokens"),
    split("requests lie over each other", "request * lists.ranges.part_rows + row", "row"),
    split("a token of a range sees its last keys", "seen = keys - later", "seen = keys"),
    split("every range has the first token", "start + tokens - 1 - later", "start"),
    split(
        "a request begins after its first item",
        "items_before(tried, chunk) <= within",
        "items_before(tried, chunk) < within",
    ),
    split(
        "the tokens after 32 requests are not counted",
        "range(0, lists.batch + 1, CHUNK)",
        "range(0, lists.batch, CHUNK)",
        case="32 requests",
    ),
    split(
        "the second 32 requests are not looked at",
        "(first + CHUNK <= lists.batch)",
        "(first + CHUNK < lists.batch)",
        case="32 requests",
    ),
    split("K of the first range", "pool, k, 0, KEYS", "pool, k, -item.first, KEYS", "load"),
    split(
        "V of the first range",
        "part * GATHERED, GATHERED",
        "part * GATHERED - item.first, GATHERED",
        "load",
    ),
    split(
        "validity of the first range",
        "listed(keys, first + k * KEYS, KEYS, LAYOUT, INDEXING)\n        return",
        "listed(keys, k * KEYS, KEYS, LAYOUT, INDEXING)\n        return",
    ),
    split("the right columns of a range over the left ones", " + atom * 256\n", "\n", "softmax"),
    split(
        "the sum of weights of a range is its reference",
        "row * 2 + 1, state.row_sum",
        "row * 2 + 1, state.row_max",
        "softmax",
    ),
    split("a range is taken for a whole request", "item.part < 0", "item.part < 1", "softmax"),
    split(
        "padding is written over rows of the next range",
        "there, row = head < heads, first + head",
        "there, row = head < 2 * heads, first + head",
        "softmax",
    ),
    SparseDefect(
        "a window begins with a step of its sequence",
        None,
        "items",
        "first = unseen(count, lists.window)",
        "first = unseen(count, lists.window) // KEYS * KEYS",
        "window",
    ),
    SparseDefect(
        "a range is written before its products are done",
        Kind.RACE,
        "softmax",
        "        wait_for_step(bars.o_done, done - 1, 1)\n",
        "",
        "split",
    ),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    mutant = load_defect(defect, tmp_path, "pair")
    assert_found(defect.kind, partial(run_on, mutant, TURNS[defect.case], target=ONE_PAIR))


@pytest.mark.parametrize("name", TURNS)
def test_the_kernel_itself_is_clean_and_right(name: str) -> None:
    for schedule, seed in RUNS[:2]:
        found = run_on(launcher, TURNS[name], schedule, seed, target=ONE_PAIR)
        assert found == (set(), True)
