"""Blackwell's products: tcgen05.mma, by one block or by a pair of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gluon_sim.compiled.core.numbers import Array, decoded, product
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.operands import Form
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.state import Block, Warp
from gluon_sim.compiled.ptx.units.matrices import BYTES_OF_K, Shape, descriptor, values

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
            int(result(w)[lane]), int(a(w)[lane]), int(b(w)[lane]), rows, columns, kinds, across,
            bool(keeps(w)[lane]), in_tensor, paired,
        )  # fmt: skip
        w.block.products += 1
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
    lanes = np.arange(rows)
    if rows != _FULL_LANES:
        lanes = lane + (lanes if given.paired else _HALF_ROWS)
    words = np.ascontiguousarray(block.tensor[lanes, column : column + _COLUMNS_OF_A])
    return decoded(words.view(np.uint8), given.kinds[0])


def _accumulate(block: Block, given: Product, found: Array) -> None:
    """Into D: 128 rows fill all lanes, 64 rows half of them, or of a pair two column halves."""
    lane, column = given.result >> 16, given.result & 0xFFFF
    rows = len(found)
    halves = rows != _FULL_LANES and given.paired
    width = given.columns // 2 if halves else given.columns
    allowed = (0, 16) if rows != _FULL_LANES and not given.paired else (0,)
    if lane not in allowed or column + width > (block.columns or 0):
        raise Fault(Kind.BOUNDS, f"D of {rows} x {width} at {given.result:#x}")
    tensor = block.tensor.view(np.float32)
    if halves:
        found = np.concatenate([found[:, :width], found[:, width:]])
    lanes = lane + _HALF_ROWS if len(found) != _FULL_LANES else np.arange(_FULL_LANES)
    before = tensor[lanes, column : column + width] if given.adds else 0.0
    tensor[lanes, column : column + width] = (found + before).astype(np.float32)
