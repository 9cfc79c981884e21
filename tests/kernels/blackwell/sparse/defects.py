"""Seeded defects of the sparse Blackwell kernel: a text change to one of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import openmla.kernels.blackwell as package
from gluon_sim import Kind
from kernels.mutants import NOTHING, load_mutant, once


@dataclass(frozen=True)
class SparseDefect:
    """Replace `old` by `new` in `file`.py of sparse, or of the kernel's own folder.

    `kind` None: only the numbers are wrong. `after`: a text before it, if `old` is there twice.
    """

    name: str
    kind: Kind | None
    file: str
    old: str
    new: str
    case: str = "bf16"
    after: str = ""


def load_defect(defect: SparseDefect, folder: Path, kernel: str = "sparse") -> ModuleType:
    """The launch module of a copy of the kernel with the defect."""
    file = defect.file if "." in defect.file else f"{kernel}.{defect.file}"
    edit = once(defect.old, defect.new, defect.after)
    return load_mutant(package, file, edit, f"{kernel}.launch", folder)


DEFECTS = [
    SparseDefect(
        "every query has the scale of the first",
        None,
        "softmax",
        "gl.load(q_scale_ptr + token)",
        "gl.load(q_scale_ptr)",
        "fp8 queries",
    ),
    SparseDefect(
        "e4m3 queries are copied with half of their columns",
        None,
        "launch",
        "upcast(op.q.reshape(pieces), q",
        "upcast(op.q.reshape(pieces)[..., :32], q",
        "fp8 queries",
    ),
    SparseDefect(
        "one atom of V: the halves of the keys lie in one tile",
        Kind.RACE,
        "load",
        "tile = v_smem.index(ATOMS * HALF + atom)",
        "tile = v_smem.index((ATOMS - 1) * HALF + atom)",
        "256+64",
    ),
    SparseDefect(
        "one atom of V: half of its columns are not rescaled",
        None,
        "softmax",
        "gl.static_range(ATOMS * 256 // WIDTH)",
        "gl.static_range(ATOMS * 128 // WIDTH)",
        "256+64",
    ),
    SparseDefect(
        "without rope: Q's columns in shared memory are copied a second time",
        None,
        "load",
        "KEPT + g * GATHERED, ready, tile)",
        "g * GATHERED, ready, tile)",
        "512+0",
    ),
    SparseDefect(
        "Q is copied to the wrong column of tensor memory",
        Kind.UNWRITTEN,
        "mma",
        "lanes = reinterpret_columns(place, gl.float32, [128, WORDS_PER_TILE], LAYOUT)",
        "lanes = reinterpret_columns("
        "tmem.slice(MAP.q + (GROUPS - 1) * WORDS_PER_TILE, WORDS_PER_TILE), "
        "gl.float32, [128, WORDS_PER_TILE], LAYOUT)",
    ),
    SparseDefect(
        "the scores lie over the output",
        Kind.RACE,
        "mma",
        "tmem.slice(MAP.scores, B_TOPK), gl.float32",
        "tmem.slice(MAP.scores - 64, B_TOPK), gl.float32",
    ),
    SparseDefect(
        "Q's groups are multiplied one tile off",
        None,
        "mma",
        "q = query(tmem, g - EARLY,",
        "q = query(tmem, (g - EARLY + 1) % 6,",
    ),
    SparseDefect(
        "the copy of Q is not committed",
        Kind.DEADLOCK,
        "mma",
        "    tcgen05_commit(bars.q_copied.index(0))\n",
        "",
    ),
    SparseDefect(
        "the commit of S V signals the other slot",
        Kind.DEADLOCK,
        "mma",
        "tcgen05_commit(done.index(k % NB))",
        "tcgen05_commit(done.index((k + 1) % NB))",
    ),
    SparseDefect(
        "V's halves are swapped",
        None,
        "mma",
        "weights = p_smem.slice(HALF * KEYS, KEYS, dim=1)",
        "weights = p_smem.slice((1 - HALF) * KEYS, KEYS, dim=1)",
    ),
    SparseDefect(
        "V's atoms are swapped",
        None,
        "load",
        "tma.async_gather(v_desc, rows, atom * ATOM,",
        "tma.async_gather(v_desc, rows, (1 - atom) * ATOM,",
    ),
    SparseDefect(
        "the wait for a step has its phase off by one",
        Kind.RACE,
        "rows",
        "mbarrier.wait(barrier.index(step % NB), (step // NB) & 1)",
        "mbarrier.wait(barrier.index(step % NB), ((step // NB) & 1) ^ 1)",
    ),
    SparseDefect(
        "V is loaded over Q before Q was copied",
        Kind.RACE,
        "load",
        "    mbarrier.wait(bars.q_copied.index(0), 0)\n",
        NOTHING,
        after="def load_v(",
    ),
    SparseDefect(
        "K's later columns are loaded over Q before Q was copied",
        Kind.RACE,
        "load",
        "        if k == 0:\n            mbarrier.wait(bars.q_copied.index(0), 0)\n",
        "",
    ),
    SparseDefect(
        "K is loaded before the products before have read it",
        Kind.RACE,
        "load",
        "        wait_for_step(bars.qk_ts_done, k - 1, NB)\n",
        "",
    ),
    SparseDefect(
        "half the bytes of V are announced",
        Kind.BYTES,
        "load",
        "ATOMS * KEYS * ATOM * 2",
        "KEYS * ATOM * 2",
    ),
    SparseDefect(
        "scores are released before they are read",
        Kind.RACE,
        "softmax",
        "        s = S.load(REGS.scores) * factor\n"
        "        mbarrier.arrive(bars.p_free.index(slot), count=1)\n",
        "        mbarrier.arrive(bars.p_free.index(slot), count=1)\n"
        "        s = S.load(REGS.scores) * factor\n",
    ),
    SparseDefect(
        "validity is ignored",
        None,
        "softmax",
        "by_byte = gl.where(counts != 0, by_byte, MINUS_INF)",
        "by_byte = gl.where(counts >= 0, by_byte, MINUS_INF)",
    ),
    SparseDefect(
        "validity bits are read before they are there",
        Kind.RACE,
        "softmax",
        "wait_for_step(bars.k_valid_ready, k, NB)",
        "pass",
    ),
    SparseDefect(
        "the validity bits of the step before are read",
        Kind.RACE,
        "softmax",
        "hide_invalid(s, smem.is_k_valid.index(slot), B_TOPK)",
        "hide_invalid(s, smem.is_k_valid.index((k + 1) % NB), B_TOPK)",
    ),
    SparseDefect(
        "weights are overwritten while they are multiplied",
        Kind.RACE,
        "softmax",
        "        wait_for_step(bars.sv_p1_done, k - 1, NB)  # both the last weights and O are free",
        "        # both the last weights and O are free",
    ),
    SparseDefect(
        "weights are not fenced",
        Kind.FENCE,
        "softmax",
        "        fence_async_shared()\n        mbarrier.arrive(bars.so_ready",
        "        mbarrier.arrive(bars.so_ready",
    ),
    SparseDefect(
        "O is not multiplied when the reference moves",
        None,
        "softmax",
        "            rescale_rows(O, rescale, ATOMS, REGS)\n",
        "            pass\n",
        "rising",
    ),
    SparseDefect(
        "the output is stored before it is fenced",
        Kind.FENCE,
        "softmax",
        "    fence_async_shared()\n    thread_barrier()\n",
        "    thread_barrier()\n",
    ),
    SparseDefect(
        "an index past the pool counts",
        None,
        "rows",
        "return index, (index >= 0) & (index < keys.pool.rows)",
        "return index, index >= 0",
    ),
    SparseDefect(
        "scales of an earlier step are used",
        None,
        "rows_fp8",
        "load_scales_to_smem(sources, keys, k, k_scales, HOW, CACHE)",
        "load_scales_to_smem(sources, keys, k // 2, k_scales, HOW, CACHE)",
        "fp8",
    ),
    SparseDefect(
        "V's second half has the scales of the first",
        None,
        "rows_fp8",
        "dequantize(tiles[g], v_scales, HALF * KEYS,",
        "dequantize(tiles[g], v_scales, 0,",
        "fp8",
    ),
    SparseDefect(
        "the second scale of 64 columns is the first",
        None,
        "rows_fp8",
        "line = scales.index(COLUMN // BLOCK + 1)",
        "line = scales.index(COLUMN // BLOCK)",
        "fp8",
    ),
    SparseDefect(
        "K is dequantized over tiles in use",
        Kind.RACE,
        "rows_fp8",
        "        wait_for_step(bars.qk_ts_done, k - 1, NB)\n",
        "",
        "fp8",
    ),
    SparseDefect(
        "raw rows of K are not waited for",
        Kind.RACE,
        "rows_fp8",
        "        wait_for_step(bars.k_fp8_tma_done, k, NB)\n",
        "",
        "fp8",
    ),
    SparseDefect(
        "raw rows are dequantized before they are there",
        Kind.RACE,
        "rows_fp8",
        "        wait_for_step(bars.v_fp8_tma_done, k, NB)\n",
        "",
        "fp8",
    ),
    SparseDefect(
        "one index into a step is not a step",
        None,
        "rows",
        "(count + (B_TOPK - 1)) // B_TOPK",
        "(count + (B_TOPK - 2)) // B_TOPK",
        "row_max-129",
    ),
    SparseDefect(
        "causal: a token sees one key after its own",
        None,
        "rows",
        "span_of(token + 1, stop",
        "span_of(token + 2, stop",
        "latent",
    ),
    SparseDefect(
        "a row of a page is taken for the next",
        None,
        "rows",
        "page * TABLE + at % TABLE",
        "page * TABLE + (at + 1) % TABLE",
        "latent",
    ),
    SparseDefect(
        "the first token of a sequence is served as the last of the one before",
        None,
        "rows",
        "end <= token",
        "end < token",
        "latent",
    ),
    SparseDefect(
        "a window is a key too long",
        None,
        "rows",
        "gl.maximum(count - window, 0)",
        "gl.maximum(count - window - 1, 0)",
        "window",
    ),
    SparseDefect(
        "the first keys of a sequence, as many as its window has",
        None,
        "rows",
        "at += keys.first",
        "at += keys.first * 0",
        "window",
    ),
    SparseDefect(
        "a step too few where a window begins inside of one",
        None,
        "kernel",
        "seen = count - first_key",
        "seen = gl.maximum((count - first_key) // B_TOPK, 1) * B_TOPK",
        "window",
    ),
]
