"""Every "measured" names a result file of that chip, and a kernel that exists."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from openmla.planning import evidence
from openmla.planning.evidence import FOLLOWS, MEASURED, meaning_of, word_of
from openmla.planning.registry import FAMILIES, family_named

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_examples() -> None:
    assert doctest.testmod(evidence).failed == 0


@pytest.mark.parametrize("claim", MEASURED, ids="-".join)
def test_a_claim_has_its_file(claim: tuple[str, str, str]) -> None:
    family, kernel, target = claim
    assert family_named(family).kernel_named(kernel)
    record = json.loads((RESULTS / MEASURED[claim]).read_text())
    given = record.get("provenance", record)
    assert target in given.get("gpu", given.get("chip", "")).lower()


def test_designs_are_those_of_kernels_that_exist() -> None:
    assert all(family_named(family).kernel_named(kernel) for family, kernel in FOLLOWS)


def test_no_chip_but_the_h200_and_the_cpu_was_at_hand() -> None:
    own = [f for f in FAMILIES if f.name in ("blackwell", "cdna4")]
    words = {word_of(f.name, k.name, "b200") for f in own for k in f.kernels}
    assert words == {"simulated"}
    assert meaning_of("hopper", "dense", "h100").startswith("never run on this chip; measured on")
