"""From one statement to an `Instruction`. An instruction that no table knows is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gluon_sim.compiled.core.report import Location
from gluon_sim.compiled.ptx import arithmetic, barriers, convert, lanes, transfers
from gluon_sim.compiled.ptx.operands import Form, split
from gluon_sim.compiled.ptx.parse import Instruction, Run
from gluon_sim.compiled.ptx.state import Warp
from gluon_sim.compiled.ptx.units import tcgen05, wgmma

if TYPE_CHECKING:
    from gluon_sim.compiled.ptx.parse import Kernel

# Hints, and orders that a run of one warp at a time keeps anyway.
_NOTHING = ("membar", "nanosleep", "prefetch", "applypriority", "discard")


def _jump(form: Form) -> Run:
    return lambda w: None  # a warp branches by itself


def _table_jump(form: Form) -> Run:
    choice = form.read(0, "u32")
    kernel, label = form.kernel, form.operands[1]

    def run(w: Warp) -> None:
        w.together("a jump through a table")
        w.pc = kernel.table(label)[w.one(choice(w))]

    return run


def _launches(form: Form) -> Run:
    """griddepcontrol: other launches of the stream."""
    if form.has("wait"):
        return lambda w: w.wait_for_launch_in_front()
    if form.has("launch_dependents"):
        return lambda w: w.let_next_launch_begin()
    raise form.unknown()


_BUILDERS: dict[str, Callable[[Form], Run]] = {
    **arithmetic.BUILDERS,
    **barriers.BUILDERS,
    **lanes.BUILDERS,
    **transfers.BUILDERS,
    "cvt": convert.cvt,
    "wgmma": wgmma.wgmma,
    "tcgen05": tcgen05.tcgen05,
    "bra": _jump,
    "brx": _table_jump,
    "griddepcontrol": _launches,
    **dict.fromkeys(_NOTHING, _jump),
}


def build(kernel: Kernel, text: str, where: Location) -> tuple[Instruction, str]:
    """The instruction, and the label it jumps to, if any."""
    guard = re.match(r"@(!?)(\S+)\s+(.*)", text, re.S)
    words = guard[3] if guard else text
    op, rest = [*words.split(None, 1), ""][:2]
    parts = tuple(op.split("."))
    form = Form(kernel, op, parts, tuple(split(rest)))
    if parts[0] not in _BUILDERS:
        raise form.unknown()
    made = Instruction(where, op if parts[0] != "brx" else "brx", _BUILDERS[parts[0]](form))
    if guard:
        made.guard, made.negated = form.register(guard[2]), bool(guard[1])
    names = (kernel.names.register(name) for name in re.findall(r"%r\d+", text))
    made.uses = frozenset(found[1] for found in names if found)
    return made, form.operands[0] if parts[0] == "bra" else ""
