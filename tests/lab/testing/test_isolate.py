"""Child processes: what ends one of them is one failure, named and counted; the rest goes on."""

import os
import time
from pathlib import Path

import pytest
import torch

from openmla.errors import Unsupported
from openmla.lab.testing.cases import Case, random_case
from openmla.lab.testing.fuzz import FuzzReport, run_fuzz
from openmla.lab.testing.isolate import Child, Death

SEED = 601
CASE = Case("dense", 1, 8, 4, 8)


# Implementations that children are asked to run; the seed says which case is meant.


def aborts_at_603(built):
    """As an illegal access that the driver answers with the end of the process."""
    if built.case.seed == 603:
        os.abort()
    return built.run()


def hangs_at_602(built):
    """As a kernel that waits for a signal that never comes."""
    if built.case.seed == 602:
        time.sleep(60)
    return built.run()


def wrong_at_604(built):
    """A wrong result, and chatter where the answers go."""
    print("compiling …")
    outcome = built.run()
    if built.case.seed == 604:
        outcome.out.add_(1)
    return outcome


def aborts_second(built):
    """Dies of what an earlier case left behind: alone, every case is right."""
    if os.environ.get("OPENMLA_TEST_SEEN"):
        os.abort()
    os.environ["OPENMLA_TEST_SEEN"] = "1"
    return built.run()


def refuses_602(built):
    """One refusal among right results."""
    if built.case.seed == 602:
        raise Unsupported("no kernel for d_v 24", nearest="d_v 32")
    return built.run()


def always_wrong(built):
    """Nothing but failures."""
    outcome = built.run()
    outcome.out.add_(1)
    return outcome


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children find this file by its name."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


def fuzz(function: str, **options) -> FuzzReport:
    return run_fuzz(
        cases=5, seed=SEED, jobs=1, implementation=f"test_isolate:{function}", **options
    )


def test_a_crash_is_one_failure_and_the_rest_goes_on(tmp_path):
    report = fuzz("aborts_at_603", save_dir=tmp_path)
    assert (report.cases, report.right, len(report.failures)) == (5, 4, 1) and not report.ok
    failure = report.failures[0]
    assert (failure.kind, failure.case) == ("crash", random_case(603))
    assert failure.shrunk == failure.case and "SIGABRT" in failure.message
    assert "not reproduced" not in failure.message
    assert [p.name for p in tmp_path.iterdir()] == [f"crash-{failure.case.form}-seed603.json"]


def test_a_hang_is_one_failure_and_the_rest_goes_on():
    # The other cases take milliseconds, but on a busy machine who knows.
    report = fuzz("hangs_at_602", seconds_per_case=8.0)
    assert (report.cases, report.right) == (5, 4)
    assert [(f.kind, f.case.seed) for f in report.failures] == [("hang", 602)]
    assert report.failures[0].message == "no answer within 8 s"


def test_a_wrong_result_in_a_child_is_shrunk_there():
    report = fuzz("wrong_at_604")
    assert (report.cases, report.right) == (5, 4)
    (failure,) = report.failures
    assert (failure.kind, failure.case.seed) == ("accuracy", 604)
    assert failure.shrunk.cost < failure.case.cost


def test_a_crash_that_does_not_come_again_alone_is_a_failure_all_the_same():
    report = fuzz("aborts_second")
    assert report.failures and not report.ok
    message = report.failures[0].message
    assert f"not reproduced alone (seeds before it in that process: {SEED})" in message


def test_every_case_is_counted_once():
    report = run_fuzz(cases=6, seed=600, jobs=2, implementation="test_isolate:refuses_602")
    assert report.ok and (report.cases, report.right) == (6, 5)
    assert report.refused == {"no kernel for d_v #": 1}
    assert sum(report.served.values()) == 5 and {f for _, f in report.served} == {"cpu"}
    assert (report.poisoned, report.guarded) == (1, 1)  # seed 600
    record = report.to_json()
    assert record["ok"] and record["right"] == 5 and sum(record["served"].values()) == 5


def test_a_run_stops_after_too_many_failures():
    report = fuzz("always_wrong", max_failures=2)
    assert len(report.failures) == 2 and report.cases < report.asked == 5 and not report.ok


def test_a_fatal_answer_ends_the_child():
    child = Child("test_isolate:answers_fatal", {})
    with pytest.raises(Death, match="the context is gone"):
        child.ask(CASE)
    assert child.ask_or_blame(CASE) == {
        "status": "failed",
        "kind": "crash",
        "message": "the context is gone",
    }


def answers_fatal(case, options):
    """As a check whose CUDA context an illegal access has spoiled."""
    return {"status": "failed", "kind": "error", "message": "the context is gone", "fatal": True}


def test_children_start_with_torch_as_it_is():
    torch.set_default_dtype(torch.bfloat16)
    try:
        child = Child("test_isolate:tells_dtype", {})
        assert child.ask(CASE)["message"] == "torch.float32"
    finally:
        torch.set_default_dtype(torch.float32)
        child.end()


def tells_dtype(case, options):
    """What a fresh process has."""
    return {"status": "right", "kind": "", "message": str(torch.get_default_dtype())}
