"""Seeded defects of Hopper's backward kernels: each is found in a few runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import openmla.kernels.hopper as package
from gluon_sim import Kind
from kernels.gradients import CASES as KERNEL_CASES
from kernels.gradients import RINGS, BackwardDefect
from kernels.hopper.backward.simulated import HOPPER, MASKED, WIDE
from kernels.mutants import NOTHING, assert_found, controls, load_mutant
from openmla.kernels.hopper.backward import launch as launcher

TESTED = {**KERNEL_CASES, **MASKED, **WIDE}
CASES = {**TESTED, "rings": RINGS}


LOADS = [
    BackwardDefect(
        "K of the query pass is overwritten while it is read",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.k_empty.index(stage), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "Q of the query pass is overwritten by the next work item",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.q_empty.index(w), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "Q of the key pass is overwritten while it is read",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.q_empty.index(stage), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "K of the key pass is overwritten by the next work item",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.k_empty.index(w), phase)",
        NOTHING,
        "rings",
    ),
    BackwardDefect(
        "bytes of statistics are not expected",
        Kind.BYTES,
        "gradients.loads",
        "mbarrier.expect(barrier, BQ * ((DIMS.nope + DIMS.rope) * 2 + 8) + MORE)",
        "mbarrier.expect(barrier, BQ * ((DIMS.nope + DIMS.rope) * 2 + 4) + MORE)",
    ),
    BackwardDefect(
        "the rope row of another head",
        None,
        "gradients.loads",
        "head = head * 0",
        "head = head * 1",
    ),
    BackwardDefect(
        "rope columns of Q are the first ones",
        None,
        "backward.query_pass",
        "load_rows(sources.q.rope, row, item.head, DIMS.nope, bar, smem.q.rope.index(w))",
        "load_rows(sources.q.rope, row, item.head, 0, bar, smem.q.rope.index(w))",
    ),
    BackwardDefect(
        "statistics of the sequence's first rows for every block",
        None,
        "gradients.loads",
        "place = item.place + row",
        "place = item.place",
        "rings",
    ),
    BackwardDefect(
        "delta is the total",
        None,
        "gradients.loads",
        "line = sources.heads + item.head",
        "line = item.head",
    ),
]
PRODUCTS = [
    BackwardDefect(
        "K of another block is given back",
        Kind.DEADLOCK,
        "backward.query_pass",
        "mbarrier.arrive(bars.k_empty.index(before), count=1)",
        "mbarrier.arrive(bars.k_empty.index(stage), count=1)",
        "rings",
        after="gradients = P * (dP - rows.delta[:, None])",
    ),
    BackwardDefect(
        "scores are read before the product has ended",
        Kind.ACCUMULATOR,
        "backward.query_pass",
        "S = warpgroup_mma_wait(1 + PARTS, deps=(S_next,))",
        "S = warpgroup_mma_wait(2 + PARTS, deps=(S_next,))",
        "rings",
    ),
    BackwardDefect(
        "dP^T is read before the product has ended",
        Kind.ACCUMULATOR,
        "backward.key_pass",
        "dP = warpgroup_mma_wait(ADDED, deps=(dP_next,))",
        "dP = warpgroup_mma_wait(ADDED + 1, deps=(dP_next,))",
        "rings",
    ),
    BackwardDefect(
        "Q of another block is given back",
        Kind.DEADLOCK,
        "backward.key_pass",
        "mbarrier.arrive(bars.q_empty.index(before), count=1)",
        "mbarrier.arrive(bars.q_empty.index(stage), count=1)",
        "rings",
        after="dS = score_gradients(P, dP, smem, stage)",
    ),
    BackwardDefect(
        "d_v by scores' gradients",
        None,
        "backward.key_pass",
        "P = unpack(words_p, BQ, DTYPE, VL)",
        "P = unpack(words_s, BQ, DTYPE, VL)",
    ),
    BackwardDefect(
        "rope columns of gradients are not summed",
        None,
        "backward.products",
        "rope = warpgroup_mma(narrow, walked.rope.index(stage), sums.rope, is_async=True)",
        "rope = warpgroup_mma(narrow, walked.rope.index(stage), sums.rope, use_acc=False, "
        "is_async=True)",
    ),
    BackwardDefect(
        "delta is added",
        None,
        "backward.key_pass",
        "return P * (dP - delta[None, :])",
        "return P * (dP + delta[None, :])",
    ),
    BackwardDefect(
        "the sign of the scale is lost in the key pass",
        None,
        "backward.key_pass",
        "S = signed(S, HOW.sign)",
        NOTHING,
        "negative scale",
    ),
]
MASKS = [
    BackwardDefect(
        "a key is seen by the query before it",
        None,
        "gradients.work_items",
        "limit = row - (k_len - q_len)",
        "limit = row - (k_len - q_len) - 1",
    ),
    BackwardDefect(
        "a query sees one key less",
        None,
        "gradients.work_items",
        "limit = k_len - q_len + row + 1",
        "limit = k_len - q_len + row",
    ),
    BackwardDefect(
        "one block of queries too few has a mask",
        None,
        "gradients.work_items",
        "masked = (gl.maximum(limit + OWN - 1, 0) + STEP - 1) // STEP - first",
        "masked = (gl.maximum(limit + OWN - 1, 0) + STEP - 1) // STEP - first - 1",
        "edges",
    ),
    BackwardDefect(
        "the second consumer has the mask of the first",
        None,
        "backward.key_pass",
        "get(info, slot, FIRST, WARPS) * BQ + WHO * 64",
        "get(info, slot, FIRST, WARPS) * BQ",
    ),
    BackwardDefect(
        "columns of a quad's threads are mixed up",
        None,
        "backward.masks",
        "limit = limit - (2 * gl.arange(0, 4, TL))[None, None, :, None]",
        "limit = limit - gl.arange(0, 4, TL)[None, None, :, None]",
    ),
]
BITS = [
    BackwardDefect(
        "bytes of the query pass's bits are not expected",
        Kind.BYTES,
        "backward.query_pass",
        "BITS: gl.constexpr = NC * WGMMA_ROWS * BN // 8 if HOW.has_key_mask else 0",
        "BITS: gl.constexpr = WGMMA_ROWS * BN // 8 if HOW.has_key_mask else 0",
        "key mask",
    ),
    BackwardDefect(
        "bits of the query pass are of the block after",
        None,
        "backward.query_pass",
        "load_bits(sources.bits, row // BN, column, ready, smem.bits, stage * NC, NC)",
        "load_bits(sources.bits, row // BN + 1, column, ready, smem.bits, stage * NC, NC)",
        "key mask",
    ),
    BackwardDefect(
        "bits of the query pass are of the sequence's first tile",
        None,
        "backward.query_pass",
        "column = item.place * (BN // 32)",
        "column = (item.place // 256 * 256) * (BN // 32)",
        "key mask, rings",
    ),
    BackwardDefect(
        "the second consumer has the bits of the first",
        None,
        "backward.query_pass",
        "load_words(smem.bits.index(stage * NC + WHO), S)",
        "load_words(smem.bits.index(stage * NC), S)",
        "key mask",
    ),
    BackwardDefect(
        "bits of the key pass are in the order of keys",
        None,
        "backward.key_pass",
        "column = (item.rows - 1) // OWN * OWN",
        "column = 256 - (item.rows - 1) // OWN * OWN",
        "key mask",
    ),
    BackwardDefect(
        "bits of the key pass are of the sequence's first queries",
        None,
        "backward.key_pass",
        "line = (item.place + row) // BQ",
        "line = item.place // BQ",
        "key mask",
    ),
    BackwardDefect(
        "bits of the key pass are not used in blocks without a causal mask",
        None,
        "backward.key_pass",
        "if HOW.has_key_mask:\n        S = keep_bits",
        "if HOW.has_key_mask and MASKED:\n        S = keep_bits",
        "key mask, rings",
    ),
    BackwardDefect(
        "bits of a block are those of another stage",
        Kind.RACE,
        "backward.key_pass",
        "load_words(smem.bits.index(stage * NC + WHO), S)",
        "load_words(smem.bits.index((stage * NC + NC + WHO) % (3 * NC)), S)",
        "key mask, rings",
    ),
    BackwardDefect(
        "the words of a query are swapped",
        None,
        "gradients.seen_bits",
        "(EACH * rows) + word % EACH",
        "(EACH * rows) + 1 - word % EACH",
        "key mask",
    ),
    BackwardDefect(
        "bits of queries past the sequence are written",
        None,
        "gradients.seen_bits",
        "here = (row < item.rows) & (word < words) & exists",
        "here = (row < item.rows - 1) & (word < words) & exists",
        "key mask",
    ),
    BackwardDefect(
        "words past the mask are read",
        Kind.BOUNDS,
        "gradients.seen_bits",
        "here = (row < item.rows)[:, None] & (word < words)[None, :]",
        "here = (row < item.rows)[:, None]",
        "key mask",
    ),
    BackwardDefect(
        "a tile of keys that does not exist is written",
        Kind.BOUNDS,
        "gradients.seen_bits",
        "exists = (item.blocks > 0) & (tile >= 0)",
        "exists = item.blocks > 0",
        "key mask",
    ),
    BackwardDefect(
        "bits of queries are in the opposite order",
        None,
        "gradients.seen_bits",
        "(bits & 1) << query[:, :, None]",
        "(bits & 1) << (31 - query[:, :, None])",
        "key mask",
    ),
    BackwardDefect(
        "tiles of queries of all sequences begin where the first one's do",
        None,
        "gradients.seen_bits",
        "target = base + (item.place // BITS + of_block)",
        "target = base + (item.place // 256 * 8 + of_block)",
        "key mask",
    ),
]
TWO_TILES = [
    BackwardDefect(
        "columns of K's rope lie where those without rope do",
        Kind.RACE,
        "gradients.loads",
        "rope = panel_of(rope, sources.k.rope, 1)",
        "rope = panel_of(rope, sources.k.rope, 0)",
        "192+64→256",
    ),
    BackwardDefect(
        "columns of K before those with rope are its first ones",
        None,
        "backward.key_pass",
        "load_rows(sources.k_tail, row, item.head, DIMS.nope, bar, tail)",
        "load_rows(sources.k_tail, row, item.head, 0, bar, tail)",
        "192+64→256",
    ),
    BackwardDefect(
        "the other half of d_k's second tile is its rope's",
        None,
        "backward.key_pass",
        "tail, rope = gl.split(both)",
        "rope, tail = gl.split(both)",
        "192+64→256",
    ),
    BackwardDefect(
        "columns of d_k before the rope are written over its first ones",
        Kind.OUTPUT,
        "backward.key_pass",
        "write_gradient(tail, scale, seen, gradients.k, item, DIMS.nope, WHO)",
        "write_gradient(tail, scale, seen, gradients.k, item, 0, WHO)",
        "192+64→256",
    ),
    BackwardDefect(
        "delta is of half of the columns",
        None,
        "gradients.statistics",
        "products += gl.sum(out * d_out, 1)",
        NOTHING,
        "192+64→256",
    ),
    BackwardDefect(
        "d_out is given back before d_v has it",
        Kind.RACE,
        "backward.key_pass",
        'if HOW.gradients == "k":\n            mbarrier.arrive(bars.d_empty.index(at), count=1)',
        'if HOW.gradients != "all":\n            mbarrier.arrive(bars.d_empty.index(at), count=1)',
        "192+64→256, rings",
        after="dS = score_gradients(P, dP, smem, stage)",
    ),
    BackwardDefect(
        "d_v does not wait for d_out",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.d_ready.index(at_before), ((it - 1) // DST) & 1)",
        NOTHING,
        "192+64→256, rings",
        after="dP_next = issue_weight_gradients(smem.v, smem.d_out, at, WHO, SL)",
    ),
    BackwardDefect(
        "V is waited for in the phase of K",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.v_ready.index(at), (it // VST) & 1)",
        "mbarrier.wait(bars.v_ready.index(at), (it // ST) & 1)",
        "192+64→256, rings",
        after="S_next = issue_scores(smem.q, smem.k, stage, WHO, SL, DIMS)",
    ),
    BackwardDefect(
        "V is overwritten while it is read",
        Kind.RACE,
        "backward.query_pass",
        "mbarrier.wait(bars.v_empty.index(at), free_phase_of(it, phase, VST, ST))",
        NOTHING,
        "192+64→256, rings",
    ),
    BackwardDefect(
        "d_out is overwritten while it is read",
        Kind.RACE,
        "backward.key_pass",
        "mbarrier.wait(bars.d_empty.index(at), free_phase_of(it, phase, DST, ST))",
        NOTHING,
        "192+64→256, rings",
    ),
    BackwardDefect(
        "a ring of two slots is filled in the phases of one of three",
        Kind.RACE,
        "backward.rings",
        "return ((it // SLOTS) & 1) ^ 1",
        "return other",
        "192+64→256, rings",
    ),
]
STATISTICS = [
    BackwardDefect(
        "the sink is left out of the total",
        None,
        "gradients.statistics",
        "total = gl.maximum(lse, sink) + gl.log(1.0 + gl.exp(-gl.abs(lse - sink)))",
        "total = lse + 0.0 * sink",
        "sink",
    ),
    BackwardDefect(
        "the gradient of lse is left out",
        None,
        "gradients.statistics",
        "delta = delta - gl.load(d_lse_rows, mask=seeing, other=0.0)",
        NOTHING,
        "gradient of lse",
    ),
    BackwardDefect(
        "d_sink has the wrong sign",
        None,
        "gradients.statistics",
        "part = -gl.sum(gl.where(seeing, share * delta, 0.0), 0)",
        "part = gl.sum(gl.where(seeing, share * delta, 0.0), 0)",
        "sink",
    ),
    BackwardDefect(
        "delta is written over the total",
        Kind.BOUNDS,
        "gradients.launch",
        "statistics = op.q.new_empty(2 * heads, rows, dtype=torch.float32)",
        "statistics = op.q.new_empty(heads, rows, dtype=torch.float32)",
    ),
]
RESULTS = [
    BackwardDefect(
        "the row after a sequence is written",
        Kind.RACE,
        "backward.store",
        "(row < item.rows)[:, None])",
        "(row <= item.rows)[:, None])",
        after="def write_gradient",
    ),
    BackwardDefect(
        "keys that nobody sees are not cleared",
        None,
        "backward.store",
        "gl.where(kept, acc * scale + 0.0, 0.0).to(rows.base.dtype.element_ty)",
        "(acc * scale).to(rows.base.dtype.element_ty)",
        "negative scale",
    ),
    BackwardDefect(
        "the rope's last head is not added",
        None,
        "gradients.sums",
        "more = ok & (first + i < parts)",
        "more = ok & (first + i < parts - 1)",
    ),
    BackwardDefect(
        "columns of d_q's rope are those of its first part",
        None,
        "backward.query_pass",
        "write_gradient(rope, scale, narrow[:, None], d_q_rows, item, DIMS.nope, WHO)",
        "write_gradient(rope, scale, narrow[:, None], d_q_rows, item, 0, WHO)",
    ),
]
DEFECTS = LOADS + PRODUCTS + MASKS + BITS + TWO_TILES + STATISTICS + RESULTS


def test_their_names_differ() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 30


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_defect_is_found(defect: BackwardDefect, tmp_path: Path) -> None:
    mutant = load_mutant(package, defect.file, defect.apply, "backward.launch", tmp_path)
    assert_found(defect.kind, partial(HOPPER.check, mutant, CASES[defect.case]))


@pytest.mark.parametrize("name", controls((d.case for d in DEFECTS), TESTED))
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    assert HOPPER.check(launcher, CASES[name], "random", 1) == (set(), True)
