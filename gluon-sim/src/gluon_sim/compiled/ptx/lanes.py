"""Exchange between the lanes of a warp: shuffles, votes, reductions, election."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, Array
from gluon_sim.compiled.core.report import Fault, Kind
from gluon_sim.compiled.ptx.operands import DTYPES, Form
from gluon_sim.compiled.ptx.parse import Run
from gluon_sim.compiled.ptx.state import LANES, Warp


def _bits(lanes: Array) -> Array:
    word = int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")
    return np.full(32, word, np.uint32)


def _shfl(form: Form) -> Run:
    names = form.operands[0].split("|")
    write = form.writer(names[0], "u32")
    valid = form.writer(names[1], "pred") if len(names) > 1 else None
    value, offset, clamp = (form.read(i, "u32") for i in (1, 2, 3))
    mode = form.parts[2]

    def run(w: Warp) -> None:
        by, bounds = offset(w).astype(int) & 31, clamp(w).astype(int)
        segment = (bounds >> 8) & 31
        first, last = LANES & segment, (LANES & segment) | (bounds & 31 & ~segment)
        source = {
            "idx": first | (by & ~segment),
            "bfly": LANES ^ by,
            "up": LANES - by,
            "down": LANES + by,
        }[mode]
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, LANES)
        if not w.mask[source[w.mask]].all():
            raise Fault(Kind.DIVERGENCE, "shuffle from a lane that is not here")
        write(w, value(w)[source])
        if valid:
            valid(w, inside)

    return run


def _vote(form: Form) -> Run:
    mode, vote = form.parts[2], form.read(1, "pred")
    if mode == "ballot":
        write = form.write(0, "u32")
        return lambda w: write(w, _bits(vote(w) & w.mask))
    decide: dict[str, Callable[[Array, Array], bool]] = {
        "any": lambda votes, here: bool(votes[here].any()),
        "all": lambda votes, here: bool(votes[here].all()),
        "uni": lambda votes, here: bool((votes[here] == votes[here][0]).all()),
    }
    write, choice = form.write(0, "pred"), decide[mode]
    return lambda w: write(w, np.full(32, choice(vote(w), w.mask)))


def _redux(form: Form) -> Run:
    joins: dict[str, Callable[[Array], object]] = {
        "add": np.sum,
        "max": np.max,
        "min": np.min,
        "or": np.bitwise_or.reduce,
        "and": np.bitwise_and.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    if form.type not in ("u32", "s32") or form.parts[2] not in joins:
        raise form.unknown()
    join, dtype = joins[form.parts[2]], DTYPES[form.type]
    write, read = form.write(), form.read(1)

    def run(w: Warp) -> None:
        total = int(join(read(w)[w.mask].astype(np.int64)))  # type: ignore[call-overload]
        write(w, np.full(32, total & MASK32, np.uint32).view(dtype))

    return run


def _elect(form: Form) -> Run:
    """One of the lanes, which one is open: the first or the last, by the seed."""
    names = form.operands[0].split("|")
    write, chosen = form.writer(names[0], "u32"), form.writer(names[1], "pred")

    def run(w: Warp) -> None:
        lane = w.active()[-(w.cluster.engine.schedule.seed % 2)]
        write(w, np.full(32, lane, np.uint32))
        chosen(w, np.equal(LANES, lane))

    return run


def _activemask(form: Form) -> Run:
    write = form.write(0, "u32")
    return lambda w: write(w, _bits(w.mask))


BUILDERS: dict[str, Callable[[Form], Run]] = {
    "shfl": _shfl,
    "vote": _vote,
    "redux": _redux,
    "elect": _elect,
    "activemask": _activemask,
}
