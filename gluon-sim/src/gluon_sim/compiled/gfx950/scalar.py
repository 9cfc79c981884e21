"""Scalar instructions: arithmetic, comparison, branches, waits, barriers, loads."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from gluon_sim.compiled.core.numbers import MASK32, MASK64, signed
from gluon_sim.compiled.gfx950.operands import Form, Run, Scalar
from gluon_sim.compiled.gfx950.state import EXEC, VCC, Access, Wave

Result = tuple[int, int | None]
"""A value, and SCC where the instruction sets it."""


def _overflow(value: int) -> Result:
    return value & MASK32, int(not -(2**31) <= value < 2**31)


def _nonzero(value: int, mask: int = MASK32) -> Result:
    return value & mask, int(value & mask != 0)


def _shifted_sum(by: int) -> Callable[[int, int], Result]:
    return lambda a, b: (((a << by) + b) & MASK32, int((a << by) + b > MASK32))


def _signed_field(a: int, at: int, size: int) -> int:
    """Bits `at` … `at + size - 1` of `a`, the last of which is the sign; 0 of no bits.

    >>> [_signed_field(0b0110, 1, size) for size in (0, 1, 2, 3)]
    [0, -1, -1, 3]
    """
    field = (a >> at) & ((1 << size) - 1)
    return field - (1 << size) if size and field >> (size - 1) else field


TWO: dict[str, Callable[[int, int], Result]] = {
    "s_add_i32": lambda a, b: _overflow(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b: _overflow(signed(a) - signed(b)),
    "s_add_u32": lambda a, b: ((a + b) & MASK32, (a + b) >> 32),
    "s_sub_u32": lambda a, b: ((a - b) & MASK32, int(b > a)),
    "s_mul_i32": lambda a, b: ((a * b) & MASK32, None),
    "s_mul_hi_u32": lambda a, b: ((a * b) >> 32, None),
    "s_mul_hi_i32": lambda a, b: (((signed(a) * signed(b)) >> 32) & MASK32, None),
    "s_and_b32": lambda a, b: _nonzero(a & b),
    "s_or_b32": lambda a, b: _nonzero(a | b),
    "s_xor_b32": lambda a, b: _nonzero(a ^ b),
    "s_andn2_b32": lambda a, b: _nonzero(a & ~b),
    "s_lshl_b32": lambda a, b: _nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b: _nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b: _nonzero(signed(a) >> (b & 31)),
    "s_bfe_u32": lambda a, b: _nonzero((a >> (b & 31)) & ((1 << (b >> 16 & 0x7F)) - 1)),
    "s_bfe_i32": lambda a, b: _nonzero(_signed_field(a, b & 31, b >> 16 & 0x7F)),
    "s_min_i32": lambda a, b: (min(signed(a), signed(b)) & MASK32, int(signed(a) < signed(b))),
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)) & MASK32, int(signed(a) >= signed(b))),
    "s_min_u32": lambda a, b: (min(a, b), int(a < b)),
    "s_max_u32": lambda a, b: (max(a, b), int(a >= b)),
    **{f"s_lshl{by}_add_u32": _shifted_sum(by) for by in (1, 2, 3, 4)},
}
ONE: dict[str, Callable[[int], Result]] = {
    "s_mov_b32": lambda a: (a, None),
    "s_not_b32": lambda a: _nonzero(~a),
    "s_abs_i32": lambda a: _nonzero(abs(signed(a))),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
}
TWO64: dict[str, Callable[[int, int], Result]] = {
    "s_and_b64": lambda a, b: _nonzero(a & b, MASK64),
    "s_or_b64": lambda a, b: _nonzero(a | b, MASK64),
    "s_xor_b64": lambda a, b: _nonzero(a ^ b, MASK64),
    "s_andn2_b64": lambda a, b: _nonzero(a & ~b, MASK64),
    "s_orn2_b64": lambda a, b: _nonzero(a | ~b, MASK64),
}
SHIFT64: dict[str, Callable[[int, int], Result]] = {
    "s_lshl_b64": lambda a, n: _nonzero(a << (n & 63), MASK64),
    "s_lshr_b64": lambda a, n: _nonzero(a >> (n & 63), MASK64),
    "s_ashr_i64": lambda a, n: _nonzero(signed(a, 64) >> (n & 63), MASK64),
}
SAVE: dict[str, Callable[[int, int], int]] = {
    "s_and_saveexec_b64": lambda s, e: s & e,
    "s_or_saveexec_b64": lambda s, e: s | e,
    "s_andn2_saveexec_b64": lambda s, e: s & ~e & MASK64,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "lt": lambda a, b: a < b,
    "ge": lambda a, b: a >= b,
    "le": lambda a, b: a <= b,
}
_BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "s_branch": lambda w: True,
    "s_cbranch_scc0": lambda w: not w.scc,
    "s_cbranch_scc1": lambda w: bool(w.scc),
    "s_cbranch_vccz": lambda w: w.get64(VCC) == 0,
    "s_cbranch_vccnz": lambda w: w.get64(VCC) != 0,
    "s_cbranch_execz": lambda w: not w.any,
    "s_cbranch_execnz": lambda w: w.any,
}
_NOTHING = ("s_nop", "s_setprio", "s_sleep", "s_sethalt")
_LOADS = {"s_load_dword": 1, **{f"s_load_dwordx{n}": n for n in (2, 4, 8, 16)}}


def _set(form: Form, result: Callable[[Wave], Result], wide: bool = False) -> Run:
    into = form.named(0, False, 2 if wide else 1)

    def run(w: Wave) -> None:
        value, flag = result(w)
        if wide:
            w.set64(into, value)
        else:
            w.set32(into, value)
        if flag is not None:
            w.scc = flag

    return run


def build(form: Form, labels: dict[str, int]) -> Run | None:
    """What a scalar instruction does; None if it is none."""
    op = form.op
    if op in _NOTHING:
        return lambda w: None
    if op in _BRANCHES:
        return _branch(form, labels)
    if op in TWO:
        two, a, b = TWO[op], form.s32(1), form.s32(2)
        return _set(form, lambda w: two(a(w), b(w)))
    if op in ONE:
        one, a = ONE[op], form.s32(1)
        return _set(form, lambda w: one(a(w)))
    if op in TWO64:
        two, a, b = TWO64[op], form.s64(1), form.s64(2)
        return _set(form, lambda w: two(a(w), b(w)), wide=True)
    if op in SHIFT64:
        two, a, b = SHIFT64[op], form.s64(1), form.s32(2)
        return _set(form, lambda w: two(a(w), b(w)), wide=True)
    if op.startswith("s_cmp"):
        return _comparison(form)
    known: dict[str, Callable[[Form], Run]] = {
        "s_endpgm": _end,
        "s_barrier": _barrier,
        "s_waitcnt": _waitcnt,
        "s_mov_b64": _move,
        "s_addc_u32": _add_carry,
        "s_subb_u32": _subtract_borrow,
        "s_movk_i32": _immediate,
        "s_addk_i32": _immediate,
        "s_mulk_i32": _immediate,
        "s_bcnt1_i32_b64": _ones,
        "s_bitcmp0_b32": _bit_compared,
        "s_bitcmp1_b32": _bit_compared,
        "s_bitset0_b32": _bit_set,
        "s_bitset1_b32": _bit_set,
        "s_cselect_b32": _select,
        "s_cselect_b64": _select,
        "s_setreg_imm32_b32": _mode,
        **dict.fromkeys(SAVE, _save),
        **dict.fromkeys(_LOADS, _load),
    }
    return known[op](form) if op in known else None


def _branch(form: Form, labels: dict[str, int]) -> Run:
    test, label = _BRANCHES[form.op], form.operands[0]
    if "vcc" in form.op:
        form.scalar_reads.extend((VCC, VCC + 1))

    def run(w: Wave) -> None:
        w.pc = labels[label] if test(w) else w.pc + 1

    return run


def _end(form: Form) -> Run:
    def run(w: Wave) -> None:
        w.done = True
        w.group.meet()

    return run


def _barrier(form: Form) -> Run:
    """Wait until all waves are here; afterwards a new epoch begins."""

    def run(w: Wave) -> bool:
        if not w.released and not w.at_barrier:
            w.at_barrier, w.waits_for = True, "a barrier"
            w.group.meet()
        if w.released:
            w.released = False
            return False
        return True

    return run


def _waitcnt(form: Form) -> Run:
    found = dict(re.findall(r"(\w+)\((\d+)\)", form.text))
    if not found or set(found) - {"vmcnt", "lgkmcnt"}:
        raise form.unknown()

    def run(w: Wave) -> None:
        if "vmcnt" in found:
            w.retire(w.vector_memory, int(found["vmcnt"]))
        if "lgkmcnt" in found:
            w.retire(w.local, int(found["lgkmcnt"]))

    return run


def _move(form: Form) -> Run:
    a = form.s64(1)
    return _set(form, lambda w: (a(w), None), wide=True)


def _add_carry(form: Form) -> Run:
    a, b = form.s32(1), form.s32(2)

    def add(w: Wave) -> Result:
        total = a(w) + b(w) + w.scc
        return total & MASK32, total >> 32

    return _set(form, add)


def _subtract_borrow(form: Form) -> Run:
    a, b = form.s32(1), form.s32(2)
    return _set(form, lambda w: ((a(w) - b(w) - w.scc) & MASK32, int(b(w) + w.scc > a(w))))


def _immediate(form: Form) -> Run:
    into, value = form.named(0, False, 1), signed(int(form.operands[1], 0) & 0xFFFF, 16) & MASK32
    if form.op == "s_movk_i32":
        return _set(form, lambda w: (value, None))
    form.scalar_reads.append(into)
    change = TWO["s_add_i32" if form.op == "s_addk_i32" else "s_mul_i32"]
    return _set(form, lambda w: change(w.s[into], value))


def _select(form: Form) -> Run:
    wide = form.op.endswith("64")
    read: Callable[[int], Scalar] = form.s64 if wide else form.s32
    a, b = read(1), read(2)
    return _set(form, lambda w: (a(w) if w.scc else b(w), None), wide)


def _ones(form: Form) -> Run:
    a = form.s64(1)
    return _set(form, lambda w: _nonzero(a(w).bit_count()))


def _bit_compared(form: Form) -> Run:
    """SCC: whether the bit is what the name says."""
    a, b, wanted = form.s32(0), form.s32(1), int("bitcmp1" in form.op)

    def run(w: Wave) -> None:
        w.scc = int((a(w) >> (b(w) & 31)) & 1 == wanted)

    return run


def _bit_set(form: Form) -> Run:
    """One bit of the destination; the others stay."""
    into, at = form.scalars(0, 1), form.s32(1)

    def changed(w: Wave) -> Result:
        bit = 1 << (at(w) & 31)
        return (w.s[into] | bit if "bitset1" in form.op else w.s[into] & ~bit), None

    return _set(form, changed)


def _mode(form: Form) -> Run:
    """MODE.FP16_OVFL: conversions to FP8 saturate."""
    if "HW_REG_MODE, 23, 1" not in form.text:
        raise form.unknown()
    value = bool(int(form.operands[-1], 0))

    def run(w: Wave) -> None:
        w.saturate = value

    return run


def _save(form: Form) -> Run:
    join, into, a = SAVE[form.op], form.named(0, False, 2), form.s64(1)

    def run(w: Wave) -> None:
        before = w.get64(EXEC)
        after = join(a(w), before)
        w.set64(into, before)
        w.set64(EXEC, after)
        w.scc = int(after != 0)

    return run


def _comparison(form: Form) -> Run:
    found = re.fullmatch(r"s_cmp(k?)_([a-z]+)_([iu])(32|64)", form.op)
    if found is None:
        raise form.unknown()
    compare, is_signed = _COMPARE[found[2]], found[3] == "i"
    a: Scalar
    b: Scalar
    if found[1]:
        constant = int(form.operands[1], 0) & 0xFFFF
        fixed = signed(constant, 16) & MASK32 if is_signed else constant
        a, b = form.s32(0), lambda w: fixed
    elif found[4] == "64":
        a, b = form.s64(0), form.s64(1)
    else:
        a, b = form.s32(0), form.s32(1)

    def run(w: Wave) -> None:
        x, y = a(w), b(w)
        w.scc = int(compare(signed(x), signed(y)) if is_signed else compare(x, y))

    return run


def _load(form: Form) -> Run:
    count = _LOADS[form.op]
    into, base, offset = form.named(0, False, count), form.scalars(1, 2), form.s32(2)

    def run(w: Wave) -> None:
        address = (w.get64(base) + signed(offset(w))) & ~3
        words = w.group.memory.load(np.array([address], np.uint64), 4 * count).view(np.uint32)[0]

        def arrive() -> None:
            for i, word in enumerate(words):
                w.set32(into + i, int(word))

        for i in range(count):
            w.set32(into + i, w.group.engine.schedule.poison_word)
            w.s_written[into + i] = False
        w.issue(w.local, Access(w, arrive))

    return run
