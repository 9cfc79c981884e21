"""Seeded defects of spans and second sources in the Hopper kernels: each is found in a few runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gluon_sim import Kind
from kernels.hopper.latent.defect import SparseDefect
from kernels.hopper.latent.sources_defect import SourcesCase
from two_sources import Setup

V41_ROWS = "dequantize.v41_rows"
V41_CHUNKS, V4_ROWS = "dequantize.v41_chunks", "latent.rows_v4"
LISTING, SOURCE, ROWS = "latent.listing", "latent.source", "latent.rows_several"
SCORES = "few.scores"
SEVERAL, PLACES = "latent.rows_several", "places"
FEW = Setup(first=(100,), second=(210,))
V41 = Setup(
    kinds=("span", "list"), formats=("fp8_528_v41", "fp4_288"), pages=(32, 64), lengths=False
)
V41_SPLIT = Setup(formats=("fp8_528_v41_split", "fp4_288_split"), pages=(24, 2), seed=1)
CASES = {
    "two lists": Setup(),
    "span and list": Setup(kinds=("span", "list"), seed=1),
    "two spans": Setup(kinds=("span", "span"), pages=(16, 2), seed=3),
    "span": Setup(kinds=("span",), first=(65, 0, 63, 64, 130, 1), seed=4),
    "bf16 and V4": Setup(kinds=("span", "list"), formats=("bf16", "fp8_584"), seed=5),
    "bf16": Setup(formats=("bf16", "bf16"), seed=7),
    "V4.1": V41,
    "V4.1, split": V41_SPLIT,
    "V4.1, whole pools": V41,
    "V4.1, split, whole pools": V41_SPLIT,
    "V4.1 and V4": Setup(formats=("fp4_288", "fp8_584"), seed=2),
    "V4.1's window": Setup(
        kinds=("span",), formats=("fp8_528_v41",), first=(65, 0, 63, 64, 130, 1), seed=5
    ),
    "few": FEW,
    "few, V4.1": replace(FEW, formats=("fp8_528_v41", "fp4_288")),
    "few, span and list": replace(FEW, kinds=("span", "list"), seed=1),
}


def wrong(name: str, file: str, old: str, new: str, case: str) -> SparseDefect:
    """Only the numbers are wrong."""
    return SparseDefect(name, None, file, old, new, case)


DEFECTS = [
    wrong(
        "the second source begins inside a block",
        LISTING,
        "start = whole_blocks(listing.stop - listing.skipped)",
        "start = listing.stop - listing.skipped",
        "two lists",
    ),
    wrong(
        "a block late", LISTING, "is_second = place >= start", "is_second = place > start", "few"
    ),
    wrong(
        "the second source is read from the place of the token",
        LISTING,
        "at = place - start + listing.second_skipped",
        "at = place + listing.second_skipped",
        "two lists",
    ),
    wrong(
        "a second span begins at position 0",
        LISTING,
        "at = place - start + listing.second_skipped",
        "at = place - start",
        "two spans",
    ),
    wrong(
        "a first span begins at position 0",
        LISTING,
        "at = place + listing.skipped",
        "at = place",
        "span and list",
    ),
    wrong(
        "both sources have the first one's line",
        LISTING,
        "first = listing.second_line.to(gl.int64)",
        "first = listing.line.to(gl.int64)",
        "span and list",
    ),
    wrong(
        "the next token's second source ends with this one's",
        LISTING,
        "gl.where(condition, a.second_stop, b.second_stop)",
        "b.second_stop",
        "two lists",
    ),
    wrong(
        "the next token's second span begins with this one's",
        LISTING,
        "gl.where(condition, a.second_skipped, b.second_skipped)",
        "b.second_skipped",
        "two spans",
    ),
    wrong(
        "the next token's lists are this one's",
        ROWS,
        "here = either(last, next_listing, listing)",
        "here = listing",
        "two lists",
    ),
    wrong(
        "rows of the second source are the first cache's",
        ROWS,
        "places_of(rows.second, in_pool(source.second, listed))",
        "places_of(rows, in_pool(source, listed))",
        "two lists",
    ),
    wrong(
        "likewise, of few queries",
        SCORES,
        "places = places_of(rows.second, keys)",
        "places = places_of(rows, keys)",
        "few",
    ),
    wrong(
        "both pools have the first one's rows",
        SCORES,
        "gl.where(is_second != 0, source.second.pool_rows, source.pool_rows)",
        "source.pool_rows + is_second * 0",
        "few",
    ),
    wrong(
        "a step less, where the second source follows a whole one",
        SOURCE,
        "count = whole_blocks(count) +",
        "count = count +",
        "two lists",
    ),
    wrong(
        "positions before the first count",
        SOURCE,
        "skipped = gl.maximum(gl.load(source.begin + token), 0)",
        "skipped = gl.load(source.begin + token)",
        "span",
    ),
    wrong(
        "requests that are not there are the first",
        SOURCE,
        "stop = gl.where(seen, stop, 0)",
        "stop = gl.where(skipped < stop, stop, 0)",
        "span",
    ),
    wrong(
        "a page past the pool is one of it, in 32 bits",
        SOURCE,
        "there = (page >= 0) & (page < source.pool_rows // size)",
        "there = page >= 0",
        "span",
    ),
    wrong(
        "a span is read from its first position on",
        SOURCE,
        "skipped=own.skipped if source.second_keys is None else found * 0",
        "skipped=found * 0",
        "span",
    ),
    wrong(
        "a line of the table has as many positions as pages",
        PLACES,
        '"topk": source.table_keys',
        '"topk": entries.shape[1]',
        "few, span and list",
    ),
    wrong(
        "a span ends where it begins",
        PLACES,
        '"lengths_ptr": vector(source.end)',
        '"lengths_ptr": vector(source.begin)',
        "span",
    ),
    wrong(
        "bf16 rows are taken for V4's",
        SEVERAL,
        "if not has_one_way(STORED):\n            way += way_of(STORED, False)",
        "if not has_one_way(STORED):\n            way += way_of(STORED, True)",
        "bf16 and V4",
    ),
    wrong(
        "after bf16 rows no chunk is loaded ahead",
        SEVERAL,
        "chunks = first_chunks(after, STORED)",
        "chunks = first_chunks(block, STORED)",
        "bf16 and V4",
    ),
    wrong(
        "the right half of bf16 rows is the left",
        SEVERAL,
        "tiles.right.index(b), HALF_WORDS, HALF_WORDS",
        "tiles.right.index(b), 0, HALF_WORDS",
        "bf16",
    ),
    SparseDefect(
        "bf16 rows are copied into a tile that is still read",
        Kind.RACE,
        SEVERAL,
        "    mbarrier.wait(bars.k_empty.index(2 * b + 1), phase)\n",
        "",
        "bf16",
    ),
    SparseDefect(
        "a list's entries past the pool are read",
        Kind.BOUNDS,
        LISTING,
        "(listed >= 0) & (listed < source.pool_rows)",
        "listed >= 0",
        "two lists",
    ),
    SparseDefect(
        "lines that the table does not have are read",
        Kind.BOUNDS,
        SOURCE,
        "seen = (line >= 0) & (line < source.requests) & (skipped < stop)",
        "seen = (line >= 0) & (skipped < stop)",
        "span",
    ),
]


V41_DEFECTS = [
    wrong(
        "the high half of a byte of e2m1 comes first",
        V41_CHUNKS,
        "gl.join(even, gl.join(gl.join(b, f), gl.join(d, h)))",
        "gl.join(gl.join(gl.join(b, f), gl.join(d, h)), even)",
        "V4.1",
    ),
    wrong(
        "e2m1 has no sign",
        V41_CHUNKS,
        "prmt.b32 s, $8, m, 0x3726; and.b32 s, s, 0x80808080;",
        "mov.b32 s, 0;",
        "V4.1",
    ),
    wrong(
        "the sign of even columns is that of odd ones",
        V41_CHUNKS,
        "prmt.b32 s, $8, m, 0x1504;",
        "prmt.b32 s, $8, m, 0x1100;",
        "V4.1",
    ),
    wrong("0.5 is 1", V41_CHUNKS, "0xC0800000", "0xC0808000", "V4.1"),
    wrong("6 is 4", V41_CHUNKS, "0xC0804000", "0x80804000", "V4.1"),
    wrong("2 is 0.5", V41_CHUNKS, "mov.b32 t3, 0x40404040", "mov.b32 t3, 0x4040403F", "V4.1"),
    wrong(
        "columns 4 to 7 are those before", V41_CHUNKS, "shr.u32 c, c, 16;", "mov.b32 c, c;", "V4.1"
    ),
    wrong(
        "columns of e2m1 have the neighboring block's scale",
        V41_CHUNKS,
        "gl.SliceLayout(1, L))) // 2 * BYTE",
        "gl.SliceLayout(1, L))) // 2 * BYTE ^ BYTE",
        "V4.1",
    ),
    wrong(
        "the scale of 16 columns is that of 64",
        V41_CHUNKS,
        "e4m3_scale(own >> of_words[None, None, :])",
        "e4m3_scale(own)",
        "V4.1",
    ),
    wrong(
        "halves of a chunk have the same scale",
        V41_CHUNKS,
        "byte = byte >> (half * BYTE)[None, :]",
        "byte = byte >> (half * 0)[None, :]",
        "V4.1's window",
    ),
    wrong(
        "halves of e2m1 have the same scales",
        V41_CHUNKS,
        "half * (step - 1) + number * step",
        "half * 0 + number * step",
        "V4.1, split",
    ),
    wrong(
        "an exponent is one more",
        "dequantize.v4_rows",
        "exponent << 7",
        "(exponent + 1) << 7",
        "V4.1, split",
    ),
    wrong(
        "scales of the chunk before",
        V4_ROWS,
        "chunk, words[c // ROWS.scale_chunks]",
        "chunk, words[max(c - 1, 0) // ROWS.scale_chunks]",
        "V4.1",
    ),
    wrong(
        "the next block's scales are this one's",
        V4_ROWS,
        "words += (word_ahead(after, i, STORED),)",
        "words += (word_ahead(block, i, STORED),)",
        "V4.1",
    ),
    wrong(
        "the last chunks are the next block's",
        V4_ROWS,
        "load_chunk(block.places, c + NEXT, LANES, WARPS)",
        "load_chunk(after.places, c + NEXT, LANES, WARPS)",
        "V4.1's window",
    ),
    wrong(
        "rows of both formats are window rows",
        V4_ROWS,
        "return int(name",
        "return 0 * int(name",
        "V4.1",
    ),
    wrong(
        "scales of e2m1 lie as those of e4m3 do",
        V4_ROWS,
        "gl.where(block.way != 0, SECOND.scale_step, FIRST.scale_step)",
        "FIRST.scale_step",
        "V4.1",
    ),
    wrong(
        "V4's tail is not copied beside V4.1's rows",
        V4_ROWS,
        "        copy_tail(block.places, right, LANES, WARPS)\n",
        "        pass\n",
        "V4.1 and V4",
    ),
    wrong(
        "scales of a page lie behind the first one's",
        "dequantize.v4_rows",
        "at = page * rows.scale_page_stride.to(gl.int64)",
        "at = page * 0",
        "V4.1, split",
    ),
    wrong(
        "pages lie end to end",
        "dequantize.launch",
        """"stride_page": data.stride(0) // unit,
        "stride_row": data.stride(1) // unit,
        "scale_page": scales.stride(0),""",
        """"stride_page": data.shape[1] * data.stride(1) // unit,
        "stride_row": data.stride(1) // unit,
        "scale_page": scales.stride(0),""",
        "V4.1, split",
    ),
    wrong(
        "few queries: both sources have the first one's format",
        SCORES,
        "    elif is_second != 0:\n        store_half(half, chunks, SIDE, SECOND)",
        "    elif is_second > 1:\n        store_half(half, chunks, SIDE, SECOND)",
        "few, V4.1",
    ),
]
ONCE_DEFECTS = [
    wrong(
        "the high half of a byte comes first",
        V41_ROWS,
        "(4 * N)",
        "(4 * (N ^ 1))",
        "V4.1, whole pools",
    ),
    wrong("e2m1 has no sign", V41_ROWS, "(code & 8) != 0", "(code & 8) < 0", "V4.1, whole pools"),
    wrong("6 is 4", V41_ROWS, "0xC8643210 -", "0x88643210 -", "V4.1, whole pools"),
    wrong("e2m1 is twice as large", V41_ROWS, "(scales * 0.5)", "scales", "V4.1, whole pools"),
    wrong(
        "columns 2 and 4 are swapped", V41_ROWS, "halves, 4)),", "halves, 2)),", "V4.1, whole pools"
    ),
    wrong(
        "an exponent is one more",
        V41_ROWS,
        "exponent << 23",
        "(exponent + 1) << 23",
        "V4.1, split, whole pools",
    ),
    wrong(
        "all columns have the first block's scale",
        V41_ROWS,
        "+ block[None, :]",
        "",
        "V4.1, split, whole pools",
    ),
    wrong(
        "scales of a page lie as far apart as rows",
        V41_ROWS,
        "rows.scale_page_stride, rows.scale_row_stride",
        "rows.page_stride, rows.scale_row_stride",
        "V4.1, split, whole pools",
    ),
    wrong(
        "16 bytes of e2m1 share a scale",
        "dequantize.launch",
        "block = block * ELEMENT_BITS[cache.layout.format.element] // 8",
        "block = block * 1",
        "V4.1, whole pools",
    ),
]


def case_of(name: str) -> SourcesCase:
    """A case by its name, which says how rows are read."""
    way = "whole" if name.endswith("whole pools") else "in_kernel"
    return SourcesCase(CASES[name], way, is_few=name.startswith("few"))


@pytest.mark.seeded
@pytest.mark.parametrize("defect", [*DEFECTS, *V41_DEFECTS, *ONCE_DEFECTS], ids=lambda d: d.name)
def test_defect_is_found(defect: SparseDefect, tmp_path: Path) -> None:
    case_of(defect.case).assert_found(defect, tmp_path)


@pytest.mark.seeded
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_themselves_are_clean_and_right(name: str) -> None:
    case_of(name).assert_clean_and_right()
