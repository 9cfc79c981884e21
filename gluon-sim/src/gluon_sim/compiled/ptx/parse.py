"""From PTX text to a `Kernel`: parameters, registers, instructions, and where lanes meet again."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gluon_sim.compiled.core.report import Location, UnknownInstruction
from gluon_sim.compiled.core.source import SourceLines

if TYPE_CHECKING:
    from gluon_sim.compiled.ptx.state import Warp

Run = Callable[["Warp"], object]
"""What an instruction does to a warp; it returns True where the warp must wait and try again."""

# The register file that holds values of a type.
FILES = {
    "b16": "b16",
    "u16": "b16",
    "s16": "b16",
    "f16": "b16",
    "bf16": "b16",
    "b32": "b32",
    "u32": "b32",
    "s32": "b32",
    "f32": "b32",
    "f16x2": "b32",
    "bf16x2": "b32",
    "s16x2": "b32",
    "u16x2": "b32",
    "b64": "b64",
    "u64": "b64",
    "s64": "b64",
    "f64": "b64",
    "f32x2": "b64",
    "pred": "pred",
}
_REGISTERS_OF_AN_SM = 65536
_MOST_REGISTERS = 255


@dataclass
class Instruction:
    """One statement. `guard` is a predicate register that switches it, `target` where it jumps."""

    where: Location
    op: str
    run: Run
    guard: int | None = None
    negated: bool = False
    target: int = -1
    uses: frozenset[int] = frozenset()
    """32-bit registers that it names."""

    @property
    def jumps(self) -> bool:
        """Whether it is a branch with one target."""
        return self.op.startswith("bra")

    @property
    def ends(self) -> bool:
        """Whether it ends the warp."""
        return self.op in ("ret", "exit")


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: `count` is 0 for a number, or the bytes of a tensor map."""

    name: str
    type: str
    count: int


@dataclass
class Names:
    """Registers and labels in scope while the text is read."""

    registers: list[dict[str, tuple[str, int]]] = field(default_factory=lambda: [{}])
    scopes: list[int] = field(default_factory=lambda: [0])
    labels: dict[tuple[int, str], int] = field(default_factory=dict)
    sizes: Counter[str] = field(default_factory=Counter)
    opened: int = 0

    def open(self) -> None:
        """A block in braces begins."""
        self.opened += 1
        self.scopes.append(self.opened)
        self.registers.append({})

    def close(self) -> None:
        """The innermost block ends."""
        self.scopes.pop()
        self.registers.pop()

    def declare(self, kind: str, names: str) -> None:
        """`.reg .b32 %r<7>` declares %r0 to %r6, kept as "%r<"; `.reg .pred p` one register."""
        bank = FILES[kind]
        for name in (n.strip() for n in names.split(",")):
            many = re.match(r"(\S+<)(\d+)>", name)
            self.registers[-1][many[1] if many else name] = (bank, self.sizes[bank])
            self.sizes[bank] += int(many[2]) if many else 1

    def register(self, name: str) -> tuple[str, int] | None:
        """The file and the number of a register."""
        many = re.fullmatch(r"(%?[A-Za-z_$]+)(\d+)", name)
        for scope in reversed(self.registers):
            if name in scope:
                return scope[name]
            if many and f"{many[1]}<" in scope:
                bank, first = scope[f"{many[1]}<"]
                return bank, first + int(many[2])
        return None

    def label(self, name: str, scopes: list[int]) -> int:
        """The instruction that a label names."""
        for scope in reversed(scopes):
            if (scope, name) in self.labels:
                return self.labels[scope, name]
        raise UnknownInstruction(f"label {name}")


class Kernel:
    """A parsed kernel."""

    def __init__(self, text: str) -> None:
        from gluon_sim.compiled.ptx.build import build

        plain = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
        entry = re.search(r"\.entry\s+(\w+)\((.*?)\)(.*?)\{", plain, re.S)
        target = re.search(r"\.target sm_(\d+)", plain)
        if entry is None or target is None:
            raise UnknownInstruction("this text has no kernel")
        self.name, self.sm = entry[1], int(target[1])
        self.parameters = _parameters(entry[2])
        self.threads = _threads(entry[3])
        limit = re.search(r"\.maxnreg (\d+)", entry[3])
        most = int(limit[1]) if limit else _MOST_REGISTERS
        self.registers = min(most, _REGISTERS_OF_AN_SM // self.threads) // 8 * 8
        self.pool = _REGISTERS_OF_AN_SM - self.registers * self.threads
        self.names = Names()
        self.code: list[Instruction] = []
        self.tables: dict[str, list[str]] = {}
        jumps: list[tuple[Instruction, str, list[int]]] = []
        lines = SourceLines(plain)
        last_label = ""
        body = plain[entry.end() :]
        for event, words, line in _events(body, plain[: entry.end()].count("\n") + 1, lines):
            if event == "{":
                self.names.open()
            elif event == "}":
                self.names.close()
            elif event == ":":
                self.names.labels[self.names.scopes[-1], words] = len(self.code)
                last_label = words
            elif words.startswith(".reg"):
                self.names.declare(*words[4:].strip().lstrip(".").split(None, 1))
            elif words.startswith(".branchtargets"):
                names = words.removeprefix(".branchtargets").split(",")
                self.tables[last_label] = [name.strip() for name in names]
            elif words.startswith("."):
                raise UnknownInstruction(words)
            elif words:
                made, jump = build(self, words, lines.at(words, line))
                self.code.append(made)
                if jump:
                    jumps.append((made, jump, list(self.names.scopes)))
        for instruction, label, scopes in jumps:
            instruction.target = self.names.label(label, scopes)
        self.meetings = _meetings(self)

    def jumps_back(self) -> list[tuple[int, int]]:
        """Branches to an earlier instruction, and that instruction."""
        return [(at, i.target) for at, i in enumerate(self.code) if i.jumps and i.target <= at]

    def table(self, label: str) -> list[int]:
        """The targets of a jump table."""
        return [self.names.label(name, [0]) for name in self.tables[label]]


def _parameters(text: str) -> list[Parameter]:
    found = re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,]*?(\w+_param_\d+)(?:\[(\d+)\])?", text
    )
    return [Parameter(name, kind, int(count or 0)) for kind, name, count in found]


def _threads(text: str) -> int:
    found = re.search(r"\.reqntid (\d+)", text)
    if found is None:
        raise UnknownInstruction("a kernel without .reqntid")
    return int(found[1])


def _events(body: str, line: int, lines: SourceLines) -> Iterator[tuple[str, str, int]]:
    """Blocks that open and close, labels and statements, with their lines.

    A brace opens a block where a statement may begin, and a vector of registers inside one.
    """
    words, depth, blocks = "", 0, 0
    for raw in body.split("\n"):
        text = raw.split("//")[0]
        if text.strip().startswith((".loc", ".file", ".pragma")):
            lines.see(raw)
            line += 1
            continue
        for position, char in enumerate(text):
            if char == "{" and not words.strip():
                blocks += 1
                yield "{", "", line
            elif char == "}" and not depth:
                if not blocks:
                    return
                blocks -= 1
                words = ""
                yield "}", "", line
            elif char == ";" and not depth:
                yield ";", words.strip(), line
                words = ""
            elif _ends_label(char, words, text[position + 1 : position + 2], depth):
                yield ":", words.strip(), line
                words = ""
            else:
                depth += (char == "{") - (char == "}")
                words += char
        words += " "
        line += 1


def _ends_label(char: str, words: str, after: str, depth: int) -> bool:
    name = char == ":" and not depth and after != ":"
    return bool(name and re.fullmatch(r"[\w$]+", words.strip()))


def _meetings(kernel: Kernel) -> dict[int, int]:
    """For every conditional branch, the instruction where lanes that part there meet again.

    It is the immediate post-dominator of the branch, which is what ptxas takes as well.
    """
    code = kernel.code
    end = len(code)
    leaders = {0, end}
    for at, instruction in enumerate(code):
        if instruction.jumps or instruction.op == "brx" or instruction.ends:
            leaders |= {at + 1, *_targets(kernel, instruction)}
    starts = sorted(leaders)
    block_of = {start: number for number, start in enumerate(starts)}
    exit_block = len(starts)
    last: dict[int, int] = {}
    after: dict[int, set[int]] = {}
    for number, start in enumerate(starts):
        if start == end:
            after[number] = {exit_block}
            continue
        last[number] = starts[number + 1] - 1
        final = code[last[number]]
        after[number] = {block_of[t] for t in _targets(kernel, final)}
        if final.ends and final.guard is None:
            after[number] = {exit_block}
        elif final.op != "brx" and not (final.jumps and final.guard is None):
            after[number].add(number + 1)
    behind = _post_dominators(after, exit_block)
    meetings = {}
    for number, at in last.items():
        if code[at].jumps and code[at].guard is not None:
            nearest = max(behind[number] - {number}, key=lambda block: len(behind[block]))
            meetings[at] = starts[nearest] if nearest < exit_block else end
    return meetings


def _targets(kernel: Kernel, instruction: Instruction) -> list[int]:
    if instruction.op == "brx":
        return kernel.table(instruction.where.text.rstrip(";").split(",")[-1].strip())
    return [instruction.target] if instruction.jumps else []


def _post_dominators(after: dict[int, set[int]], exit_block: int) -> dict[int, set[int]]:
    everything = set(range(exit_block + 1))
    behind = {block: set(everything) for block in range(exit_block)}
    behind[exit_block] = {exit_block}
    changed = True
    while changed:
        changed = False
        for block in range(exit_block - 1, -1, -1):
            found = set.intersection(*(behind[next_] for next_ in after[block])) | {block}
            if found != behind[block]:
                behind[block], changed = found, True
    return behind
