"""The CDNA4 LDS maps against the original kernels' addresses, and the proofs about them."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from modular.cdna4.proof import (
    BankCount,
    k_bank_count,
    prove_v227,
    v_bank_count,
    written_cells,
)
from openmla.errors import InvalidArgument
from openmla.explain.banks import group_uses
from openmla.kernels.cdna4.lds import (
    SharedBases,
    bases_of,
    k_nope_bases,
    k_rope_bases,
    v227_bases,
    v_bases,
)
from openmla.modular.cdna4.layout import (
    V227,
    ACC_ROW_OFFSETS_32x32,
    DefaultV,
    KSlot,
    VMap,
    load_K_frag_addr,
    load_V_frag_addr,
    load_V_frag_cell_offset,
    precompute_v_lane_base,
    swizzle_K_sub,
    swizzle_parameters,
    v_map,
)
from openmla.modular.cdna4.layout.dma import Dma
from openmla.modular.cdna4.layout.k import swizzle_bytes
from openmla.modular.cdna4.layout.v227 import _BASE, _CELL, _COLUMN, _KEY, _LDS, Layout, crd2idx

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "cdna4.json").read_text())
MAPS = ORACLE["lane_maps"]
ELEMENT_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}


def flags(row: dict[str, Any]) -> dict[str, bool]:
    return {name: row[name] for name in ("v_full_v227", "v227_layout")}


def cells(row: dict[str, Any]) -> product[tuple[int, ...]]:
    return product(range(row["kv_block"] // 64), range(row["depth"] // 32))


class TestOriginalAddresses:
    @pytest.mark.parametrize("dtype", ORACLE["swizzle_K_sub"])
    def test_swizzle(self, dtype: str) -> None:
        row = ORACLE["swizzle_K_sub"][dtype]
        size = ELEMENT_BYTES[dtype]
        where = product(range(row["rows"]), range(row["cols"]))
        assert [swizzle_K_sub(r, c, element_bytes=size) for r, c in where] == row["out"]

    def test_accumulator_rows(self) -> None:
        assert list(ACC_ROW_OFFSETS_32x32) == ORACLE["ACC_ROW_OFFSETS_32x32"]

    @pytest.mark.parametrize("row", MAPS["load_K_frag_addr"])
    def test_load_K_frag(self, row: dict[str, Any]) -> None:
        sub_blocks = row["kv_block"] // 32 * (row["d"] // 64)
        where = product(range(64), range(sub_blocks))
        assert [byte for at in where for byte in load_K_frag_addr(*at)] == row["out"]

    @pytest.mark.parametrize("row", MAPS["v_lane_base"])
    def test_v_lane_base(self, row: dict[str, Any]) -> None:
        got = [precompute_v_lane_base(n, depth=row["depth"], **flags(row)) for n in range(64)]
        assert got == row["out"]

    @pytest.mark.parametrize("row", MAPS["load_V_frag_cell_offset"])
    def test_load_V_frag_cells(self, row: dict[str, Any]) -> None:
        shape = {name: row[name] for name in ("kv_block", "depth")}
        for i, j in cells(row):
            got = [load_V_frag_cell_offset(i, j, r, **shape, **flags(row)) for r in range(4)]
            assert got == row["out"][i][j]

    @pytest.mark.parametrize("row", MAPS["load_V_frag_addr"])
    def test_load_V_frag(self, row: dict[str, Any]) -> None:
        shape = {name: row[name] for name in ("kv_block", "depth")}
        got = [
            byte
            for lane in range(64)
            for i, j in cells(row)
            for byte in load_V_frag_addr(lane, i, j, **shape, **flags(row))
        ]
        assert got == row["out"]

    @pytest.mark.parametrize("row", MAPS["v_write"])
    def test_v_write(self, row: dict[str, Any]) -> None:
        size = ELEMENT_BYTES[row["dtype"]]
        v = v_map(
            kv_block=row["BN"],
            depth=row["depth"],
            element_bytes=size,
            num_threads=row["num_threads"],
            **flags(row),
        )
        assert v.passes == row["iters"]
        copies = (v.write(*at) for at in product(range(8), range(64), range(v.passes)))
        got = [[copy.gmem(row["gmem_row_stride_elems"], size), copy.lds] for copy in copies]
        assert got == row["out"]


class TestLayoutSpelling:
    """`crd2idx` against a library of layout algebra."""

    @pytest.mark.parametrize("layout", [_BASE, _CELL, _KEY, _COLUMN, _LDS])
    def test_crd2idx(self, layout: Layout) -> None:
        library = pytest.importorskip("tensor_layouts")
        theirs = library.Layout(layout.shape, layout.stride)
        size = prod(layout.shape)
        assert [crd2idx(n, layout) for n in range(size)] == [int(theirs(n)) for n in range(size)]

    def test_the_strides_of_the_original(self) -> None:
        assert Layout((2,) * 6, (8, 0x80, 0x820, 0x1040, 16, 0x410)) == _BASE
        assert Layout((2, 4, 4), (0x2080, 0x20, 0x100)) == _CELL


class TestV227Proof:
    def test_it_holds(self) -> None:
        proof = prove_v227()
        assert proof.holds
        assert proof.reads == 64 * 2 * 4 * 4
        assert (proof.reads_that_differ, proof.reads_off_the_accumulator) == (0, 0)
        assert (proof.closed_form_errors, proof.spelling_errors) == (0, 0)
        assert proof.bytes_written == proof.cells_written == 128 * 128
        assert (proof.slot_bytes, proof.highest_byte, proof.gap_bytes) == (16640, 16623, 240)
        assert proof.default_banks == BankCount(distinct=16, ways=2)
        assert proof.v227_banks == BankCount(distinct=32, ways=1)
        assert proof.v227_half_wave_banks == 64

    def test_it_reads_well(self) -> None:
        lines = prove_v227().explain()
        assert lines[0] == "2048 reads compared with the default pair, 0 differ"
        assert lines[-1] == "v227: a 16-lane group touches 32 banks, 1-way; 32 lanes touch 64"

    def test_a_swapped_lane_bit_is_found(self) -> None:
        class SwappedBase(V227):
            def lane_base(self, lane: int) -> int:
                return super().lane_base(lane & ~6 | lane >> 1 & 2 | lane << 1 & 4)

        proof = prove_v227(SwappedBase())
        assert not proof.holds
        assert proof.reads_that_differ == 1024 and proof.spelling_errors == 32

    def test_a_moved_cell_is_found(self) -> None:
        class MovedCell(V227):
            def cell(self, i_strip: int, j_depth: int, r: int) -> int:
                return super().cell(i_strip, j_depth, r ^ 1)

        proof = prove_v227(MovedCell())
        assert not proof.holds and proof.reads_that_differ == 2048

    def test_overlapping_writes_are_found(self) -> None:
        class Overlap(V227):
            def write(self, warp: int, lane: int, step: int) -> Dma:
                copy = super().write(warp, lane, step)
                return Dma(copy.key, copy.column, copy.lds - 16 * (warp == lane == 1))

        proof = prove_v227(Overlap())
        assert not proof.holds and proof.bytes_written < 128 * 128

    def test_the_default_producer_scrambles_v227_reads(self) -> None:
        held, v227 = written_cells(DefaultV()), V227()
        right = sum(
            held.get(v227.byte(key, column)) == (key, column)
            for key, column in product(range(128), range(128))
        )
        assert right < 1000


class TestV:
    @pytest.mark.parametrize(
        "v", [DefaultV(), DefaultV(depth=256), DefaultV(kv_block=64), V227(), V227(True)]
    )
    def test_producer_and_closed_form_agree(self, v: VMap) -> None:
        held = written_cells(v)
        assert len(held) == len(set(held.values())) == v.kv_block * v.depth
        assert all(v.byte(*cell) == byte for byte, cell in held.items())
        assert max(held) < v.slot_bytes

    @pytest.mark.parametrize("v", [DefaultV(), DefaultV(depth=256), V227(), V227(True)])
    def test_fragments_cover_the_tile_once(self, v: VMap) -> None:
        """Every byte of V is handed in exactly once by the 64 lanes."""
        where = product(range(64), range(v.kv_block // 64), range(v.depth // 32), range(4))
        read = [
            v.lane_base(lane) + v.cell(i, j, r) + n for lane, i, j, r in where for n in range(8)
        ]
        assert sorted(read) == sorted(written_cells(v))

    def test_the_default_conflicts_at_every_depth(self) -> None:
        for depth in (64, 128, 256):
            assert v_bank_count(DefaultV(depth=depth)).ways == 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [("kv_block", 64), ("depth", 256), ("element_bytes", 2), ("num_threads", 256)],
    )
    def test_v227_has_one_shape(self, name: str, value: int) -> None:
        with pytest.raises(InvalidArgument, match="with v_full_v227") as error:
            changed: dict[str, Any] = {name: value}
            v_map(v_full_v227=True, **changed)
        assert error.value.name == name

    @pytest.mark.parametrize("v", [DefaultV(), V227()])
    def test_indices_are_checked(self, v: VMap) -> None:
        for name, call in (
            ("lane", lambda: v.lane_base(64)),
            ("i_strip", lambda: v.cell(2, 0, 0)),
            ("j_depth", lambda: v.cell(0, 4, 0)),
            ("r", lambda: v.cell(0, 0, -1)),
            ("key", lambda: v.byte(128, 0)),
            ("column", lambda: v.byte(0, 128)),
            ("warp", lambda: v.write(8, 0, 0)),
            ("step", lambda: v.write(0, 0, 2)),
        ):
            with pytest.raises(InvalidArgument) as error:
                call()
            assert error.value.name == name

    def test_bad_slots_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="depth"):
            DefaultV(depth=100)
        with pytest.raises(InvalidArgument, match="8192 bytes"):
            _ = DefaultV(kv_block=64, depth=64).passes
        with pytest.raises(InvalidArgument, match="fp8"):
            DefaultV(element_bytes=2).lane_base(0)


class TestK:
    def test_the_swizzle_undoes_itself(self) -> None:
        assert all(swizzle_bytes(swizzle_bytes(n)) == n for n in range(2048))

    @pytest.mark.parametrize("size", [1, 2])
    def test_the_swizzle_in_phases(self, size: int) -> None:
        """vec, per_phase, max_phase: XOR the piece number with the phase of the row."""
        vec, per_phase, max_phase = swizzle_parameters(size)
        for r, c in product(range(32), range(64 // size)):
            piece = c // vec ^ r // per_phase % max_phase
            assert swizzle_K_sub(r, c, element_bytes=size) == 64 * r + 16 * piece + c % vec * size

    @pytest.mark.parametrize(
        "slot", [KSlot(), KSlot(kv_block=64, element_bytes=2), KSlot(kv_block=256, depth=64)]
    )
    def test_producer_and_closed_form_agree(self, slot: KSlot) -> None:
        seen = set()
        for at in product(range(slot.num_warps), range(64), range(slot.passes)):
            copy = slot.write(*at)
            for n in range(16 // slot.element_bytes):
                place = slot.byte(copy.key, copy.column + n)
                assert place == copy.lds + n * slot.element_bytes
                seen.add(place)
        assert len(seen) == slot.slot_bytes // slot.element_bytes

    def test_waves_share_sub_blocks_as_the_original(self) -> None:
        """At kv 128: one nope sub-block per warp, half a rope sub-block per warp."""
        slot = KSlot()
        for warp in range(8):
            subs = [slot.write(warp, 0, step).lds // 1024 for step in range(3)]
            assert subs == [2 * warp, 2 * warp + 1, 16 + warp]

    def test_a_fragment_is_a_row_of_32_columns(self) -> None:
        slot = KSlot()
        for lane, key_block, column_block in product(range(64), range(4), range(3)):
            key, column = 32 * key_block + lane % 32, 64 * column_block + 32 * (lane // 32)
            pieces = (slot.byte(key, column), slot.byte(key, column + 16))
            assert load_K_frag_addr(lane, slot.sub_id(key, column)) == pieces

    def test_fragment_reads_are_free_of_conflicts(self) -> None:
        assert k_bank_count() == BankCount(distinct=64, ways=1)
        plain = [lane % 32 * 64 + lane // 32 * 32 for lane in range(64)]
        assert group_uses(plain, 16)[0].ways == 4  # what the swizzle is for

    def test_bad_slots_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="d_rope"):
            KSlot(d_rope=32)
        with pytest.raises(InvalidArgument, match="share evenly"):
            KSlot(kv_block=32)


class TestSharedBases:
    def check(self, bases: SharedBases, place: Any) -> None:
        rows, columns = bases.shape
        assert len(bases.offset_bases) == (rows * columns).bit_length() - 1
        for offset in range(rows * columns):
            assert place(*bases.coordinate(offset)) == bases.padded(offset)

    def test_v227(self) -> None:
        bases = v227_bases()
        assert bases.interval_padding_pairs == [[1024, 16]]
        self.check(bases, V227().byte)

    def test_v_default(self) -> None:
        self.check(v_bases(DefaultV()), DefaultV().byte)
        bf16 = DefaultV(kv_block=64, element_bytes=2)
        self.check(v_bases(bf16), lambda k, d: bf16.byte(k, d) // 2)

    def test_k(self) -> None:
        slot = KSlot()
        rope = slot.rope_sub_id * 2048
        self.check(k_nope_bases(), slot.byte)
        self.check(k_rope_bases(), lambda key, c: slot.byte(key, 128 + c) - rope)

    def test_maps_that_are_not_linear_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="linear"):
            bases_of(lambda row, column: (4 * row + column + 1) % 16, 4, 4)
        with pytest.raises(InvalidArgument, match="power of two"):
            bases_of(lambda row, column: 4 * row + column, 3, 4)

    def test_the_compiler_takes_them(self) -> None:
        gluon = pytest.importorskip("triton.experimental.gluon.language")
        v227 = v227_bases()
        layout = gluon.PaddedSharedLayout(
            v227.interval_padding_pairs, v227.offset_bases, [], v227.shape
        )
        assert layout.offset_bases == v227.offset_bases
        assert gluon.SharedLinearLayout(k_nope_bases().offset_bases).alignment == 16
