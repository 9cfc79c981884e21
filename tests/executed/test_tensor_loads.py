"""Registers that tensor memory is loaded into are used only after a wait.

PTX asks for `tcgen05.wait::ld` before the first use. Triton 3.6 puts it there; 3.9 places it for
the order of memory accesses alone and leaves registers to the assembler. So these tests look at the
machine code. A load of tensor memory (LDTM) counts up one of six scoreboards when it is issued and
down when it is done, and an instruction may wait until some of them are 0: bits 46-48 and 52-57 of
its second word. A load without a scoreboard (7) is the first of two, of 16 lanes each, that the
second one speaks for.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from openmla.kernels.blackwell.backward import jobs as backward
from openmla.kernels.blackwell.dense import jobs as dense
from openmla.kernels.blackwell.indexer import jobs as indexer
from openmla.kernels.blackwell.pair import jobs as pair
from openmla.kernels.blackwell.sparse import jobs as sparse
from openmla.lab.compiling.jobs import build
from openmla.lab.compiling.table import jobs_of

LINE = re.compile(
    r"^(\.L\S+):$|/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/"
    r"\s+/\* (0x[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
NO_SCOREBOARD = 7
PAIRS = r"\.64|\.WIDE|^F(ADD|MUL|FMA)2"  # instructions whose operands are pairs of registers


@dataclass(frozen=True)
class Instruction:
    """One line of a listing."""

    address: int
    text: str
    second_word: int

    @property
    def scoreboard(self) -> int:
        """The one that it counts up and, when it is done, down."""
        return self.second_word >> 46 & 7

    def waits_for(self, scoreboard: int) -> bool:
        """Whether it is issued only when a scoreboard is 0."""
        return bool(self.second_word >> 52 >> scoreboard & 1)

    @property
    def name(self) -> str:
        """Without a predicate, with what follows its points."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def registers(self) -> set[int]:
        """All that it names, with those that follow where operands are wider than one."""
        many = re.search(r"\.x(\d+)", self.name)
        wide = 4 if ".128" in self.name else 2 if re.search(PAIRS, self.name) else 1
        width = int(many.group(1)) if many else wide
        address = "".join(re.findall(r"\[.*?\]", self.text))
        data = re.sub(r"\[.*?\]", "", self.text)
        named = {int(first) + i for first in re.findall(r"\bR(\d+)", data) for i in range(width)}
        two = 2 if ".64" in address else 1
        return named | {int(r) + i for r in re.findall(r"\bR(\d+)", address) for i in range(two)}


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel, and where its labels are among them."""

    lines: list[Instruction]
    labels: dict[str, int]

    def after(self, i: int) -> list[int]:
        """Which instructions may follow instruction i."""
        text = self.lines[i].text
        jump = re.search(r"\bBRA\S*.*`\((\S+)\)", text)
        if jump is None:
            return [] if self.lines[i].name.startswith(("EXIT", "RET", "BRX")) else [i + 1]
        always = re.match(r"BRA\S* `", text) is not None
        return [self.labels[jump.group(1)]] + [i + 1] * (not always)


def listing(cubin: bytes, folder: Path) -> str:
    """What nvdisasm prints of a kernel."""
    from triton.backends.nvidia.compiler import get_ptxas

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(get_ptxas(100).path).with_name("nvdisasm")
    run = subprocess.run([tool, "-c", "-hex", path], capture_output=True, text=True, check=True)
    return run.stdout


def code_of(text: str) -> Code:
    """A listing, read."""
    lines: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, address, said, word in LINE.findall(text):
        if label:
            labels[label] = len(lines)
        else:
            lines.append(Instruction(int(address, 16), said.strip(), int(word, 16)))
    return Code(lines, labels)


def tensor_loads(code: Code) -> list[int]:
    """Places of loads of tensor memory."""
    return [i for i, one in enumerate(code.lines) if one.name.startswith("LDTM")]


def read_too_early(code: Code, load: int) -> str:
    """The first instruction found that touches what a load brings before it, or one before it,
    waits for the load; empty if none does."""
    first = code.lines[load]
    todo, seen = [(i, first.scoreboard) for i in code.after(load)], set()
    while todo:
        i, scoreboard = todo.pop()
        if (i, scoreboard) in seen:
            continue
        seen.add((i, scoreboard))
        if i >= len(code.lines):
            return f"{first.text} at {first.address:#x} is waited for by nobody"
        one = code.lines[i]
        if scoreboard == NO_SCOREBOARD and one.name.startswith("LDTM"):
            scoreboard = one.scoreboard
        elif scoreboard != NO_SCOREBOARD and one.waits_for(scoreboard):
            continue
        elif one.registers & first.registers:
            return f"{first.text} at {first.address:#x}, then {one.text}"
        todo += [(j, scoreboard) for j in code.after(i)]
    return ""


NAMES = (
    "backward query_pass 128+64→128",
    "backward key_pass 128+64→128",
    "dense 128+64→128 2Q",
    "dense 128+64→128 1Q",
    "dense 128+64→128 pair",
    "dense 192+64→256",
    "dense 128+64→128 2Q fp8 bf16 rope scales",
    "indexer scores 64 heads",
    "pair 128 heads",
    "sparse 64 heads sink",
    "sparse 64 heads fp8_656",
)
SCOREBOARD_1, NONE, WAIT_1 = 1 << 46, 7 << 46, 1 << 53


@pytest.mark.executed
@pytest.mark.parametrize("name", NAMES)
def test_every_load_is_waited_for_before_its_registers_are_used(name: str, tmp_path: Path) -> None:
    kinds = (backward, dense, indexer, pair, sparse)
    jobs = {job.name: job for of in kinds for job in jobs_of(of.JOBS)}
    job = jobs.get(f"blackwell {name}")
    if job is None:
        pytest.skip("this Triton has no pairs of CTAs")
    code = code_of(listing(build(job).asm["cubin"], tmp_path))
    loads = tensor_loads(code)
    assert len(loads) >= 4
    assert [found for i in loads if (found := read_too_early(code, i))] == []


LOAD = ("LDTM.x32 R4, tmem[UR4]", SCOREBOARD_1)
USE = "FADD R2, R35, R3"


@pytest.mark.parametrize(
    ("lines", "early"),
    [
        ((LOAD, (USE, WAIT_1)), False),
        ((LOAD, ("NOP", WAIT_1), (USE, 0)), False),
        ((LOAD, ("FADD R2, R36, R3", 0), (USE, WAIT_1)), False),
        ((LOAD, (USE, 0), ("NOP", WAIT_1)), True),
        ((LOAD, ("FADD2 R2, R34.F32x2.HI_LO, R40", 0), ("NOP", WAIT_1)), True),
        ((LOAD, ("STG.E.128 desc[UR4][R2.64], R32", 0), ("NOP", WAIT_1)), True),
        ((LOAD, ("LDS.128 R52, [R2+UR4]", 0), ("NOP", WAIT_1)), False),
        ((LOAD, ("@P0 BRA `(.L_1)", 0), (USE, WAIT_1)), False),
        ((LOAD, ("BRA `(.L_1)", 0), (USE, 0)), True),
        ((LOAD, ("BRA.U !UP0, `(.L_1)", 0), ("NOP", WAIT_1), (USE, 0)), False),
        ((LOAD, ("BRA.U !UP0, `(.L_1)", WAIT_1), (USE, 0)), False),
        ((LOAD, ("EXIT", 0), (USE, 0)), False),
        (((LOAD[0], 0), ("LDTM.x32 R64, tmem[UR5]", SCOREBOARD_1), (USE, WAIT_1)), False),
        (((LOAD[0], 0), (USE, WAIT_1)), True),
        ((LOAD,), True),
    ],
)
def test_an_early_use_is_found(lines: tuple[tuple[str, int], ...], early: bool) -> None:
    made = [Instruction(16 * i, t, w | NONE * (not w >> 46 & 7)) for i, (t, w) in enumerate(lines)]
    code = Code(made, {".L_1": 2})
    assert tensor_loads(code)[0] == 0
    assert bool(read_too_early(code, 0)) == early
