"""Products of matrices: v_mfma. One wave computes a tile of 16 x 16 or 32 x 32."""

from __future__ import annotations

import re

import numpy as np

from gluon_sim.compiled.core.numbers import Array, decoded, product
from gluon_sim.compiled.core.report import Kind
from gluon_sim.compiled.gfx950.operands import Form, Read, Run, registers
from gluon_sim.compiled.gfx950.state import LANES, Wave

_NAME = re.compile(r"v_mfma_(scale_)?f32_(16|32)x\2x(\d+)_(bf16|f16|f8f6f4)")
_KINDS = {"bf16": "bf16", "f16": "f16", "f8f6f4": "e4m3"}
_SCALE_OF_ONE = 127


def build(form: Form) -> Run | None:
    """What an MFMA does; None if the instruction is none."""
    found = _NAME.fullmatch(form.base)
    if found is None:
        return None
    size, depth, kind = int(found[2]), int(found[3]), _KINDS[found[4]]
    groups = 64 // size  # of lanes that hold the same rows and other parts of K
    words = depth // groups * (1 if kind == "e4m3" else 2) // 4
    results = size * size // 64
    into = form.named(0, True, results)
    a, b = form.vector(1, words), form.vector(2, words)
    adds = registers(form.operands[3]) is not None
    if not adds and form.operands[3] != "0":
        raise form.unknown()
    c = form.vector(3, results) if adds else 0
    scales: tuple[Read | None, ...] = _scales(form) if found[1] else (None, None)
    row, column = _places(size, results)

    def matrix(w: Wave, first: int, scale: Read | None) -> Array:
        """[size, K]: lane l has row l % size and part l // size of K, with one scale."""
        raw = np.ascontiguousarray(w.v[first : first + words].T).view(np.uint8)
        numbers = decoded(raw, kind)
        if scale is not None:
            exponent = (scale(w) & np.uint32(255)).astype(np.int32) - _SCALE_OF_ONE
            numbers = np.ldexp(numbers, exponent[:, None])
        numbers = numbers.reshape(groups, size, -1)
        return numbers.transpose(1, 0, 2).reshape(size, depth)

    def run(w: Wave) -> None:
        if not w.full:
            w.report(Kind.DIVERGENCE, "MFMA while some lanes are off")
        w.products += 1
        found = product(matrix(w, a, scales[0]), matrix(w, b, scales[1]))[row, column]
        if adds:
            found = found + w.f[c : c + results].T
        for i in range(results):
            w.setf(into + i, found[:, i])

    return run


def _scales(form: Form) -> tuple[Read, ...]:
    form.allow("op_sel_hi")
    if any(form.list("op_sel_hi", [0, 0, 0])):
        raise form.unknown()
    return form.u32(4), form.u32(5)


def _places(size: int, results: int) -> tuple[Array, Array]:
    """Row and column [64, results] of what every lane holds."""
    lane, register = LANES[:, None], np.arange(results)[None, :]
    if size == 32:
        row = 8 * (register // 4) + 4 * (lane // 32) + register % 4
    else:
        row = 4 * (lane // 16) + register
    return row, np.broadcast_to(lane % size, row.shape)
