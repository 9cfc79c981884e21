"""Seeded defects of the dense Blackwell kernel: a text change to one of its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import openmla.kernels.blackwell as package
from gluon_sim import Kind
from kernels.blackwell.simulated import PAIR
from kernels.mutants import NOTHING, Defect, load_mutant


@dataclass(frozen=True)
class DenseDefect(Defect):
    """With a case that most of them show in."""

    case: str = "two blocks"


def load_defect(defect: DenseDefect, folder: Path) -> ModuleType:
    """The launch module of a copy of the kernel with the defect."""
    return load_mutant(package, defect.file, defect.apply, "dense.launch", folder)


DEFECTS = [
    DenseDefect(
        "the second query tile is not waited for", Kind.RACE, "multiply",
        "mbarrier.wait(second.index(0), 0)", NOTHING,
    ),
    DenseDefect(
        "V is not waited for", Kind.RACE, "multiply",
        "mbarrier.wait(full.index(at), v_phase)", NOTHING,
    ),
    DenseDefect(
        "missing commit of a score tile", Kind.DEADLOCK, "multiply",
        "tcgen05_commit(s_full.index(1))", NOTHING,
    ),
    DenseDefect(
        "missing commit of a slot of V", Kind.DEADLOCK, "multiply",
        "tcgen05_commit(empty.index(at))", NOTHING, "ring turns",
    ),
    DenseDefect(
        "weights are waited for in the wrong phase", Kind.RACE, "multiply",
        "p_full.index(0), (j - skipped) & 1)", "p_full.index(0), ((j - skipped) & 1) ^ 1)",
    ),
    DenseDefect(
        "one query tile: weights are waited for a phase too early", Kind.RACE, "multiply",
        "(j // 2) & 1)", "((j // 2) & 1) ^ 1)", "two blocks", 1,
    ),
    DenseDefect(
        "both outputs in the columns of the first", Kind.RACE, "columns",
        "tmem.slice(TMEM[2 + out], TMEM[5])", "tmem.slice(TMEM[2], TMEM[5])",
    ),
    DenseDefect(
        "weights 16 columns off", None, "columns",
        "weights_at(tmem, TMEM[tile] + part * WIDTH, TMEM[4]",
        "weights_at(tmem, TMEM[tile] + part * WIDTH + 16, TMEM[4]",
    ),
    DenseDefect(
        "halves of the weights swapped", None, "columns",
        "(2 * part + half) * WIDTH", "(2 * part + 1 - half) * WIDTH",
    ),
    DenseDefect(
        "the row_sum is told over the last rescale", Kind.RACE, "columns",
        "TOTAL = gl.constexpr(1)", "TOTAL = gl.constexpr(0)",
    ),
    DenseDefect(
        "the accumulator is released before it is rescaled", Kind.RACE, "correction",
        "    if j > 0:\n", "    mbarrier.arrive(p_full.index(tile), count=1)\n    if j > 0:\n",
        "falling",
    ),
    DenseDefect(
        "the accumulator is rescaled under a product", Kind.RACE, "correction",
        "mbarrier.wait(o_full.index(out), (j - 1) & 1)", NOTHING, "falling", 1,
    ),
    DenseDefect(
        "the accumulator is read before the last product", Kind.RACE, "correction",
        "mbarrier.wait(o_full.index(out), (products - 1) & 1)", NOTHING,
    ),
    DenseDefect(
        "row_sums are not waited for", Kind.RACE, "correction",
        "mbarrier.wait(t_full.index(out), 0)", NOTHING,
    ),
    DenseDefect(
        "a stale row_sum: not brought to the new reference", None, "softmax",
        "row_sum * rescale + gl.sum", "row_sum + gl.sum", "falling",
    ),
    DenseDefect(
        "the reference moves by less than the sums", None, "softmax",
        "row_max + grown, highest)", "highest, highest)", "light keys, bf16",
    ),
    DenseDefect(
        "the first tile skips a block of which it sees one key", None, "tiles",
        "(half_stop + BN - 1) // BN", "(half_stop + BN - 2) // BN", "half an edge",
    ),
    DenseDefect(
        "a pair multiplies when one CTA has its weights", Kind.RACE, "kernel",
        "p_full = signals(2, 2, CTAS, True)", "p_full = signals(2, 2, CTAS, False)", "two blocks",
        PAIR,
    ),
    DenseDefect(
        "a pair multiplies when one CTA has its keys", Kind.RACE, "kernel",
        "ring = (signals(SLOTS, 1, CTAS, True)", "ring = (signals(SLOTS, 1, CTAS, False)",
        "two blocks", PAIR,
    ),
    DenseDefect(
        "each CTA of a pair waits for the bytes of both", Kind.DEADLOCK, "launch",
        "config.ov_depth * size // kernel.ctas", "config.ov_depth * size", "two blocks", PAIR,
    ),
    DenseDefect(
        "the second query tile is masked as the first", None, "softmax",
        "seen += WHO * Q_ROWS * TMEM[6]", NOTHING,
    ),
    DenseDefect(
        "scales of keys are not waited for", Kind.RACE, "softmax",
        "mbarrier.wait(scale_bars[0].index(place), (j // scales[0].shape[0]) & 1)", NOTHING,
        "scales",
    ),
    DenseDefect(
        "stale scales: those of the block before", None, "softmax",
        "key_scales.index(place)", "key_scales.index((place + 2) % 3)", "scales",
    ),
    DenseDefect(
        "a slot is filled before it is free", Kind.RACE, "load",
        "mbarrier.wait(empty.index(slot), phase ^ 1)", NOTHING, "ring turns",
    ),
    DenseDefect(
        "scales of keys are overwritten too early", Kind.RACE, "load",
        "mbarrier.wait(empty.index(place), ((j // RING[2]) & 1) ^ 1)", NOTHING, "scales",
    ),
    DenseDefect(
        "one rope buffer for all", Kind.RACE, "ring",
        "j % RING[2]", "j % 1", "ring turns",
    ),
    DenseDefect(
        "missing fence after dequantizing", Kind.FENCE, "dequantize",
        "    fence_async_shared()\n", "", "fp8 rope",
    ),
    DenseDefect(
        "dequantized rope is not waited for", Kind.RACE, "multiply",
        "mbarrier.wait(k_wide.index(place), (j // k_rope.shape[0]) & 1)", NOTHING, "fp8 rope",
    ),
    DenseDefect(
        "the scale of the wrong block of columns", None, "dequantize",
        "row_scales(source, row, keys, i, PAGE)", "row_scales(source, row, keys, 0, PAGE)",
        "fp8 rope",
    ),
    DenseDefect(
        "the accumulator is not rescaled", None, "correction",
        "rescale(tmem, out, factor, TMEM)", NOTHING, "peaky", after="if j > 0:",
    ),
    DenseDefect(
        "one key into a block is not a block", None, "tiles",
        "(stop + BN - 1) // BN", "(stop + BN - 2) // BN", "edges",
    ),
    DenseDefect(
        "the last row's last key is not visited", None, "tiles",
        "gl.minimum(q_len - row, BM) - 1)", "gl.minimum(q_len - row, BM) - 2)", "edges",
    ),
    DenseDefect(
        "a block but for one key needs no mask", None, "tiles",
        "gl.maximum(gl.minimum(seen, k_len), 0) // BN",
        "(gl.maximum(gl.minimum(seen, k_len), 0) + 1) // BN", "edges",
    ),
    DenseDefect(
        "one query into a tile is not a tile", Kind.OUTPUT, "tiles",
        "heads * ((length + BM - 1) // BM)", "heads * ((length + BM - 2) // BM)", "edges",
    ),
    DenseDefect(
        "likewise, for one query tile", Kind.OUTPUT, "tiles",
        "heads * ((length + BM - 1) // BM)", "heads * ((length + BM - 2) // BM)", "edges", 1,
    ),
    DenseDefect(
        "one query into the second query tile is served as none", Kind.DEADLOCK, "correction",
        "work[2] > Q_ROWS", "work[2] > Q_ROWS + 1", "edges",
    ),
    DenseDefect(
        "FP8 weights without their 2^6", None, "launch",
        "\"WEIGHTS\": kernel.weights,", "\"WEIGHTS\": (kernel.weights[0], 0.0),", "light keys",
    ),
    DenseDefect(
        "one table entry after the last one is read", Kind.BOUNDS, "boxes",
        "gl.minimum(here // PAGE, entries - 1)", "gl.minimum(here // PAGE, entries - 1) + 1",
        "full table",
    ),
    DenseDefect(
        "blocks are counted as those of pairs", Kind.OUTPUT, "dense.launch",
        "config.BM * (2 if config.pair_cta else 1)", "config.BM * 2", "seven tiles",
    ),
    DenseDefect(
        "the last row has no block", Kind.OUTPUT, "dense.launch",
        "total_q // rows + batch + 1", "total_q // rows + batch - 1", "seven tiles",
    ),
]  # fmt: skip
