"""Which defects a kernel can have, and the drawing of some of them.

Everything is sorted, and the random numbers come from the seed and the names alone: a seed draws
the same defects on every machine.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from defects.drawing.addresses import address_changes
from defects.drawing.arithmetic import arithmetic_changes
from defects.drawing.host import host_changes
from defects.drawing.kernels import Kernel
from defects.drawing.reach import reached, uses
from defects.drawing.source import Edit, Source, is_device
from defects.drawing.synchronization import synchronization_changes

CLASSES = ("synchronization", "arithmetic", "addresses", "host")
Candidates = Mapping[str, Sequence[Edit]]


@cache
def parameters(package: Path) -> frozenset[str]:
    """The names of all parameters of device functions of the package."""
    found: set[str] = set()
    for path in sorted((package / "kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and is_device(node):
                found |= {argument.arg for argument in node.args.args}
    return frozenset(found)


def changes(source: Source, required: frozenset[str]) -> Iterator[Edit]:
    """All changes of a file; what two classes could do belongs to the first."""
    yield from synchronization_changes(source)
    yield from address_changes(source)
    yield from arithmetic_changes(source)
    yield from host_changes(source, required)


@cache
def of_file(package: Path, file: str) -> tuple[Edit, ...]:
    """The changes of one file, each once, in the order of the text."""
    found: dict[tuple[int, int, str], Edit] = {}
    source = Source(file, (package / file).read_bytes())
    for edit in changes(source, parameters(package)):
        if edit.old != edit.new:
            found.setdefault((edit.start, edit.stop, edit.new), edit)
    return tuple(found[key] for key in sorted(found))


def candidates(kernel: Kernel, package: Path) -> Candidates:
    """The defects that a kernel can have, by class."""
    own = kernel.files(package)
    edits = [edit for file in own for edit in of_file(package, file)]
    names = reached(package, own, kernel.shared)
    for file in sorted(kernel.shared):
        edits += [edit for edit in of_file(package, file) if uses(edit, names)]
    return {group: [edit for edit in edits if edit.group == group] for group in CLASSES}


def different(edit: Edit, package: Path) -> bool:
    """Whether the changed file is still Python, and another program than before."""
    data = (package / edit.file).read_bytes()
    try:
        changed = ast.parse(edit.apply(data))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(data))


def draw(
    kernel: Kernel,
    package: Path,
    count: int,
    seed: int,
    group: str = "all",
    files: Sequence[str] = (),
) -> list[Edit]:
    """So many defects of a kernel: evenly by class and, inside a class, by operator. With `files`
    from those files and folders of it alone."""
    found = {
        each: [edit for edit in edits if not files or within(edit.file, files)]
        for each, edits in candidates(kernel, package).items()
    }
    groups = [g for g in CLASSES if found[g] and group in (g, "all")]
    drawn: list[Edit] = []
    for i, each in enumerate(groups):
        share = count // len(groups) + (i < count % len(groups))
        rng = random.Random(f"{seed} {kernel.name} {each}")
        order = mixed(found[each], rng)
        while share and (edit := next(order, None)):
            if different(edit, package):
                drawn.append(edit)
                share -= 1
    return drawn


def within(file: str, places: Sequence[str]) -> bool:
    """Whether a file is one of these, or below one of these folders."""
    return any(file == place or file.startswith(f"{place.rstrip('/')}/") for place in places)


def mixed(edits: Sequence[Edit], rng: random.Random) -> Iterator[Edit]:
    """The edits in random order, one of every operator in turn."""
    piles: dict[str, list[Edit]] = {}
    for edit in edits:
        piles.setdefault(edit.operator, []).append(edit)
    names = sorted(piles)
    rng.shuffle(names)
    for name in names:
        rng.shuffle(piles[name])
    while any(piles.values()):
        for name in names:
            if piles[name]:
                yield piles[name].pop()
