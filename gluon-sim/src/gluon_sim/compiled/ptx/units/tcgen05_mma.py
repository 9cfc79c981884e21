"""Blackwell's products: tcgen05.mma, by one block or by a pair of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gluon_sim.compiled.core.numbers import Array, decoded, product
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.block import Block
from gluon_sim.compiled.ptx.operands import Form
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import tensor_cells
from gluon_sim.compiled.ptx.state import Warp
from gluon_sim.compiled.ptx.units.matrices import BYTES_OF_K, Shape, cells, descriptor, values

_FULL_LANES = 128
# Lanes of a product of 64 rows: 16 of every 32.
_HALF_ROWS = 32 * (np.arange(64) // 16) + np.arange(64) % 16
_COLUMNS_OF_A = BYTES_OF_K // 4


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma with its operands as numbers."""

    result: int
    a: int
    b: int
    rows: int
    columns: int
    kinds: tuple[str, str]
    across: tuple[bool, bool]
    adds: bool
    a_in_tensor_memory: bool
    paired: bool


def mma(form: Form) -> Run:
    """tcgen05.mma kind::f16 and kind::f8f6f4."""
    fp8 = "kind::f8f6f4" in form.op
    if not (fp8 or "kind::f16" in form.op) or form.has("ws", "sp", "block_scale"):
        raise form.unknown()
    in_tensor = form.operands[1].startswith("[")
    result, a = form.address(0), form.address(1) if in_tensor else form.read(1, "u64")
    b, instruction, keeps = form.read(2, "u64"), form.read(3, "u32"), form.read(4, "pred")
    paired = "cta_group::2" in form.op

    def issue(w: Warp, lane: int) -> None:
        word = int(instruction(w)[lane])
        rows, columns, kinds, across = _decoded(word, fp8, paired)
        if paired and w.block.rank != 0:
            raise Fault(Kind.DESCRIPTOR, "a product of a pair issued by its odd block")
        given = Product(
            int(result(w)[lane]),
            int(a(w)[lane]),
            int(b(w)[lane]),
            rows,
            columns,
            kinds,
            across,
            bool(keeps(w)[lane]),
            in_tensor,
            paired,
        )
        w.block.products += 1
        _record(w, given)
        work = Pending("mma", lambda: _multiply(w, given), w)
        w.cluster.engine.enqueue(w.block.queue, work)

    def run(w: Warp) -> None:
        for lane in w.active():
            issue(w, lane)

    return run


def _decoded(
    word: int, fp8: bool, paired: bool
) -> tuple[int, int, tuple[str, str], tuple[bool, bool]]:
    """Rows, columns, formats and orders of A and B, from the instruction descriptor."""
    names = {0: "e4m3"} if fp8 else {0: "f16", 1: "bf16"}
    columns, rows = ((word >> 17) & 63) << 3, ((word >> 24) & 31) << 4
    formats = [(word >> shift) & 7 for shift in (7, 10)]
    reserved = word & 0xF or (word >> 13) & 3 or word >> 30
    if (word >> 4) & 3 != 1 or reserved or any(f not in names for f in formats):
        raise Fault(Kind.DESCRIPTOR, f"instruction descriptor {word:#x}")
    step = 32 if paired else 8 if rows == 64 else 16
    if (
        rows not in ((128, 256) if paired else (64, 128))
        or columns % step
        or not 0 < columns <= 256
    ):
        raise Fault(Kind.DESCRIPTOR, f"a product of {rows} x {columns}")
    across = (bool(word >> 15 & 1), bool(word >> 16 & 1))
    return rows, columns, (names[formats[0]], names[formats[1]]), across


def _record(w: Warp, given: Product) -> None:
    """What a product reads and writes, for the search for races."""
    blocks = w.cluster.blocks if given.paired else [w.block]
    sm, rows, event = w.kernel.sm, given.rows // len(blocks), w.clocks.queue(w.number, w.block.rank)
    shape = Shape(given.columns // len(blocks), given.kinds[1], given.across[1])
    for block in blocks:
        block.races.read(cells(descriptor(given.b, sm), shape), event, "tcgen05.mma B")
        if given.a_in_tensor_memory:
            column = given.a & 0xFFFF
            where = tensor_cells(_lanes_of_a(given, rows), column, column + _COLUMNS_OF_A)
            block.tensor_races.read(where, event, "tcgen05.mma A")
        else:
            shape_a = Shape(rows, given.kinds[0], given.across[0])
            block.races.read(cells(descriptor(given.a, sm), shape_a), event, "tcgen05.mma A")
        lanes, column, width = _place_of_result(given, rows)
        where = tensor_cells(lanes, column, column + width)
        block.tensor_races.write(where, event, "tcgen05.mma D")


def _multiply(w: Warp, given: Product) -> None:
    blocks = w.cluster.blocks if given.paired else [w.block]
    sm, count = w.kernel.sm, len(blocks)
    b = descriptor(given.b, sm)
    shape = Shape(given.columns // count, given.kinds[1], given.across[1])
    right = np.concatenate([values(block, b, shape, "tcgen05.mma B") for block in blocks])
    for block in blocks:
        if block.columns is None:
            raise Fault(Kind.UNINITIALIZED, "a product without tensor memory")
        _accumulate(block, given, product(_left(block, given, given.rows // count, sm), right))


def _left(block: Block, given: Product, rows: int, sm: int) -> Array:
    """A [rows, K] of one block."""
    if not given.a_in_tensor_memory:
        shape = Shape(rows, given.kinds[0], given.across[0])
        return values(block, descriptor(given.a, sm), shape, "tcgen05.mma A")
    lane, column = given.a >> 16, given.a & 0xFFFF
    if given.across[0] or lane not in ((0,) if rows == _FULL_LANES else (0, 16)):
        raise Fault(Kind.DESCRIPTOR, f"A in tensor memory at lane {lane}")
    if column + _COLUMNS_OF_A > (block.columns or 0):
        raise Fault(Kind.BOUNDS, f"A in tensor memory at column {column}")
    lanes = _lanes_of_a(given, rows)
    words = np.ascontiguousarray(block.tensor[lanes, column : column + _COLUMNS_OF_A])
    return decoded(words.view(np.uint8), given.kinds[0])


def _lanes_of_a(given: Product, rows: int) -> Array:
    lanes = np.arange(rows)
    if rows != _FULL_LANES:
        lanes = (given.a >> 16) + (lanes if given.paired else _HALF_ROWS)
    return lanes


def _place_of_result(given: Product, rows: int) -> tuple[Array, int, int]:
    """Lanes, first column and columns of D: 128 rows fill all lanes, 64 rows half of them, or of a
    pair two column halves."""
    lane, column = given.result >> 16, given.result & 0xFFFF
    halves = rows != _FULL_LANES and given.paired
    full = halves or rows == _FULL_LANES
    lanes = np.arange(_FULL_LANES) if full else lane + _HALF_ROWS
    return lanes, column, given.columns // 2 if halves else given.columns


def _accumulate(block: Block, given: Product, found: Array) -> None:
    rows = len(found)
    lanes, column, width = _place_of_result(given, rows)
    allowed = (0, 16) if rows != _FULL_LANES and not given.paired else (0,)
    if given.result >> 16 not in allowed or column + width > (block.columns or 0):
        raise Fault(Kind.BOUNDS, f"D of {rows} x {width} at {given.result:#x}")
    tensor = block.tensor.view(np.float32)
    if width != given.columns:
        found = np.concatenate([found[:, :width], found[:, width:]])
    before = tensor[lanes, column : column + width] if given.adds else 0.0
    tensor[lanes, column : column + width] = (found + before).astype(np.float32)
