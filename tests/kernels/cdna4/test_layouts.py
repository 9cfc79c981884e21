"""The layout objects that the CDNA4 kernels give the compiler, byte by byte against the original
kernels' addresses; bank conflicts counted from those objects; what the compiler made of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from openmla.explain.banks import group_uses
from openmla.kernels.cdna4.dense.jobs import JOBS
from openmla.kernels.cdna4.dense.launch import COMPILER_OPTIONS, dense_constexprs
from openmla.kernels.cdna4.dense.plan import Dense16, DenseFP8
from openmla.kernels.cdna4.sparse.launch import sparse_constexprs
from openmla.kernels.cdna4.sparse.plan import MlaSparse16
from openmla.lab.compiling.jobs import build, captured_output
from openmla.lab.compiling.table import jobs_of
from openmla.modular.cdna4 import LDS_BYTES, MlaConfigV2
from openmla.modular.cdna4.layout.v import read_cell

MAPS = json.loads((Path(__file__).parents[2] / "modular" / "oracle" / "cdna4.json").read_text())[
    "lane_maps"
]
DSV3 = MlaConfigV2(
    q_block_size=32,
    kv_block=128,
    depth=128,
    num_heads=128,
    num_kv_heads=1,
    d_qk=192,
    d_rope=64,
    cache_depth=576,
    rope_cache_offset=512,
    dtype="float8_e4m3fn",
)
BF16 = replace(DSV3, kv_block=64, dtype="bfloat16")
BLOCKS = {
    ("float8_e4m3fn", True): DenseFP8(DSV3),
    ("float8_e4m3fn", False): DenseFP8(DSV3, v_full_v227=False),
    ("bfloat16", False): Dense16(BF16),
}
V_ROWS = [pytest.param(row, id=f"{row['dtype']}-{row['v_full_v227']}") for row in MAPS["v_write"]]


def tiles(block: DenseFP8 | Dense16) -> dict[str, Any]:
    """The layouts as they are passed to the kernel: TileLayouts of each tile."""
    layouts = dense_constexprs(block)["LAYOUTS"]
    nope, rope = layouts.k
    return {"q": layouts.q, "nope": nope, "rope": rope, "v": layouts.v}


def coordinate(bases: list[list[int]], offset: int) -> tuple[int, int]:
    row = column = 0
    for bit, (row_step, column_step) in enumerate(bases):
        if offset >> bit & 1:
            row, column = row ^ row_step, column ^ column_step
    return row, column


def bytes_of(layout: Any, size: int) -> dict[tuple[int, int], int]:
    """(row, column) -> byte, from the fields of a compiler's layout object."""
    pairs = getattr(layout, "interval_padding_pairs", [])
    places = {}
    for offset in range(1 << len(layout.offset_bases)):
        padded = offset + sum(offset // every * pad for every, pad in pairs)
        places[coordinate(layout.offset_bases, offset)] = padded * size
    return places


@pytest.mark.parametrize("row", V_ROWS)
def test_every_byte_of_v_lies_where_the_original_writes_it(row: dict[str, Any]) -> None:
    block = BLOCKS[row["dtype"], row["v_full_v227"]]
    size = block.config.element_bytes
    write, read, _ = tiles(block)["v"]
    assert write == read
    written = {}
    for source, lds in row["out"]:
        for n in range(0, row["bytes_per_thread"], size):
            key, column = divmod((source + n) // size, row["gmem_row_stride_elems"])
            written[key, column] = lds + n
    assert bytes_of(read, size) == written
    assert len(written) == row["BN"] * row["depth"]


@pytest.mark.parametrize("row", V_ROWS)
def test_every_lane_copies_what_the_original_copies(row: dict[str, Any]) -> None:
    block = BLOCKS[row["dtype"], row["v_full_v227"]]
    size = block.config.element_bytes
    write, _, copy = tiles(block)["v"]
    places = bytes_of(write, size)
    vector = (16 // size).bit_length() - 1
    bases = [*copy.reg_bases[vector:], *copy.lane_bases, *copy.warp_bases]
    got = []
    for warp, lane, step in product(range(8), range(64), range(row["iters"])):
        key, column = coordinate(bases, warp * 128 + lane * 2 + step)
        source = (key * row["gmem_row_stride_elems"] + column) * size
        got.append([source, places[key, column]])
    assert got == [list(pair) for pair in row["out"]]


@pytest.mark.parametrize("row", MAPS["load_K_frag_addr"])
def test_every_byte_of_k_is_read_where_the_original_reads_it(row: dict[str, Any]) -> None:
    block = BLOCKS["float8_e4m3fn", True]
    layouts = tiles(block)
    assert layouts["nope"].read == layouts["rope"].read
    places = bytes_of(layouts["nope"].read, 1)
    rope_first = block._K_ROPE_SUBBLOCK_OFFSET
    assert rope_first * 2048 == 128 * 128  # rope sub-blocks lie behind those of nope
    sub_blocks = row["kv_block"] // 32 * (row["d"] // 64)
    got = [
        places[lane % 32, 32 * (lane // 32) + half] + 2048 * sub_id
        for lane, sub_id, half in product(range(64), range(sub_blocks), (0, 16))
    ]
    assert got == row["out"]
    assert len(places) == 2048


@pytest.mark.parametrize("part", ["nope", "rope", "q"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=lambda b: f"{b.config.dtype}")
def test_copies_of_k_and_q_fill_memory_lane_after_lane(block: Any, part: str) -> None:
    """A wave's copy is 1024 bytes in a row; where the source is permuted, memory is not."""
    if tiles(block)[part] is None:
        pytest.skip("Q of 16-bit types goes to registers")
    write, _, copy = tiles(block)[part]
    size = block.config.element_bytes
    places = bytes_of(write, size)
    vector = (16 // size).bit_length() - 1
    starts = set()
    for warp, step in product(range(8), range(1 << len(copy.reg_bases) - vector)):
        lanes = []
        for lane in range(64):
            at = [
                *coordinate(copy.warp_bases, warp),
                *coordinate(copy.lane_bases, lane),
                *coordinate(copy.reg_bases[vector:], step),
            ]
            lanes.append(places[at[0] ^ at[2] ^ at[4], at[1] ^ at[3] ^ at[5]])
        assert lanes == [lanes[0] + 16 * lane for lane in range(64)]
        starts.add(lanes[0])
    assert sorted(starts) == list(range(0, len(places) * size, 1024))


@lru_cache
def v_bytes(block: DenseFP8) -> dict[tuple[int, int], int]:
    return bytes_of(tiles(block)["v"].read, 1)


def read_addresses(block: DenseFP8, i_strip: int, j_depth: int, r: int) -> list[int]:
    """Where all lanes begin one transposing read, looked up in the kernel's own layout."""
    places = v_bytes(block)
    cells = [read_cell(lane) for lane in range(64)]
    return [places[64 * i_strip + 16 * r + key, 32 * j_depth + column] for key, column in cells]


@pytest.mark.parametrize("row", [r for r in MAPS["load_V_frag_addr"] if r["depth"] == 128])
def test_fragments_of_v_are_read_where_the_original_reads_them(row: dict[str, Any]) -> None:
    block = BLOCKS["float8_e4m3fn", row["v_full_v227"]]
    reads = {at: read_addresses(block, *at) for at in product(range(2), range(4), range(4))}
    assert [reads[at][lane] for lane in range(64) for at in reads] == row["out"]


@pytest.mark.parametrize(("v227", "ways", "distinct"), [(True, 1, 32), (False, 2, 16)])
def test_bank_conflicts_of_v_reads(v227: bool, ways: int, distinct: int) -> None:
    block = BLOCKS["float8_e4m3fn", v227]
    for at in product(range(2), range(4), range(4)):
        uses = group_uses(read_addresses(block, *at), 8)
        assert {(use.ways, use.distinct) for use in uses} == {(ways, distinct)}


def test_k_reads_have_no_bank_conflicts() -> None:
    places = bytes_of(tiles(BLOCKS["float8_e4m3fn", True])["nope"].read, 1)
    for half in (0, 16):
        lanes = [places[lane % 32, 32 * (lane // 32) + half] for lane in range(64)]
        assert {use.ways for use in group_uses(lanes, 16)} == {1}


@pytest.mark.parametrize("latent", [512, 256])
def test_latent_rows_of_the_sparse_kernel(latent: int) -> None:
    """A wave's copy is one row, or two that are 32 apart; 16 rows read side by side meet in no
    bank."""
    block = MlaSparse16(num_heads=64, latent=latent, rope=64, dtype="bfloat16")
    write, read, copy = sparse_constexprs(block)["LAYOUTS"].latent
    places = bytes_of(read, 2)
    slot = block.latent_slot
    assert write == read
    assert places == {at: slot.byte(*at) for at in product(range(64), range(latent))}
    columns = [[0, 8 << n] for n in range(5)]
    assert copy.lane_bases == [*columns, [0, 256] if latent == 512 else [32, 0]]
    for column in range(0, latent, 8):
        lanes = [places[lane % 16, column ^ 8 * (lane // 16)] for lane in range(64)]
        assert {use.ways for use in group_uses(lanes, 16)} == {1}


def test_budget_of_deepseek_v3() -> None:
    block = BLOCKS["float8_e4m3fn", True]
    assert (block.q_bytes, block.k_ring_bytes, block.v_ring_bytes) == (49152, 49152, 49920)
    assert block.smem_used == 148224 <= LDS_BYTES
    assert block.launch_smem_used == 148224 - 16  # no padding behind the last chunk
    assert all(b.smem_used <= LDS_BYTES for b in BLOCKS.values())


@lru_cache
def assembly(name: str) -> str:
    job = next(job for job in jobs_of(JOBS) if job.name == name)
    assert job.target == "gfx950"
    with captured_output():
        return str(build(job).asm["amdgcn"])


@pytest.mark.compile
@pytest.mark.skipif(not COMPILER_OPTIONS, reason="gfx950 is built with Triton 3.9")
class TestCompiled:
    DENSE_FP8 = "cdna4 dense fp8 128+64→128"

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            (
                f"{DENSE_FP8} P fp8",
                {r"v_mfma_(?:scale_)?f32_32x32x64_f8f6f4": 20, "ds_read_b64_tr_b8": 32},
            ),
            (
                DENSE_FP8,
                {
                    r"v_mfma_(?:scale_)?f32_32x32x64_f8f6f4": 12,
                    "v_mfma_f32_32x32x16_bf16": 32,
                    "ds_read_b64_tr_b8": 32,
                },
            ),
            (
                "cdna4 dense bf16 128+64→128",
                {"v_mfma_f32_32x32x16_bf16": 40, "ds_read_b64_tr_b16": 32},
            ),
        ],
    )
    def test_instructions(self, name: str, found: dict[str, int]) -> None:
        text = assembly(name)
        assert {op: len(re.findall(rf"\b{op}\b", text)) for op in found} == found
        assert re.search(r"buffer_load_dwordx4 .* lds", text)
        assert not re.search(r"scratch_|ds_write|ds_bpermute", text)

    @pytest.mark.parametrize("v227", [True, False])
    def test_reads_of_v_have_the_offsets_of_the_original(self, v227: bool) -> None:
        """One base register, and as immediate offsets the cells of the read map."""
        text = assembly(self.DENSE_FP8 if v227 else f"{self.DENSE_FP8} default V")
        reads = re.findall(r"ds_read_b64_tr_b8 \S+ (v\d+)(?: offset:(\d+))?", text)
        wanted = next(
            row["out"]
            for row in MAPS["load_V_frag_cell_offset"]
            if row["depth"] == 128 and row["v_full_v227"] == v227
        )
        cells = sorted(r for strip in wanted for depth in strip for r in depth)
        assert sorted(int(offset or 0) for _, offset in reads) == cells
        assert len({base for base, _ in reads}) == 1
