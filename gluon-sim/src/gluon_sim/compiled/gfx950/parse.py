"""From gfx950 assembly to a `Kernel`: arguments, entry state, instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gluon_sim.compiled.core.report import Location, UnknownInstruction
from gluon_sim.compiled.core.source import SourceLines
from gluon_sim.compiled.gfx950 import floats, lds, mfma, scalar, transfers, vector
from gluon_sim.compiled.gfx950.operands import Form, Run, split

_CODE = re.compile(r"(s|v|ds|buffer|global|flat|scratch)_")
_POINTERS = ("dispatch_ptr", "queue_ptr", "kernarg_segment_ptr", "dispatch_id")
_FIRST_ALIGNMENT = 8  # instructions, within which the entry after the preload lies


@dataclass
class Instruction:
    """One instruction and the registers it reads."""

    where: Location
    op: str
    run: Run
    reads: tuple[int, ...] = ()
    scalar_reads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Argument:
    """Where a kernel argument lies among the others."""

    offset: int
    size: int
    kind: str


class Kernel:
    """A parsed kernel. `entry` is its first instruction where arguments are preloaded."""

    def __init__(self, text: str) -> None:
        self.user_registers = _setting(text, "user_sgpr_count")
        found = re.search(r"kernarg_preload_length (\d+)", text)
        self.preloaded = int(found[1]) if found else 0
        self.argument_bytes = _setting(text, "kernarg_size")
        self.pointers = [name for name in _POINTERS if _setting(text, f"user_sgpr_{name}")]
        pattern = r"\.offset:\s+(\d+)\n\s+\.size:\s+(\d+)\n\s+\.value_kind:\s+(\S+)"
        listed = re.findall(pattern, text)
        self.arguments = [Argument(int(a), int(b), kind) for a, b, kind in listed]
        self.labels: dict[str, int] = {}
        self.entry = 0
        self.code: list[Instruction] = []
        pending: list[tuple[str, Location]] = []
        lines = SourceLines(text)
        for number, raw in enumerate(text.split("\n"), 1):
            line = re.sub(r";.*", "", raw).strip()
            label = re.fullmatch(r"([.\w$]+):", line)
            if line.startswith(".section") and pending:
                break
            if label:
                self.labels[label[1]] = len(pending)
            elif line.startswith(".p2align") and 0 < len(pending) < _FIRST_ALIGNMENT:
                self.entry = self.entry or len(pending)
            elif line.startswith("."):
                lines.see(raw)
            elif _CODE.match(line):
                pending.append((line, lines.at(line, number)))
        if not pending:
            raise UnknownInstruction("this text has no kernel")
        self.code = [self.instruction(line, where) for line, where in pending]

    def jumps_back(self) -> list[tuple[int, int]]:
        """Branches to an earlier instruction, and that instruction."""
        branches = [(at, i) for at, i in enumerate(self.code) if "branch" in i.op]
        targets = [(at, self.labels[i.where.text.split()[-1]]) for at, i in branches]
        return [(at, target) for at, target in targets if target <= at]

    def instruction(self, text: str, where: Location) -> Instruction:
        """What a line of the text does."""
        op, rest = [*text.split(None, 1), ""][:2]
        operands, modifiers = split(rest)
        form = Form(text, op, operands, modifiers)
        run = scalar.build(form, self.labels)
        for part in (vector, floats, mfma, lds, transfers):
            run = run or part.build(form)
        if run is None:
            raise form.unknown()
        reads, scalars = tuple(dict.fromkeys(form.reads)), tuple(dict.fromkeys(form.scalar_reads))
        return Instruction(where, op, run, reads, scalars)


def _setting(text: str, name: str) -> int:
    found = re.search(rf"\.amdhsa_{name} (\d+)", text)
    if found is None:
        raise UnknownInstruction(f"assembly without .amdhsa_{name}")
    return int(found[1])
