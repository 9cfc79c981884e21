"""Fuzzing: chunks of it here, 500 cases by `openmla check`; and failures are kept and replayed."""

import json

import pytest

from openmla.lab.testing.cases import Case, random_case
from openmla.lab.testing.checker import Checker
from openmla.lab.testing.fuzz import Failure, FuzzReport, replay, run_fuzz, save
from openmla.lab.testing.result import Result


@pytest.mark.parametrize(
    "chunk", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))]
)
def test_random_cases_are_accepted(chunk, tmp_path):
    report = run_fuzz(cases=30, seed=1000 + 30 * chunk, save_dir=tmp_path)
    assert report.ok, [(f.message, str(f.shrunk)) for f in report.failures]
    assert (report.cases, report.poisoned, report.guarded) == (30, 3, 3)
    assert report.right == 30 and not report.refused
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_its_total():
    seen = []
    run_fuzz(cases=3, seed=50, progress=lambda done, total, note: seen.append((done, total, note)))
    assert seen[0][:2] == (1, 4) and seen[-1] == (4, 4, "done")


def test_a_report_is_ok_only_if_every_case_is_right_or_refused():
    case = random_case(0)
    right, refused = Result("right", family="cpu"), Result("refused", message="no kernel")

    def report(*results, failures=()):
        counted = FuzzReport(0, "auto", "cpu", asked=2, failures=list(failures))
        for result in results:
            counted.add(case, result)
        return counted

    assert report(right, right).ok and report(right, refused).ok
    assert not report(refused, refused).ok  # nothing ran
    assert not report(right).ok  # one case is missing
    assert not report(right, Result("failed", "accuracy")).ok
    assert not report(right, right, failures=[Failure("guard", case, case, "")]).ok
    assert report(right, refused).to_json()["served"] == {f"{case.call}, cpu": 1}


def test_a_backend_that_serves_nothing_is_counted_not_skipped():
    report = run_fuzz(cases=3, seed=0, backend="cdna4")
    assert report.refused.total() == 3 and report.right == 0 and not report.ok


def broken_run(self, built):
    """3 % off with a sink, correct without: something for the shrinker to find."""
    outcome = built.run(backend=self.backend)
    if built.case.sink != "none":
        outcome.out.mul_(1.03)
    return outcome


def test_a_failure_is_shrunk_saved_and_replayed(monkeypatch, tmp_path):
    monkeypatch.setattr(Checker, "run", broken_run)
    report = run_fuzz(cases=12, seed=0, save_dir=tmp_path)
    assert report.failures and not report.ok
    failure = report.failures[0]
    assert failure.kind == "accuracy" and failure.shrunk.sink != "none"
    assert failure.shrunk.cost < failure.case.cost
    saved = json.loads(failure.path.read_text())
    assert Case.from_json(saved["case"]) == failure.shrunk
    again = replay(failure.path)
    assert again is not None and again.kind == "accuracy"
    monkeypatch.undo()
    assert replay(failure.path) is None


def test_an_exception_is_a_failure(monkeypatch):
    def raises(self, built):
        raise RuntimeError("boom")

    monkeypatch.setattr(Checker, "run", raises)
    report = run_fuzz(cases=2, seed=0)
    assert [f.kind for f in report.failures] == ["error", "error"]
    assert report.failures[0].message == "RuntimeError: boom"


def test_unused_memory_is_part_of_a_replay(monkeypatch, tmp_path):
    case = Case("dense", 1, 4, 0, 4, (2,), (2,), rope="none", spare=1, out="fresh")
    path = save(Failure("poison", case, case, ""), tmp_path)

    def leaky(self, built):
        outcome = built.run()
        outcome.out.add_(built.operands.v[-1, 0, 0] * 0)
        return outcome

    assert replay(path) is None
    monkeypatch.setattr(Checker, "run", leaky)
    assert replay(path).kind == "poison"
