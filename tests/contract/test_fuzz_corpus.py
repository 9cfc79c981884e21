"""Every bug that fuzzing ever found, again: tests/corpus/*.json."""

from pathlib import Path

import pytest

from openmla.lab.testing.fuzz import load, replay
from openmla.lab.testing.isolate import run_guarded

CORPUS = sorted((Path(__file__).parents[1] / "corpus").glob("*.json"))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_a_bug_of_the_past_stays_fixed(path):
    failure = replay(path, guards=False)
    assert failure is None, failure.message


def test_the_corpus_stays_inside_its_tensors():
    assert [(c, problem) for c, problem in run_guarded([load(p) for p in CORPUS]) if problem] == []


def test_there_is_a_corpus():
    assert CORPUS
