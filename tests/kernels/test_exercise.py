"""The report of what tests exercise: complete for a small kernel, and reasons that still hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from defects.drawing.kernels import KERNELS, ROOT, Kernel, Suite
from gluon_sim import Gap
from gluon_sim.report.gaps import DOES_NOT_TURN, NEVER_BLOCKS, NEVER_RUNS, NEVER_TRUE
from gluon_sim.report.sites import device_functions, source_of
from kernels import exercise, unexercised
from kernels.unexercised import UNEXERCISED, Unexercised, reason

# The kernel and its runs are those of the simulator's own tests: one wait never blocks, and with
# two steps its ring of two stages turns once.
TOY = ROOT / "gluon-sim" / "tests" / "toys" / "exercised.py"
TOY_TEST = """
import sys
sys.path.insert(0, {tests!r})

import pytest
import torch
from gluon_sim import simulate
from toys.exercised import added_up


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", {steps})
def test_added_up(steps, seed):
    out = torch.zeros(128, dtype=torch.int32)
    simulate(added_up, 1, (out, steps, 2, False), seed=seed).raise_if_bad()
"""
FREE = "mbarrier.wait(bars.free.index(stage), i // STAGES & 1 ^ 1)"
ALWAYS = {
    ("never", "", NEVER_RUNS),
    ("write", "NEGATIVE", NEVER_TRUE),
    ("await_slot", "mbarrier.wait(barrier, phase) of done", NEVER_BLOCKS),
}
FEW_STEPS = {
    ("write", FREE, NEVER_BLOCKS),
    ("read", "i > 4", NEVER_TRUE),
    ("added_up", "ring", DOES_NOT_TURN),
    ("added_up", "bars.ready", DOES_NOT_TURN),
    ("added_up", "bars.free", DOES_NOT_TURN),
}
MANY_STEPS = {("read", "i > 100", NEVER_TRUE)}


@dataclass
class Toy:
    """A kernel of the report with tests of its own."""

    kernel: Kernel
    folder: Path

    def arguments(self, *more: str) -> list[str]:
        """Arguments of the command."""
        return ["--kernel", self.kernel.name, "--json", str(self.folder / "gaps.json"), *more]

    def gaps(self) -> set[tuple[str, str, str]]:
        """What the command wrote."""
        [told] = json.loads((self.folder / "gaps.json").read_text())
        return {(gap["function"], gap["text"], gap["what"]) for gap in told["gaps"]}


def toy(steps: tuple[int, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """The command knows the toy kernel, which runs with some numbers of steps."""
    test = folder / "test_toy.py"
    test.write_text(TOY_TEST.format(tests=str(TOY.parents[1]), steps=steps))
    kernel = Kernel("toy", (str(TOY),), (Suite(str(test)),))
    monkeypatch.setattr(exercise, "SIMULATED", {"toy": kernel})
    monkeypatch.setattr(exercise, "files_of", lambda _: [str(TOY)])
    return Toy(kernel, folder)


def test_a_wait_that_never_blocks_and_a_ring_that_turns_once_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = toy((2,), tmp_path, monkeypatch)
    report = tmp_path / "exercised.md"
    assert exercise.main(known.arguments("--markdown", str(report))) == exercise.MISSING
    assert known.gaps() == ALWAYS | FEW_STEPS
    said = capsys.readouterr().out
    assert f"write: {FREE} {NEVER_BLOCKS}" in said
    assert f"added_up: bars.free {DOES_NOT_TURN}" in said
    assert "| `bars.free` | exercised.py:" in report.read_text()


@pytest.mark.long
def test_reasons_fill_the_gaps_of_more_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = toy((2, 7), tmp_path, monkeypatch)
    listed = tuple(Unexercised("toy", *gap, "It is a toy.") for gap in ALWAYS | MANY_STEPS)
    monkeypatch.setattr(exercise, "reason", lambda name, gap: reason(name, gap, listed))
    assert exercise.main(known.arguments()) == 0
    assert known.gaps() == ALWAYS | MANY_STEPS


@pytest.mark.long
def test_tests_that_fail_show_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = toy((), tmp_path, monkeypatch)
    (tmp_path / "test_toy.py").write_text("def test_added_up():\n    assert False\n")
    assert exercise.main(known.arguments()) == exercise.FAILED


def test_every_gluon_kernel_is_there() -> None:
    assert set(exercise.SIMULATED) == {
        name for name in KERNELS if name.split(".")[0] not in ("portable", "planning", "host")
    }
    assert all(Path(file).is_file() for file in exercise.shared_files())


def test_reasons_name_what_is_in_the_source() -> None:
    kernels = exercise.SIMULATED
    files = [file for kernel in kernels.values() for file in exercise.files_of(kernel)]
    files += exercise.shared_files()
    for each in UNEXERCISED:
        assert each.reason.endswith(".") and each.kernel in {*kernels, exercise.SHARED}
        places = [file for file in files if each.function in device_functions(Path(file))]
        assert places, f"{each.kernel} has no {each.function}"
        if each.text and each.what != DOES_NOT_TURN:
            texts = {
                site.text
                for file in places
                for site in (*source_of(file).branches, *source_of(file).waits)
                if site.function == each.function
            }
            assert any(each.text.startswith(text) for text in texts), each


def test_a_reason_is_for_one_kernel_and_one_gap() -> None:
    gap = Gap("kernel.py", 3, "write", FREE, NEVER_BLOCKS)
    known = (Unexercised("toy", "write", FREE, NEVER_BLOCKS, "Nobody waits."),)
    assert unexercised.reason("toy", gap, known) == "Nobody waits."
    assert unexercised.reason("other", gap, known) == ""
    assert unexercised.reason("toy", Gap("kernel.py", 3, "read", FREE, NEVER_BLOCKS), known) == ""
