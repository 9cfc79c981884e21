"""Every seeded defect of the CDNA4 kernels is found, by the simulator or by the acceptance rule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gluon_sim import Limits, intercept
from kernels.cdna4.defect import Defect, load_defect
from kernels.cdna4.dense.test_kernel import BF16_EDGES, FP8_EDGES, FULL_TABLE, LIGHT, MASKED
from kernels.cdna4.simulated import plan_of
from kernels.judging import as_built, light_keys, on
from kernels.mutants import controls
from kernels.shared_keys import with_shared_keys
from openmla.lab.testing.build import BuiltCase, Outcome
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results

FP8 = Case("dense", 1, 128, 64, 128, q_lens=(40,), k_lens=(300,), spare=3, dtype="e4m3")
SPARSE = Case(
    "sparse",
    2,
    512,
    64,
    512,
    q_lens=(2,),
    k_lens=(150,),
    spare=3,
    topk=140,
    scale=0.07,
    index_kind="mixed",
)
# A tile has 64 of 100 rows, some of which see one block, some two; page 0 is not full.
LATENT = Case(
    "latent",
    20,
    512,
    64,
    512,
    q_lens=(5, 3),
    k_lens=(66, 144),
    scale=0.07,
    kv="bf16",
    page_size=16,
    seed=18,
)
CASES = {
    "fp8": FP8,
    "heads": replace(FP8, heads=2),
    "bf16": replace(FP8, dtype="bf16"),
    "pages": replace(FP8, dtype="bf16", rope="cache", kv="bf16", page_size=16),
    "sparse": SPARSE,
    "fp8 edges": FP8_EDGES,
    "bf16 edges": BF16_EDGES,
    "full table": FULL_TABLE,
    "GLM-5": replace(FP8, dtype="bf16", d_nope=192, d_v=256, k_lens=(130,)),
    "light keys": LIGHT,
    "scales": replace(FP8, q_scale=True, k_scale=True),
    "scales of two": replace(FP8, q_lens=(20, 9), k_lens=(70, 33), q_scale=True, k_scale=True),
    "values bf16 of two": replace(
        FP8, q_lens=(20, 9), k_lens=(70, 33), side_dtype="bf16", rope_dtype="e4m3"
    ),
    "values bf16": replace(FP8, side_dtype="bf16", rope_dtype="e4m3"),
    "fp8 GLM-5": replace(FP8, d_nope=192, d_v=256, k_scale=True),
    "mask": replace(MASKED, q_lens=(40, 33), k_lens=(150, 300), spare=0),
    "GLM-5 mask": replace(MASKED, d_nope=192, d_v=256, q_lens=(20,), k_lens=(130,), causal=False),
    "shared keys": replace(FP8, dtype="bf16", q_lens=(20, 33), k_lens=(70, 65), spare=0),
    "window": replace(FP8, dtype="bf16", q_lens=(70, 40), k_lens=(300, 200), window=90, spare=0),
    "window pages": replace(
        FP8, dtype="bf16", k_lens=(150,), window=40, rope="cache", kv="bf16", page_size=16
    ),
    "window mask": replace(MASKED, q_lens=(40,), k_lens=(150,), window=33, spare=0),
    "window scales": replace(FP8, q_lens=(33,), k_lens=(200,), window=60, k_scale=True),
    "sparse window": replace(LATENT, q_lens=(5, 9), k_lens=(170, 330), window=70),
    "fp32 out": replace(FP8, heads=2, q_lens=(3,), out="aligned", fp32_out=True),
    "sparse fp32 out": replace(LATENT, out="aligned", fp32_out=True),
    "sparse row_max-65": replace(SPARSE, topk=65, index_kind="distinct"),
    "sparse few of many": replace(SPARSE, k_lens=(1000,), topk=70),
    "sparse pages": LATENT,
    "sparse sinks": replace(LATENT, q_lens=(5,), k_lens=(70,), sink="mixed"),
    "sparse fp8": replace(SPARSE, kv="fp8_block64", page_size=16),
    "sparse 256": replace(SPARSE, d_nope=256, d_v=256, k_lens=(1000,), topk=70),
    "sparse 256 fp8": replace(SPARSE, d_nope=256, d_v=256, kv="fp8_block64", page_size=16),
}
DEFECTS = [
    Defect(
        "W of v227 without R",
        "layouts",
        "return TileLayouts(layout, layout,",
        "return TileLayouts(layout, gl.SharedLinearLayout("
        "[[0, 1 << n] for n in range(7)] + [[1 << n, 0] for n in range(7)]),",
    ),
    Defect(
        "R of v227 without W",
        "layouts",
        "return TileLayouts(layout, layout,",
        "return TileLayouts(gl.SharedLinearLayout("
        "[[0, 1 << n] for n in range(7)] + [[1 << n, 0] for n in range(7)]), layout,",
    ),
    Defect(
        "K is read without its swizzle",
        "layouts",
        "        read = k_sub_bases(slot)\n",
        "        read = k_sub_bases(slot).plain\n",
    ),
    Defect(
        "K is written without its swizzle",
        "dense",
        "k.row_stride, first, limit, K[p].copy, True)",
        "k.row_stride, first, limit, K[p].copy, False)",
    ),
    Defect(
        "the swizzle takes other bits of the row",
        "copies",
        "((rows // 4) % 4)",
        "((rows // 2) % 4)",
    ),
    Defect(
        "the wait for K leaves one group too many",
        "dense",
        "async_copy.wait_group(2)\n        slot = j",
        "async_copy.wait_group(3)\n        slot = j",
    ),
    Defect(
        "the wait for V leaves one group too many",
        "dense",
        "async_copy.wait_group(2)\n        v_lane",
        "async_copy.wait_group(3)\n        v_lane",
    ),
    Defect(
        "Q is not waited for",
        "dense",
        "async_copy.wait_group(2)\n        q_frags",
        "async_copy.wait_group(3)\n        q_frags",
    ),
    Defect("the last copies stay in flight", "dense", "    async_copy.wait_group(0)\n", ""),
    Defect(
        "K of the next tile goes to the slot in use",
        "dense",
        "slot = (j + 1) % K_RING",
        "slot = j % K_RING + 0",
    ),
    Defect(
        "V of the next tile goes to the slot in use",
        "dense",
        "dma_V(rings.v.index((j + 1) % V_RING)",
        "dma_V(rings.v.index(j % V_RING)",
    ),
    Defect(
        "copies of V are never committed",
        "dense",
        "limit, LAYOUT.copy, False)\n    async_copy.commit_group()",
        "limit, LAYOUT.copy, False)",
    ),
    Defect(
        "strips of V are swapped",
        "dense",
        "load_V_from_lane_base(v_lane_base, i,",
        "load_V_from_lane_base(v_lane_base, STRIPS - 1 - i,",
    ),
    Defect(
        "two score tiles are joined in the wrong order",
        "mma_op",
        "gl.join(low, high)",
        "gl.join(high, low)",
        config={"p_dtype": "float8_e4m3fn"},
    ),
    Defect(
        "rope is read at column 0 of a row",
        "dense",
        "ptr=rope_ptr + ROPE_AT,",
        "ptr=rope_ptr,",
        "pages",
    ),
    Defect(
        "a page is read from its first row",
        "copies",
        "(position(rows + first, rope.line) % PAGE)",
        "(position(rows + first, rope.line) * 0)",
        "pages",
    ),
    Defect("pages of the tile before", "dense", "pages = pages_ahead", "pages = pages", "pages"),
    Defect(
        "fragments of the first tile's keys",
        "dense",
        "load_K_frag(subs, I * FRAGS + c, MMA)",
        "load_K_frag(subs, c, MMA)",
    ),
    Defect("rope meets the wrong part of Q", "dense", "q_frags[FIRST + c]", "q_frags[c]"),
    Defect(
        "parts of K are the same columns",
        "dense",
        "columns = at + p * BLOCK.part_width",
        "columns = at",
        "GLM-5",
    ),
    Defect("O is not rescaled", "dense", "(O[d] * rescales,)", "(O[d],)"),
    Defect("the row sum is not rescaled", "softmax", "row_sum * rescale + ", "row_sum + "),
    Defect(
        "V of the next tile goes to the last of two slots",
        "dense",
        "dma_V(rings.v.index((j + 1) % V_RING)",
        "dma_V(rings.v.index(1)",
        "GLM-5",
    ),
    Defect(
        "parts of K that waves share are read without their swizzle",
        "layouts",
        "KSlot(strip, width, width, element_bytes, waves))",
        "KSlot(strip, width, width, element_bytes, waves)).plain",
        "GLM-5",
    ),
    Defect("a query sees one key too many", "dense", "row + seen, keys", "row + seen + 1, keys"),
    Defect(
        "keys past the end are copied", "copies", "rows + first < limit", "rows + first < limit + 9"
    ),
    Defect("causal rows start at the row_max left", "tiles", "k_len - q_len + row + 1", "row + 1"),
    Defect(
        "K heads are not grouped",
        "dense",
        "kv_head = (item.head // GROUPS.kv)",
        "kv_head = (item.head * 0)",
        "heads",
    ),
    Defect(
        "rows that do not count stay as copied",
        "sparse.rows",
        "gl.where(ok[:, None], part.load(ROWS), 0.0)",
        "part.load(ROWS)",
        "sparse few of many",
    ),
    Defect(
        "a block that does not count whole is not cleared",
        "sparse.rows",
        "gl.min(counting(",
        "gl.max(counting(",
        "sparse few of many",
    ),
    Defect(
        "indices of the block before",
        "sparse",
        "numbers_of(source, (j + 2) * KV, KV, HOW)",
        "numbers_of(source, (j + 1) * KV, KV, HOW)",
        "sparse",
    ),
    Defect(
        "an index after the list is read",
        "sparse.rows",
        "(source.ptr, at, mask=at < source.places)",
        "(source.ptr, at, mask=at < source.places + 1)",
        "sparse",
    ),
    Defect(
        "an index after the list counts",
        "sparse.rows",
        "(at < source.places) & (number >= 0) & (number < source.rows)",
        "(at < source.places + 1) & (number >= 0) & (number < source.rows)",
        "sparse row_max-65",
    ),
    Defect(
        "a table entry after the last page is read",
        "sparse.rows",
        "(source.ptr, entry, mask=at < source.places)",
        "(source.ptr, entry, mask=at < source.places + 1)",
        "sparse pages",
    ),
    Defect(
        "keys after the sequence stay as copied",
        "sparse.rows",
        "        return at < source.places\n",
        "        return at < source.places + 64\n",
        "sparse pages",
    ),
    Defect(
        "a page is read from its first key",
        "sparse.rows",
        "(position(at, source) % PAGE)",
        "(position(at, source) * 0)",
        "sparse pages",
    ),
    Defect(
        "pages of the sequence before",
        "sparse",
        "tables.ptr + sequence.to(gl.int64) * tables.stride",
        "tables.ptr + (sequence * 0).to(gl.int64) * tables.stride",
        "sparse pages",
    ),
    Defect(
        "a token sees one key too many",
        "sparse",
        "last // heads + work.seen, work.keys",
        "last // heads + work.seen + 1, work.keys",
        "sparse pages",
    ),
    Defect(
        "a tile visits its first token's keys",
        "sparse",
        "return (work.first + gl.minimum(work.here, BM) - 1) // heads",
        "return work.first // heads",
        "sparse pages",
    ),
    Defect(
        "blocks that only some rows see whole need no mask",
        "sparse",
        "whole = gl.minimum(work.keys, work.seen + work.first // heads)",
        "whole = work.keys",
        "sparse pages",
    ),
    Defect(
        "rows of scores lie a head off",
        "softmax",
        "at = row + places.first\n",
        "at = row + places.first + 1\n",
        "sparse pages",
    ),
    Defect(
        "the sinks of other heads", "sparse", "(first + row) % heads", "row % heads", "sparse sinks"
    ),
    Defect(
        "the wait for rows leaves one group too many",
        "sparse",
        "async_copy.wait_group(1)",
        "async_copy.wait_group(2)",
        "sparse",
    ),
    Defect(
        "an index past the rows counts",
        "sparse.rows",
        "(number < source.rows)",
        "(number < source.rows + 5)",
        "sparse",
    ),
    Defect(
        "invalid rows are not masked",
        "sparse",
        "gl.where(ok[None, :], tiles[i], MINUS_INF)",
        "tiles[i]",
        "sparse",
    ),
    Defect(
        "scales of the next block",
        "sparse.rows",
        "(groups * GROUP + FIRST) // HOW.scale_block",
        "(groups * GROUP + FIRST + 8) // HOW.scale_block",
        "sparse fp8",
    ),
    Defect(
        "dequantized rows go to the slot in use",
        "sparse",
        "later = slot_at(rings, (j + 1) % SLOTS)",
        "later = slot_at(rings, j % SLOTS)",
        "sparse fp8",
    ),
    Defect(
        "rope of dequantized rows is not swizzled",
        "sparse.rows",
        "        columns = swizzled_source(place, column, GROUP)\n    else",
        "        columns = column[None, :]\n    else",
        "sparse fp8",
    ),
    Defect(
        "unmasked tiles reach too far",
        "tiles",
        "gl.minimum(seen, keys), 0) // KV",
        "gl.minimum(seen, keys), 0) // KV + 1",
        "bf16",
    ),
    Defect(
        "a tile but for one key needs no mask",
        "tiles",
        "gl.maximum(gl.minimum(seen, keys), 0) // KV",
        "(gl.maximum(gl.minimum(seen, keys), 0) + 1) // KV",
        "fp8 edges",
    ),
    Defect(
        "one key into a tile is not a tile",
        "tiles",
        "gl.maximum(stop, 0) + KV - 1",
        "gl.maximum(stop, 0) + KV - 2",
        "bf16 edges",
    ),
    Defect(
        "the last row's last key is not visited",
        "tiles",
        "gl.minimum(rows, BM) - 1)",
        "gl.minimum(rows, BM) - 2)",
        "bf16 edges",
    ),
    Defect(
        "one query into a tile is not a tile",
        "dense",
        "if item.rows <= 0:",
        "if item.rows <= 1:",
        "bf16 edges",
    ),
    Defect(
        "the table entry after the last one is read",
        "copies",
        "gl.minimum(position(keys, line) // PAGE, line.entries - 1)",
        "gl.minimum(position(keys, line) // PAGE, line.entries - 1) + 1",
        "full table",
    ),
    Defect(
        "FP8 weights without their 2^8",
        "dense",
        "8.0 if FP8_P else 0.0",
        "0.0",
        "light keys",
        {"p_dtype": "float8_e4m3fn"},
    ),
    Defect(
        "FP8 weights are shifted by their maximum alone",
        "softmax",
        "* factor - BIAS)",
        "* factor)",
        "light keys",
        {"p_dtype": "float8_e4m3fn"},
    ),
    Defect(
        "scales of the tile before",
        "dense",
        "rings.scales.index((j + 1) % 2).store(",
        "rings.scales.index(j % 2).store(",
        "scales",
    ),
    Defect(
        "scales of the first tile's keys",
        "dense",
        "ptr + first.to(gl.int64), key, mask",
        "ptr, key, mask",
        "scales",
    ),
    Defect(
        "scales past the last key",
        "dense",
        "mask=key + first < limit)",
        "mask=key + first < limit + 9)",
        "scales",
    ),
    Defect(
        "every tile of a slot has the first one's scales",
        "dense",
        "key_slot.slice(TILE * I, TILE, 0)",
        "key_slot.slice(0, TILE, 0)",
        "fp8 GLM-5",
    ),
    Defect(
        "queries have the scales of the first ones",
        "dense",
        "q_scale_ptr + item.token + place",
        "q_scale_ptr + place",
        "scales of two",
    ),
    Defect(
        "keys have the scales of the first sequence",
        "dense",
        "k_scale_ptr = k_scale_ptr + row",
        "k_scale_ptr = k_scale_ptr + 0",
        "scales of two",
    ),
    Defect(
        "values are as wide as keys",
        "dense",
        "V_PIECE: gl.constexpr = 128 // V_TYPE",
        "V_PIECE: gl.constexpr = 128 // DTYPE",
        "values bf16 of two",
    ),
    Defect(
        "the mask of the tile before",
        "dense",
        "words = words_ahead",
        "words = words",
        "mask",
    ),
    Defect("the mask of the first tile", "dense", "(first // EDGE + i, mask", "(i, mask", "mask"),
    Defect(
        "bits from the other end",
        "dense",
        "[:, None] >> (key % EDGE)[None, :]\n        for",
        "[:, None] >> (31 - key % EDGE)[None, :]\n        for",
        "mask",
    ),
    Defect(
        "words past a row's end are read",
        "dense",
        "EDGE + i, mask.words - 1)",
        "EDGE + i, mask.words + 1)",
        "mask",
    ),
    Defect(
        "the mask of a query that does not exist",
        "dense",
        "gl.SliceLayout(1, MMA.scores)), mask.last_row)",
        "gl.SliceLayout(1, MMA.scores)), mask.last_row + 1)",
        "mask",
    ),
    Defect(
        "every tile of queries has the first one's mask",
        "dense",
        "mask_ptr + item.token.to(gl.int64) * mask_stride",
        "mask_ptr",
        "mask",
    ),
    Defect(
        "two waves have the mask of one",
        "dense",
        "bits = gl.where((key < n * EDGE)[None, :], bits, after)",
        "bits = gl.where((key < 2 * n * EDGE)[None, :], bits, after)",
        "GLM-5 mask",
    ),
    Defect(
        "keys begin where they would anyway",
        "tiles",
        "        start = cut(start, total_k)\n",
        "        start = cut(gl.load(sequences.cu_k_ptr + sequence), total_k)\n",
        "shared keys",
    ),
    Defect(
        "keys before a row's window are seen",
        "dense",
        "here = here & ((key + TILE * i)[None, :] >= since[:, None])",
        "here = here",
        "window",
    ),
    Defect(
        "a row's window begins a key too early",
        "dense",
        "since = gl.maximum(row + seen, 0) - window",
        "since = gl.maximum(row + seen, 0) - window - 1",
        "window",
    ),
    Defect(
        "the windows of a tile begin with that of its second row",
        "tiles",
        "origin = first_key(item.seen, window)",
        "origin = first_key(item.seen + 1, window)",
        "window",
    ),
    Defect(
        "keys before every window are visited",
        "tiles",
        "origin = first_key(item.seen, window)",
        "origin = gl.maximum(first_key(item.seen, window) - 1, 0)",
        "window",
    ),
    Defect(
        "blocks where windows begin need no mask",
        "tiles",
        "seen + gl.minimum(rows, BM) - 1, window)",
        "seen, window)",
        "window",
    ),
    Defect(
        "keys of a window are those at the beginning",
        "tiles",
        "key=item.key + origin,",
        "key=item.key,",
        "window",
    ),
    Defect(
        "pages of a window are those at the beginning",
        "copies",
        "gl.minimum(position(keys, line) // PAGE",
        "gl.minimum(keys // PAGE",
        "window pages",
    ),
    Defect(
        "a window begins with a page",
        "copies",
        "(position(rows + first, rope.line) % PAGE)",
        "((rows + first) % PAGE)",
        "window pages",
    ),
    Defect(
        "bits of a window are those at the beginning",
        "dense",
        "mask_ptr = mask_ptr + item.origin // EDGE",
        "mask_ptr = mask_ptr + 0",
        "window mask",
    ),
    Defect(
        "bits of a window begin with a word",
        "dense",
        "shift = item.origin % EDGE",
        "shift = item.origin * 0",
        "window mask",
    ),
    Defect(
        "a window's keys meet one word",
        "dense",
        "bits = gl.where((key < n * EDGE)[None, :], bits, after)",
        "bits = gl.where((key < 9 * EDGE)[None, :], bits, after)",
        "window mask",
    ),
    Defect(
        "words past a row's end are read through a window",
        "dense",
        "words = words - item.origin // EDGE",
        "words = words + 0",
        "window mask",
    ),
    Defect(
        "scales of a window are those at the beginning",
        "dense",
        "    row = item.key.to(gl.int64)\n",
        "    row = (item.key - item.origin).to(gl.int64)\n",
        "window scales",
    ),
    Defect(
        "latent keys before a token's window are seen",
        "sparse",
        "here = here & ((at + STRIP * i)[None, :] >= since[:, None])",
        "here = here",
        "sparse window",
    ),
    Defect(
        "a token's window begins a key too late",
        "sparse",
        "since = last - work.window",
        "since = last - work.window + 1",
        "sparse window",
    ),
    Defect(
        "latent windows of a tile begin with that of its second token",
        "sparse",
        "first_key(seen + first // heads, tables.window)",
        "first_key(seen + first // heads + 1, tables.window)",
        "sparse window",
    ),
    Defect(
        "latent keys before every window are visited",
        "sparse",
        "first_key(seen + first // heads, tables.window)",
        "first_key(seen + first // heads - 1, tables.window)",
        "sparse window",
    ),
    Defect(
        "the windows of heads",
        "sparse",
        "first_key(seen + first // heads, tables.window)",
        "first_key(seen + first, tables.window)",
        "sparse window",
    ),
    Defect(
        "latent blocks where windows begin need no mask",
        "sparse",
        "first_key(work.seen + last_token(work, heads, BM), work.window)",
        "first_key(work.seen, work.window)",
        "sparse window",
    ),
    Defect(
        "latent pages of a window are those at the beginning",
        "sparse.rows",
        "entry = position(at, source) // HOW.page_size",
        "entry = at // HOW.page_size",
        "sparse window",
    ),
    Defect(
        "a latent window begins with a page",
        "sparse.rows",
        "(position(at, source) % PAGE)",
        "(at % PAGE)",
        "sparse window",
    ),
    Defect(
        "fp32 rows lie as those of 16 bits do",
        "softmax",
        "PIECE: gl.constexpr = 128 // out.ptr.dtype.element_ty.primitive_bitwidth",
        "PIECE: gl.constexpr = 8",
        "sparse fp32 out",
    ),
    Defect(
        "fp32 heads lie as those of 16 bits do",
        "dense",
        "OUT_PIECE: gl.constexpr = 128 // out_ptr.dtype.element_ty.primitive_bitwidth",
        "OUT_PIECE: gl.constexpr = 8",
        "fp32 out",
    ),
    Defect(
        "half of the rows that do not count are cleared",
        "sparse.rows",
        "for i in gl.static_range(tile.shape[0] // TOGETHER):",
        "for i in gl.static_range(tile.shape[0] // TOGETHER // 2):",
        "sparse 256",
    ),
    Defect(
        "rope has the scales of rows of 512 columns",
        "sparse.rows",
        "source, slot.latent.shape[1], True, HOW)",
        "source, 512, True, HOW)",
        "sparse 256 fp8",
    ),
    Defect(
        "one index into a block is not a block",
        "sparse",
        "(gl.maximum(stop, 0) + KV - 1)",
        "(gl.maximum(stop, 0) + KV - 2)",
        "sparse row_max-65",
    ),
]
CHANGES = {"light keys": light_keys, "shared keys": partial(with_shared_keys, seed=2)}
RUNS = [("random", 1, "zero"), ("late", 0, "nan"), ("early", 0, "zero")]


def built_case(name: str, background: str = "zero") -> BuiltCase:
    change = CHANGES.get(name, as_built)
    return change(on(CASES[name], background))


def wrong(built: BuiltCase, launch: Any, defect: Defect, schedule: str, seed: int) -> str:
    """What gives the defect away in one run; empty if nothing does."""
    results = new_results(built)
    chosen = plan_of(built, **defect.config)
    outcome = Outcome(results.out, results.lse, results.max_logits)
    options = {"seed": seed, "schedule": schedule, "limits": Limits(steps=50_000)}
    with intercept(outputs=outcome.tensors(), **options) as reports:
        for call in launch.calls(chosen, built.operands, results):
            call.run()
    for report in reports:
        for finding in report.findings:
            return str(finding)
    if defect.config:
        truth = built.truth().out
        error = (outcome.out.double() - truth).norm() / truth.norm()
        return "" if bool(error < 0.05) else f"relative error {float(error):.3g}"
    verdict = judge(built, outcome)
    return "" if verdict.ok else verdict.report()


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_defect_is_found(defect: Defect, tmp_path: Path) -> None:
    launch = load_defect(defect, tmp_path)
    found = ""
    for schedule, seed, background in RUNS:
        built = built_case(defect.case, background)
        found = wrong(built, launch, defect, schedule, seed)
        if found:
            break
    assert found


SAME_WAY = ("heads", "bf16", "scales", "values bf16", "mask", "window", "window pages")
"""Cases of which another one takes the same way through the kernels, with more."""


@pytest.mark.parametrize("name", controls(CASES, SAME_WAY))
def test_a_copy_without_a_defect_is_clean(name: str, tmp_path: Path) -> None:
    same = Defect(f"none of {name}", "tiles", "Heads run fastest", "Heads run fastest", name)
    built = built_case(name)
    assert wrong(built, load_defect(same, tmp_path), same, "random", 1) == ""


def test_there_are_enough() -> None:
    assert len(DEFECTS) >= 12 and len({d.name for d in DEFECTS}) == len(DEFECTS)
