"""Vector instructions on integers: arithmetic, logic, comparison, lanes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, Array, table_logic
from gluon_sim.compiled.core.report import Kind
from gluon_sim.compiled.gfx950.operands import Form, Read, Run, set_pair
from gluon_sim.compiled.gfx950.state import LANES, Wave, lanes_of, word_of

Function = Callable[..., Array]
LANE_MOVES = ("row_shr", "row_bcast", "wave_shl", "row_ror", "row_half_mirror", "quad_perm")
"""What DPP takes its first operand by."""


def ints(x: Array) -> Array:
    """Bits as signed integers."""
    return x.view(np.int32)


def _bits(x: Array) -> Array:
    return x.view(np.uint32)


def _by(n: Array) -> Array:
    """A shift distance: its low five bits."""
    result: Array = n & np.uint32(31)
    return result


def _low16(x: Array) -> Array:
    result: Array = x & np.uint32(0xFFFF)
    return result


def _low24(x: Array) -> Array:
    result: Array = x & np.uint32(0xFFFFFF)
    return result


def _signed24(x: Array) -> Array:
    result: Array = ints(x << np.uint32(8)) >> np.int32(8)
    return result


def _field(a: Array, at: Array, size: Array) -> Array:
    bits = _by(size)
    mask = (np.uint32(1) << bits) - np.uint32(1)
    result: Array = np.where(bits == 0, np.uint32(0), (a >> _by(at)) & mask)
    return result


def _signed_field(a: Array, at: Array, size: Array) -> Array:
    bits = _by(size)
    spare = _by(np.uint32(32) - bits)
    value = ints(_field(a, at, size) << spare) >> spare.view(np.int32)
    return _bits(np.where(bits == 0, np.int32(0), value))


def _reversed(x: Array) -> Array:
    raw = np.ascontiguousarray(x)[:, None].view(np.uint8)
    bits = np.unpackbits(raw, axis=1, bitorder="little")
    return np.packbits(bits, axis=1).view(">u4").astype(np.uint32).reshape(64)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: bytes 0 to 3 are of b, 4 to 7 of a; above are signs, 0 and 255."""
    data = np.stack([(x >> np.uint32(8 * i)) & np.uint32(255) for x in (b, a) for i in range(4)])
    result = np.zeros(64, np.uint32)
    for i in range(4):
        choice = (selector >> np.uint32(8 * i)) & np.uint32(255)
        byte = data[np.minimum(choice, 7), LANES]
        for code, source in ((8, 1), (9, 3), (10, 5), (11, 7)):
            byte = np.where(choice == code, np.where(data[source] & 128, 255, 0), byte)
        byte = np.where(choice == 12, 0, np.where(choice >= 13, 255, byte)).astype(np.uint32)
        result |= byte << np.uint32(8 * i)
    return result


def _high(a: Array, b: Array) -> Array:
    wide = a.astype(np.uint64) * b.astype(np.uint64)
    result: Array = (wide >> np.uint64(32)).astype(np.uint32)
    return result


def _signed_high(a: Array, b: Array) -> Array:
    wide = ints(a).astype(np.int64) * ints(b).astype(np.int64)
    result: Array = (wide >> 32).astype(np.int32)
    return _bits(result)


def _median(a: Array, b: Array, c: Array) -> Array:
    x, y, z = ints(a), ints(b), ints(c)
    return _bits(np.maximum(np.minimum(x, y), np.minimum(np.maximum(x, y), z)))


def _least3(a: Array, b: Array, c: Array) -> Array:
    return _bits(np.minimum(np.minimum(ints(a), ints(b)), ints(c)))


def _greatest3(a: Array, b: Array, c: Array) -> Array:
    return _bits(np.maximum(np.maximum(ints(a), ints(b)), ints(c)))


def _ones(x: Array) -> Array:
    """How many bits are set."""
    result: Array = np.unpackbits(np.ascontiguousarray(x)[:, None].view(np.uint8), axis=1).sum(1)
    return result.astype(np.uint32)


def _lower_lanes(first: int) -> Array:
    """In lane l, a bit for each lane of first … first + 31 that is below l."""
    below = np.clip(LANES - first, 0, 32).astype(np.uint64)
    return ((np.uint64(1) << below) - np.uint64(1)).astype(np.uint32)


WORDS: dict[str, Function] = {
    "v_mov_b32": lambda a: a,
    "v_accvgpr_read_b32": lambda a: a,
    "v_accvgpr_write_b32": lambda a: a,
    "v_accvgpr_mov_b32": lambda a: a,
    "v_not_b32": lambda a: ~a,
    "v_bfrev_b32": _reversed,
    "v_add_u32": lambda a, b: a + b,
    "v_sub_u32": lambda a, b: a - b,
    "v_subrev_u32": lambda a, b: b - a,
    "v_mul_lo_u32": lambda a, b: a * b,
    "v_mul_hi_u32": _high,
    "v_mul_hi_i32": _signed_high,
    "v_mul_u32_u24": lambda a, b: _low24(a) * _low24(b),
    "v_and_b32": lambda a, b: a & b,
    "v_or_b32": lambda a, b: a | b,
    "v_xor_b32": lambda a, b: a ^ b,
    "v_lshlrev_b32": lambda a, b: b << _by(a),
    "v_lshrrev_b32": lambda a, b: b >> _by(a),
    "v_ashrrev_i32": lambda a, b: _bits(ints(b) >> _by(a).view(np.int32)),
    "v_lshlrev_b16": lambda a, b: (
        ((b & np.uint32(0xFFFF)) << (a & np.uint32(15))) & np.uint32(0xFFFF)
    ),
    "v_min_u32": np.minimum,
    "v_max_u32": np.maximum,
    "v_min_i32": lambda a, b: _bits(np.minimum(ints(a), ints(b))),
    "v_max_i32": lambda a, b: _bits(np.maximum(ints(a), ints(b))),
    "v_and_or_b32": lambda a, b, c: (a & b) | c,
    "v_or3_b32": lambda a, b, c: a | b | c,
    "v_lshl_or_b32": lambda a, b, c: (a << _by(b)) | c,
    "v_med3_i32": _median,
    "v_min3_i32": _least3,
    "v_max3_i32": _greatest3,
    "v_bcnt_u32_b32": lambda a, b: _ones(a) + b,
    "v_mbcnt_lo_u32_b32": lambda a, b: _ones(a & _lower_lanes(0)) + b,
    "v_mbcnt_hi_u32_b32": lambda a, b: _ones(a & _lower_lanes(32)) + b,
    "v_lshl_add_u32": lambda a, b, c: (a << _by(b)) + c,
    "v_add_lshl_u32": lambda a, b, c: (a + b) << _by(c),
    "v_add3_u32": lambda a, b, c: a + b + c,
    "v_xad_u32": lambda a, b, c: (a ^ b) + c,
    "v_mad_i32_i24": lambda a, b, c: _bits(_signed24(a) * _signed24(b)) + c,
    "v_mad_u32_u24": lambda a, b, c: _low24(a) * _low24(b) + c,
    "v_bfe_u32": _field,
    "v_bfe_i32": _signed_field,
    "v_perm_b32": _permute,
}
_CLAMPED: dict[str, Function] = {
    "v_add_u32": lambda a, b: np.where(a + b < a, np.uint32(MASK32), a + b),
    "v_sub_u32": lambda a, b: np.where(a < b, np.uint32(0), a - b),
}
"""What becomes of them with `clamp`: sums and differences that do not wrap around."""
COMPARE: dict[str, Function] = {
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nle": lambda a, b: ~(a <= b),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
    "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}


def build(form: Form) -> Run | None:
    """What an integer instruction does; None if it is none."""
    base = form.base
    if base in WORDS:
        how = {"sdwa": _parts, "dpp": moved}.get(form.op.rpartition("_")[2], _word)
        return how(form, WORDS[base])
    if base.startswith("v_cmp_"):
        return _comparison(form)
    known: dict[str, Callable[[Form], Run]] = {
        "v_bitop3_b32": _bitop3,
        "v_bitop3_b16": _bitop3,
        "v_add_co_u32": _add_with_carry,
        "v_mov_b64": _move64,
        "v_lshl_add_u64": _shift_add64,
        "v_lshrrev_b64": _shift64,
        "v_lshlrev_b64": _shift64,
        "v_mad_u64_u32": _mad64,
        "v_mad_i64_i32": _mad64,
        "v_cndmask_b32": _select,
        "v_pk_mov_b32": _halves,
        "v_readfirstlane_b32": _first_lane,
        "v_readlane_b32": _one_lane,
        "v_writelane_b32": _into_lane,
        **dict.fromkeys(_CARRIES, _with_carry),
        "v_permlane32_swap_b32": _swap,
        "v_permlane16_swap_b32": _swap,
    }
    return known[base](form) if base in known else None


def _word(form: Form, function: Function) -> Run:
    if "clamp" in form.modifiers and form.base in _CLAMPED:
        function = _CLAMPED[form.base]
        del form.modifiers["clamp"]
    form.allow()
    into = form.named(0, True, 1)
    if any(token.startswith(("-v", "-s", "|")) for token in form.operands):
        raise form.unknown()
    reads = [form.u32(i) for i in range(1, len(form.operands))]
    if len(reads) == 2:
        a, b = reads
        return lambda w: w.set(into, function(a(w), b(w)))
    return lambda w: w.set(into, function(*(read(w) for read in reads)))


_PARTS = {"DWORD": (0, MASK32), "WORD_0": (0, 0xFFFF), "WORD_1": (16, 0xFFFF)} | {
    f"BYTE_{i}": (8 * i, 0xFF) for i in range(4)
}


def _part_reads(form: Form, count: int) -> list[Read]:
    """SDWA: bytes or halves of the first `count` sources."""
    form.allow("dst_sel", "dst_unused", "src0_sel", "src1_sel")
    if form.modifiers.get("dst_unused", "UNUSED_PAD") != "UNUSED_PAD":
        raise form.unknown()
    whole = [form.u32(i) for i in range(1, 1 + count)]
    parts = [_PARTS[form.modifiers.get(f"src{i}_sel", "DWORD")] for i in range(count)]

    def part(read: Read, low: int, bits: int) -> Read:
        return lambda w: (read(w) >> np.uint32(low)) & np.uint32(bits)

    return [part(read, *where) for read, where in zip(whole, parts, strict=True)]


def _parts(form: Form, function: Function) -> Run:
    """SDWA: on bytes or halves of the operands; the rest of the destination becomes zero."""
    shift, mask = _PARTS[form.modifiers.get("dst_sel", "DWORD")]
    into, reads = form.named(0, True, 1), _part_reads(form, len(form.operands) - 1)

    def run(w: Wave) -> None:
        values = function(*(read(w) for read in reads))
        w.set(into, (values & np.uint32(mask)) << np.uint32(shift))

    return run


def _source_lanes(form: Form) -> Array:
    """DPP: the lane that each lane takes its first operand from; -1 where there is none."""
    given = form.modifiers
    if given.get("wave_shl") == "1":
        return np.where(LANES < 63, LANES + 1, -1)
    if "row_shr" in given:
        by = form.number("row_shr")
        return np.where(by <= LANES % 16, LANES - by, -1)
    if given.get("row_bcast") == "15":
        return np.where(LANES >= 16, LANES // 16 * 16 - 1, -1)
    if given.get("row_bcast") == "31":
        return np.where(LANES >= 32, 31, -1)
    found: Array
    if "row_ror" in given:
        found = LANES // 16 * 16 + (LANES - form.number("row_ror")) % 16
    elif "row_half_mirror" in given:
        found = LANES // 8 * 8 + 7 - LANES % 8
    elif "quad_perm" in given:
        found = LANES // 4 * 4 + np.array(form.list("quad_perm", []))[LANES % 4]
    else:
        raise form.unknown()
    return found


def moved(form: Form, function: Function) -> Run:
    """DPP: the first operand is another lane's. Where there is none it is 0 with bound_ctrl, else
    nothing is written; nor is it outside of the rows of 16 lanes and groups of 4 in the masks."""
    form.allow(*LANE_MOVES, "row_mask", "bank_mask", "bound_ctrl")
    zeros = form.modifiers.get("bound_ctrl") == "1"
    if not zeros and "bound_ctrl" in form.modifiers:
        raise form.unknown()
    rows, banks = (int(form.modifiers.get(f"{x}_mask", "0xf"), 0) for x in ("row", "bank"))
    written = ((rows >> LANES // 16) & (banks >> LANES % 16 // 4) & 1).astype(bool)
    lanes, into = _source_lanes(form), form.named(0, True, 1)
    reads = [form.u32(i) for i in range(1, len(form.operands))]

    def run(w: Wave) -> None:
        there = (lanes >= 0) & w.mask[lanes]
        values = function(
            np.where(there, reads[0](w)[lanes], np.uint32(0)), *(r(w) for r in reads[1:])
        )
        changed = written if zeros else written & there
        w.set(into, np.where(changed, values, w.v[into]))

    return run


_CARRIES: dict[str, Callable[[Array, Array, Array], Array]] = {
    "v_add_co_u32": lambda a, b, carry: a + b,
    "v_addc_co_u32": lambda a, b, carry: a + b + carry,
    "v_sub_co_u32": lambda a, b, carry: a - b,
    "v_subb_co_u32": lambda a, b, carry: a - b - carry,
    "v_subrev_co_u32": lambda a, b, carry: b - a,
    "v_subbrev_co_u32": lambda a, b, carry: b - a - carry,
}
"""In signed 64 bits: what lies outside of 32 is the carry or borrow."""


def _with_carry(form: Form) -> Run:
    form.allow()
    function, into, out = _CARRIES[form.base], form.named(0, True, 1), form.named(1, False, 2)
    a, b = form.u32(2), form.u32(3)
    carry = form.scalars(4, 2) if len(form.operands) > 4 else None

    def run(w: Wave) -> None:
        one = np.zeros(64, np.int64) if carry is None else lanes_of(w.get64(carry)).astype(np.int64)
        wide = function(a(w).astype(np.int64), b(w).astype(np.int64), one)
        w.set(into, (wide & MASK32).astype(np.uint32))
        w.set64(out, word_of(((wide < 0) | (wide > MASK32)) & w.mask))

    return run


def _bitop3(form: Form) -> Run:
    form.allow("bitop3")
    table, into = int(form.modifiers["bitop3"], 0), form.named(0, True, 1)
    a, b, c = (form.u32(i) for i in (1, 2, 3))
    mask = np.uint32(MASK32 if form.base.endswith("32") else 0xFFFF)
    return lambda w: w.set(into, table_logic(table, a(w), b(w), c(w)) & mask)


def _add_with_carry(form: Form) -> Run:
    """Lanes whose sum does not fit have a bit in the second operand."""
    form.allow()
    into, carry = form.named(0, True, 1), form.named(1, False, 2)
    a, b = form.u32(2), form.u32(3)

    def run(w: Wave) -> None:
        total = a(w).astype(np.uint64) + b(w)
        w.set64(carry, word_of((total > np.uint64(MASK32)) & w.mask))
        w.set(into, (total & np.uint64(MASK32)).astype(np.uint32))

    return run


def _move64(form: Form) -> Run:
    into, a = form.named(0, True, 2), form.u64(1)
    return lambda w: set_pair(w, into, a(w))


def _shift_add64(form: Form) -> Run:
    into, a, by, c = form.named(0, True, 2), form.u64(1), form.u32(2), form.u64(3)
    return lambda w: set_pair(w, into, (a(w) << (by(w) & np.uint32(7)).astype(np.uint64)) + c(w))


def _shift64(form: Form) -> Run:
    into, by, a = form.named(0, True, 2), form.u32(1), form.u64(2)
    left = form.base == "v_lshlrev_b64"

    def run(w: Wave) -> None:
        distance = (by(w) & np.uint32(63)).astype(np.uint64)
        set_pair(w, into, a(w) << distance if left else a(w) >> distance)

    return run


def _mad64(form: Form) -> Run:
    """The high half of the addend may be unwritten; then that of the result is."""
    into, carry = form.named(0, True, 2), form.named(1, False, 2)
    a, b = form.u32(2), form.u32(3)
    before = len(form.reads)
    c = form.u64(4)
    addend = form.reads[before:]
    del form.reads[before + 1 :]
    is_signed = form.base == "v_mad_i64_i32"

    def run(w: Wave) -> None:
        wide: Array
        if is_signed:
            wide = (ints(a(w)).astype(np.int64) * ints(b(w)).astype(np.int64)).view(np.uint64)
        else:
            wide = a(w).astype(np.uint64) * b(w).astype(np.uint64)
        total = wide + c(w)
        known = w.written[addend[1]].copy() if addend else np.ones(64, bool)
        w.set64(carry, word_of((total < wide) & w.mask))
        set_pair(w, into, total)
        w.mark(into + 1, w.mask, known)

    return run


def _select(form: Form) -> Run:
    whole = not form.op.endswith("sdwa")
    if whole:
        form.allow()
    elif form.modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise form.unknown()
    a, b = (form.u32(1), form.u32(2)) if whole else _part_reads(form, 2)
    into, choice = form.named(0, True, 1), form.scalars(3, 2)
    if any(token.startswith(("-v", "|")) for token in form.operands):
        raise form.unknown()
    return lambda w: w.set(into, np.where(lanes_of(w.get64(choice)), b(w), a(w)))


def _halves(form: Form) -> Run:
    """v_pk_mov_b32: one word of each source."""
    form.allow("op_sel")
    into, which = form.named(0, True, 2), form.list("op_sel", [0, 0])
    low, high = (form.named(i + 1, True, 2) + which[i] for i in range(2))
    form.reads.extend((low, high))

    def run(w: Wave) -> None:
        words = w.v[low].copy(), w.v[high].copy()
        w.set(into, words[0])
        w.set(into + 1, words[1])

    return run


def _first_lane(form: Form) -> Run:
    into, source = form.named(0, False, 1), form.vector(1)

    def run(w: Wave) -> None:
        lane = int(np.argmax(w.mask)) if w.any else 0
        w.set32(into, int(w.v[source][lane]))

    return run


def _one_lane(form: Form) -> Run:
    """v_readlane_b32: nothing but this lane of the register need be written, and EXEC does not
    matter."""
    into, source, lane = form.named(0, False, 1), form.named(1, True, 1), form.s32(2)

    def run(w: Wave) -> None:
        number = lane(w) % 64
        if not w.written[source][number]:
            w.report(Kind.UNINITIALIZED, f"lane {number} of v{source} is unwritten or in flight")
        w.set32(into, int(w.v[source][number]))

    return run


def _into_lane(form: Form) -> Run:
    """v_writelane_b32, which keeps scalar registers in lanes of a vector register; EXEC does not
    matter."""
    into, value, lane = form.named(0, True, 1), form.s32(1), form.s32(2)

    def run(w: Wave) -> None:
        number = lane(w) % 64
        w.v[into][number] = value(w)
        w.mark(into, np.equal(LANES, number), True)

    return run


def _comparison(form: Form) -> Run:
    found = re.fullmatch(r"v_cmp_([a-z]+)_([iuf])(32|64)", form.base)
    if found is None or found[1] not in COMPARE or found[2] + found[3] == "f64":
        raise form.unknown()
    into, compare = form.named(0, False, 2), COMPARE[found[1]]
    a, b = _compared(form, found[2], found[3])
    if found[2] == "i":
        kind = np.int32 if found[3] == "32" else np.int64
        return lambda w: w.set64(into, word_of(compare(a(w).view(kind), b(w).view(kind)) & w.mask))
    return lambda w: w.set64(into, word_of(compare(a(w), b(w)) & w.mask))


def _compared(form: Form, kind: str, size: str) -> list[Read]:
    """The two operands of a comparison."""
    if form.op.endswith("sdwa"):
        if kind != "u" or size != "32":
            raise form.unknown()
        return _part_reads(form, 2)
    form.allow()
    read = form.u64 if size == "64" else form.f32 if kind == "f" else form.u32
    return [read(1), read(2)]


def _swap(form: Form) -> Run:
    """Odd groups of 16 or 32 lanes of the first operand for even groups of the second."""
    size = 32 if "32_" in form.base else 16
    first, second = form.vector(0), form.vector(1)
    odd = LANES[(LANES // size) % 2 == 1]

    def run(w: Wave) -> None:
        if not w.full:
            w.report(Kind.DIVERGENCE, "lanes are swapped while some are off")
        kept = w.v[second][odd - size].copy()
        w.v[second][odd - size] = w.v[first][odd]
        w.v[first][odd] = kept

    return run
