"""Fragments of K and V are read from few addresses: the rest of every address is an immediate.

The pages of the original say it of its FP8 block: sub-blocks of K and cells of V are constants, so
that a lane keeps one address for each of the two swizzled reads of a K fragment, and one for V.
Here K has two rings, one without rope and one with it.
"""

from __future__ import annotations

import re

import pytest

from executed.cases import CASES
from openmla.dispatch import triton_version
from openmla.lab.testing.executed.prepare import prepare

READ = re.compile(r"\s+(ds_read_\w+) v\[\d+:\d+\], (v\d+)(?: offset:\d+)?(?:\s|$)")


def reads_of(lines: list[str], name: str, after: int = 0) -> dict[int, str]:
    """Line -> register of the address, of all reads of a kind."""
    found = {at: READ.match(line) for at, line in enumerate(lines) if at >= after}
    return {at: m[2] for at, m in found.items() if m is not None and m[1] == name}


def writes(line: str, register: str) -> bool:
    """Whether an instruction's first operand is this register, or a range with it."""
    number = int(register[1:])
    found = re.match(r"\s+v_\w+ v(?:\[(\d+):(\d+)\]|(\d+))", line)
    if found is None:
        return False
    first, last, alone = found.groups()
    return int(first or alone) <= number <= int(last or alone)


def kept(lines: list[str], reads: dict[int, str]) -> bool:
    """Whether no address is computed anew between the first and the last of its reads."""
    for register in set(reads.values()):
        its = [at for at, base in reads.items() if base == register]
        if any(writes(line, register) for line in lines[its[0] : its[-1]]):
            return False
    return True


@pytest.mark.compile
def test_one_address_for_v_and_a_pair_for_each_ring_of_k() -> None:
    if triton_version() < (3, 9):
        pytest.skip("read with Triton 3.9")
    (launch,) = prepare(CASES["mi355x"]["dense fp8"], "mi355x").launches
    lines = launch.compiled.asm["amdgcn"].splitlines()
    loop = next(at for at, line in enumerate(lines) if "v_mfma" in line)
    labels = [at for at, line in enumerate(lines[:loop]) if re.match(r"\.LBB\w+:", line)]
    k = reads_of(lines, "ds_read_b128", after=labels[-1])
    v = reads_of(lines, "ds_read_b64_tr_b8")
    assert len(v) == 32 and len(set(v.values())) == 1  # 2 strips x 4 tiles x 4 reads
    assert len(k) == 24 and len(set(k.values())) == 4  # 4 tiles of keys x 3 fragments x 2 reads
    assert kept(lines, v) and kept(lines, k)
