"""Hopper's products of a warpgroup: wgmma. Every warp computes its own 16 rows."""

from __future__ import annotations

import re

import numpy as np

from gluon_sim.compiled.core.numbers import Array, decoded, product
from gluon_sim.compiled.core.schedule import Pending
from gluon_sim.compiled.ptx.operands import Form, elements
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.races import PRODUCTS
from gluon_sim.compiled.ptx.state import LANES, Warp
from gluon_sim.compiled.ptx.units.matrices import Shape, cells, descriptor, values
from gluon_sim.values.fp8_sums import HALF_BITS, HALF_COLUMNS, HALF_KEPT, add_products

_HALF = {"bits": HALF_BITS, "columns": HALF_COLUMNS, "kept": HALF_KEPT}
_SUMS = {"e4m3": {"bits": 13}, "bf16": _HALF, "f16": _HALF}
_ROWS = 64
_WARP_ROWS = 16


def wgmma(form: Form) -> Run:
    """wgmma.mma_async and its fence, commit and wait."""
    what = form.parts[1]
    if what == "fence":
        return lambda w: None
    if what == "commit_group":
        return lambda w: w.commit("wgmma")
    if what == "wait_group":
        left = int(form.operands[0])
        return lambda w: w.wait("wgmma", left)
    if what == "mma_async" and form.parts[-1] in ("bf16", "f16", "e4m3"):
        return _product(form)
    raise form.unknown()


def _register_rows(w: Warp, registers: Array, kind: str) -> Array:
    """A [16, K] from the four registers of every lane."""
    words = np.ascontiguousarray(w.regs["u32"][registers])  # [4, 32]
    per_word = 4 if kind == "e4m3" else 2
    numbers = decoded(words.view(np.uint8).reshape(4, 32, 4), kind).reshape(4, 32, per_word)
    rows = np.zeros((_WARP_ROWS, 8 * per_word), np.float32)
    for j in range(4):
        for h in range(per_word):
            column = per_word * (LANES % 4) + h + 4 * per_word * (j // 2)
            rows[LANES // 4 + 8 * (j % 2), column] = numbers[j, :, h]
    return rows


def _summed(
    left: Array, right: Array, before: Array, kind: str, place: tuple[Array, Array]
) -> Array:
    """Accumulators after a product, with the chip's bits; what is not finite, by plain sums."""
    sums = np.zeros((len(left), len(right)), np.float32)
    sums[place] = before
    rows, columns = (np.isfinite(x.sum(1, keepdims=True)) for x in (left, right))
    usual = rows & columns.T & np.isfinite(sums)
    if not usual.all():
        plain = (product(left, right) + sums).astype(np.float32)
        left, right, sums = (np.nan_to_num(x, False, 0, 0, 0) for x in (left, right, sums))
    found = add_products(left, right.T, sums, **_SUMS[kind])
    result: Array = (found if usual.all() else np.where(usual, found, plain))[place]
    return result


def _product(form: Form) -> Run:
    size = re.search(r"m64n(\d+)k(\d+)", form.op)
    from_registers = form.operands[1].startswith("{")
    signs = [int(x, 0) for x in form.operands[4:]]
    columns = int(size[1]) if size else 0
    accumulator = np.array([form.register(name) for name in elements(form.operands[0])])
    if len(accumulator) != columns // 2 or signs[:2] != [1, 1] or form.parts[-3] != "f32":
        raise form.unknown()
    kind = form.parts[-1]
    across = [bool(x) for x in signs[2:]]
    a_across = across[0] if len(across) == 2 else False
    b_across = across[-1] if across else False
    used = frozenset(accumulator.tolist())
    if from_registers:
        a_registers = np.array([form.register(name) for name in elements(form.operands[1])])
    else:
        a_word = form.read(1, "u64")
    b_word, keeps = form.read(2, "u64"), form.read(3, "pred")
    element = np.arange(columns // 2)[:, None]
    row = LANES[None, :] // 4 + 8 * ((element // 2) % 2)
    column = 8 * (element // 4) + 2 * (LANES[None, :] % 4) + element % 2

    def run(w: Warp) -> None:
        w.together("wgmma")
        sm, block = w.kernel.sm, w.block
        b = descriptor(w.one(b_word(w)), sm)
        a = None if from_registers else descriptor(w.one(a_word(w)), sm)
        adds = bool(w.one(keeps(w)))

        event = w.clocks.start(w.number, PRODUCTS)
        b_shape, a_shape = Shape(columns, kind, b_across), Shape(_ROWS, kind, a_across)
        first = _WARP_ROWS * (w.index % 4)
        block.races.read(cells(b, b_shape), event, "wgmma B")
        if a is not None:
            block.races.read(cells(a, a_shape, first, first + _WARP_ROWS), event, "wgmma A")

        def multiply() -> None:
            right = values(block, b, b_shape, "wgmma B")
            if a is None:
                left = _register_rows(w, a_registers, kind)
            else:
                whole = values(block, a, a_shape, "wgmma A")
                left = whole[first : first + _WARP_ROWS]
            registers = w.regs["f32"]
            before = registers[accumulator] if adds else np.zeros(row.shape, np.float32)
            registers[accumulator] = _summed(left, right, before, kind, (row, column))

        work = Pending("wgmma", multiply, w, event.time)
        work.registers = used
        w.in_flight |= used
        w.issue("wgmma", work)
        w.block.products += w.index % 4 == 0  # one for the warps of a warpgroup
        if w.cluster.engine.early(copy=False):  # in order: all that were issued before as well
            for group in (*w.groups["wgmma"], w.open["wgmma"]):
                for work in group:
                    work.finish()

    return run
