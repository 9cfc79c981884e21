"""The drawing of defects: operators make other programs, draws repeat, verdicts are right."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from defects import draw as command
from defects.drawing import judge as judging
from defects.drawing.candidates import CLASSES, candidates, different, draw, of_file
from defects.drawing.expressions import rounding
from defects.drawing.judge import (
    NOT_EXECUTED,
    CampaignError,
    Limits,
    Repository,
    Verdict,
    control,
    lines_of,
)
from defects.drawing.kernels import FAMILIES, KERNELS, ROOT, Kernel, Suite, family
from defects.drawing.selection import counts, wanted
from defects.drawing.source import Edit, Source
from defects.harmless import ALWAYS, HARMLESS, Harmless, reason

PACKAGE = ROOT / "src" / "openmla"
LEAST = 30
FEWER = {("gluon.dequantize", "synchronization")}
"""Kernels that order little: one launch waits for the one before."""
OF_EACH = 6
"""Changes of each operator that are made."""
TOY = '''"""A module of 2 + 2 numbers."""

FACTOR = 3


def total(numbers: list[int], start: int = 3) -> int:
    """The sum of at most 4 numbers: 1 + 1."""
    if len(numbers) > 4:
        raise ValueError("more than" + " 4")
    result = 0
    for number in numbers[:9]:
        result = result + number  # not result - number
    return result


def scaled(number: int) -> int:
    return number * FACTOR


def forgotten(number: int) -> int:
    return number + FACTOR


def explain(numbers: list[int]) -> str:
    return "sum" * (len(numbers) + 1)
'''
TOY_TEST = """
import subprocess
import sys

from toy.sums import total


def test_total():
    assert total([1, 2]) == 3


def test_empty():
    assert total([]) == 0


def test_in_another_process():
    text = "from toy.sums import scaled; assert scaled(2) == 6"
    subprocess.run([sys.executable, "-c", text], check=True)


def test_no_defect_counts():
    assert False
"""
FORKED_TEST = """
import multiprocessing

from toy.sums import scaled


def test_in_a_fork():
    process = multiprocessing.get_context("forkserver").Process(target=scaled, args=(2,))
    process.start()
    process.join()
"""
TOY_KERNEL = Kernel("toy", ("sums.py",), (Suite("tests/test_sums.py"),))


@pytest.fixture
def toy(tmp_path: Path) -> Repository:
    """A repository with one module and one test."""
    for folder in ("src/toy", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/toy/__init__.py").write_text("")
    (tmp_path / "src/toy/sums.py").write_text(TOY)
    (tmp_path / "tests/test_sums.py").write_text(TOY_TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return Repository(tmp_path, "toy", (str(ROOT / "tests"),), imported=("pytest",))


def everything() -> list[Edit]:
    """The changes of all kernels, each once."""
    files = {
        file for kernel in KERNELS.values() for file in (*kernel.files(PACKAGE), *kernel.shared)
    }
    return [edit for file in sorted(files) for edit in of_file(PACKAGE, file)]


def test_every_operator_makes_another_program() -> None:
    edits = everything()
    random.Random(0).shuffle(edits)
    made: Counter[tuple[str, str]] = Counter()
    for edit in edits:
        made[edit.group, edit.operator] += 1
        if made[edit.group, edit.operator] <= OF_EACH:
            assert different(edit, PACKAGE), edit
    assert {group for group, _ in made} == set(CLASSES)


def test_texts_are_left_alone() -> None:
    for file in sorted({edit.file for edit in everything()}):
        source = Source(file, (PACKAGE / file).read_bytes())
        texts = [
            source.span(node)
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ]
        for edit in of_file(PACKAGE, file):
            assert not any(first <= edit.start < last for first, last in texts), edit


@pytest.mark.parametrize("name", KERNELS)
def test_there_are_enough(name: str) -> None:
    found = candidates(KERNELS[name], PACKAGE)
    few = {(name, group) for group, edits in found.items() if 0 < len(edits) < LEAST}
    assert few == {pair for pair in FEWER if pair[0] == name}
    assert any(found.values())
    assert [t.path for t in KERNELS[name].tests if not (ROOT / t.path).exists()] == []


def test_what_a_kernel_does_not_use_is_not_drawn() -> None:
    drawn = {
        edit.function
        for edits in candidates(KERNELS["hopper.few"], PACKAGE).values()
        for edit in edits
        if edit.file.startswith("kernels/gluon/")
    }
    assert "barriers" in drawn and "barrier_pair" not in drawn


def test_a_function_of_the_same_name_is_another() -> None:
    """The sparse kernel of Blackwell has a `dequantize` of its own."""
    drawn = {
        edit.file
        for edits in candidates(KERNELS["blackwell.sparse"], PACKAGE).values()
        for edit in edits
        if edit.function == "dequantize"
    }
    assert drawn == {"kernels/blackwell/sparse/rows_fp8.py"}


def test_quotients_of_kernels_are_rounded_up_as_triton_divides() -> None:
    """Toward zero: -(-a // b) would be the same program."""
    text = "def host(a):\n    return a // 4\n\n\n@gluon.jit\ndef kernel(a):\n    return a // 4\n"
    source = Source("x.py", text.encode())
    made = [
        edit.becomes
        for device in (False, True)
        for node in source.of(ast.BinOp, device=device)
        for edit in rounding(source, node, "host")
    ]
    assert made == ["return (-(-(a) // (4)))", "return (((a) + (4) - 1) // (4))"]


def test_a_seed_draws_the_same_again() -> None:
    kernel = KERNELS["hopper.few"]
    first = draw(kernel, PACKAGE, 9, 5)
    assert first == draw(kernel, PACKAGE, 9, 5) != draw(kernel, PACKAGE, 9, 6)
    assert Counter(edit.group for edit in first) == {
        "synchronization": 3,
        "arithmetic": 2,
        "addresses": 2,
        "host": 2,
    }
    assert {edit.group for edit in draw(kernel, PACKAGE, 4, 5, "addresses")} == {"addresses"}


def test_files_narrow_a_draw() -> None:
    kernel, folder = KERNELS["hopper.latent"], "kernels/gluon/ranges"
    files = {edit.file for edit in draw(kernel, PACKAGE, 12, 5, files=(folder,))}
    assert files and all(file.startswith(f"{folder}/") for file in files)
    source = "kernels/hopper/latent/source.py"
    assert {edit.file for edit in draw(kernel, PACKAGE, 8, 5, files=(source,))} == {source}


def test_every_kernel_can_be_drawn_from() -> None:
    """A kernel that the table does not know has no draw, and no report of what cases exercise."""
    known = {file for kernel in KERNELS.values() for file in kernel.files(PACKAGE)}
    known |= {file for kernel in KERNELS.values() for file in kernel.shared}
    on_a_gpu = [path for path in (PACKAGE / "kernels").rglob("*.py") if "cpu" not in path.parts]
    device = {
        path.relative_to(PACKAGE).as_posix()
        for path in on_a_gpu
        if path.name in ("launch.py", "plan.py") or ".jit" in path.read_text()
    }
    assert device - known == {"kernels/launch.py"}


def test_what_is_known_to_be_harmless_is_still_there() -> None:
    known = [
        each
        for each in HARMLESS
        if not any(each.covers(edit) for edit in of_file(PACKAGE, each.file))
    ]
    assert known == []
    assert all(each.reason.endswith(".") for each in HARMLESS)


def test_a_harmless_change_is_told_by_its_statement() -> None:
    edit = draw(KERNELS["hopper.few"], PACKAGE, 1, 0)[0]
    same = Harmless(
        edit.file, edit.function, edit.statement, edit.becomes, "Nobody looks.", edit.place
    )
    assert reason(edit, (same,)) == "Nobody looks."
    assert reason(edit, ()) == ""


def test_only_tests_that_can_tell_count() -> None:
    seeded, kernel = Path("tests/kernels/x/test_defects.py"), Path("tests/kernels/x/test_kernel.py")
    assert not counts(seeded, Path(), "test_defect_is_found[a]")
    assert counts(seeded, Path(), "test_the_kernel_itself_is_clean_and_right[a]")
    assert not counts(kernel, Path(), "test_interpreted[defects-0]")
    assert not counts(kernel, Path(), "test_compiles_as_planned[a]")
    assert not counts(Path("tests/repository/test_house_rules.py"), Path(), "test_x")
    assert counts(kernel, Path(), "test_right")
    assert wanted(kernel, Path(), "test_right[a]", {"tests/kernels": ["[a"]})
    assert not wanted(kernel, Path(), "test_right[b]", {"tests/kernels": ["[a"]})


def test_tests_that_execute_a_line_come_before_those_that_were_collected_with_it() -> None:
    """Launchers run when jobs are collected; the quickest tests have nothing to do with that."""
    quick, slow, own = (
        judging.Test(f"{name}.py::test", seconds, lines)
        for name, seconds, lines in (
            ("quick", 0.1, {}),
            ("slow", 9.0, {"launch.py": [3]}),
            ("own", 1.0, {"launch.py": [4]}),
        )
    )
    clean = judging.Control((quick, slow, own), {"launch.py": [3, 4]}, (), 0.0)
    assert clean.executing("launch.py", range(3, 4)) == [slow, quick, own]
    assert clean.executing("launch.py", range(9, 10)) == []


def change_of(repository: Repository, becomes: str) -> Edit:
    """The change of the toy that makes this statement."""
    return next(e for e in of_file(repository.source, "sums.py") if e.becomes == becomes)


@pytest.mark.parametrize(
    ("operator", "old", "known"),
    [
        ("twice", "tma.store_wait(0)", True),
        ("twice", "thread_barrier()", True),
        ("twice", "mbarrier.wait(bar, 0)", False),
        ("twice", "mbarrier.arrive(bar, count=1)", False),
        ("dropped", "thread_barrier()", False),
        ("entry dropped", '"num_warps": 4, ', True),
        ("entry dropped", '"num_warps": 8', False),
    ],
)
def test_what_never_matters_is_told_by_the_change(operator: str, old: str, known: bool) -> None:
    edit = Edit("a.py", 0, 1, "", operator, "host", 1, "f", old, old, "", 1)
    assert bool(reason(edit)) == known
    assert all(each.reason.endswith(".") for each in ALWAYS)


def test_a_part_of_a_statement_tells_a_harmless_change(toy: Repository) -> None:
    edit = change_of(toy, "result = result - number")

    def part(statement: str, becomes: str) -> Harmless:
        return Harmless("sums.py", "total", statement, becomes, "Nobody looks.")

    assert reason(edit, (part("result + number", "result - number"),)) == "Nobody looks."
    assert reason(edit, (part("result + number", "number"),)) == ""
    assert reason(edit, (part("result", "result"),)) == ""


def test_found_and_alive(toy: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = change_of(toy, "result = result - number")
    equal = change_of(toy, "for number in numbers[:10]:")
    kept: list[command.Judged] = []
    results = command.campaign(TOY_KERNEL, [wrong, equal], toy, Limits(60), 2, kept.append)
    found, alive = results
    assert (found.verdict, found.by) == ("found", "tests/test_sums.py::test_total")
    assert alive.verdict == "lives"
    told = capsys.readouterr().out
    assert "2 of 2" in told
    assert command.described(equal) in told and command.described(wrong) not in told
    assert sorted(map(str, kept)) == sorted(map(str, results))
    assert "| toy | host | 2 | 1 | 50% | 1 | 0 |" in command.table([found, alive])
    assert (toy.source / "sums.py").read_text() == TOY


@pytest.mark.long
def test_a_test_judges_the_statements_that_it_executes(toy: Repository) -> None:
    clean = control(toy, TOY_KERNEL, Limits(60), 2)

    def judging(becomes: str) -> set[str]:
        lines = lines_of(change_of(toy, becomes), toy.source)
        return {test.name.partition("::")[2] for test in clean.executing("sums.py", lines)}

    every = {"test_total", "test_empty", "test_in_another_process"}
    assert judging("FACTOR = 4") == every
    assert judging("for number in numbers[:10]:") == {"test_total", "test_empty"}
    assert judging("result = result - number") == {"test_total"}
    assert judging("return (number)") == {"test_in_another_process"}


@pytest.mark.long
def test_forks_of_other_processes_are_recorded_too(toy: Repository) -> None:
    """As ranks are; they end without what Python does at its exit."""
    (toy.root / "tests/test_sums.py").write_text(FORKED_TEST)
    clean = control(toy, TOY_KERNEL, Limits(60))
    lines = lines_of(change_of(toy, "return (number)"), toy.source)
    assert [test.name for test in clean.executing("sums.py", lines)] == [
        "tests/test_sums.py::test_in_a_fork"
    ]


@pytest.mark.long
def test_only_chosen_tests_judge(toy: Repository) -> None:
    """The others of the same file do not, nor do those that `make test` leaves out."""
    late = "\n\n@pytest.mark.long\ndef test_late():\n    test_total()\n"
    (toy.root / "tests/test_sums.py").write_text("import pytest\n" + TOY_TEST + late)
    (toy.root / "pytest.ini").write_text("[pytest]\nmarkers = long\n")
    wrong = change_of(toy, "result = result - number")
    clean = control(toy, TOY_KERNEL, Limits(60))
    assert len(clean.collected) == 4 and len(clean.tests) == 3
    [empty] = [test for test in clean.tests if "empty" in test.name]
    chosen = replace(empty, lines={"sums.py": [*lines_of(wrong, toy.source)]})
    judge = judging.Judge(toy, TOY_KERNEL, replace(clean, tests=(chosen,)))
    try:
        assert not judge.judge(wrong, Limits(60)).found
    finally:
        judge.close()


def test_what_no_test_executes_is_said(toy: Repository) -> None:
    [alive] = command.campaign(
        TOY_KERNEL, [change_of(toy, "return number - FACTOR")], toy, Limits(60), 1
    )
    assert (alive.verdict, alive.by) == ("lives", NOT_EXECUTED)


@pytest.mark.long
def test_a_change_that_does_not_end_is_found(
    toy: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "LEAST_SECONDS", 1)
    statement = b"result = result + number"
    start = (toy.source / "sums.py").read_bytes().index(statement)
    edit = change_of(toy, "result = result - number")
    endless = replace(edit, start=start, stop=start + len(statement), new="while True: pass")
    [hangs] = command.campaign(TOY_KERNEL, [endless], toy, Limits(60), 1)
    assert (hangs.verdict, hangs.by) == ("found", "tests/test_sums.py::test_total, which hangs")


@pytest.mark.long
def test_a_run_that_is_cut_off_keeps_its_verdicts(
    toy: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "verdicts.json"
    edits = [
        change_of(toy, "result = result - number"),
        change_of(toy, "for number in numbers[:10]:"),
    ]

    second = edits[1]

    def judged_until_the_second(judge: Any, edit: Edit, limits: Limits) -> Verdict:
        if edit == second:
            raise KeyboardInterrupt
        return Verdict(True, "test_total", 1.0)

    monkeypatch.setattr(command.Judge, "judge", judged_until_the_second)
    monkeypatch.setattr(command, "Repository", lambda: toy)
    monkeypatch.setattr(command, "KERNELS", {"toy": TOY_KERNEL})
    monkeypatch.setattr(command, "draw", lambda *given: edits)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--kernel", "toy", "--json", str(file)])
    kept = json.loads(file.read_text())
    assert [each["by"] for each in kept["mutants"]] == ["test_total"]
    assert not list(tmp_path.glob("*.part"))
    edits.reverse()  # the next run is cut off before it comes to what is known
    with pytest.raises(KeyboardInterrupt):
        command.main(["--kernel", "toy", "--json", str(file)])
    assert json.loads(file.read_text())["mutants"] == kept["mutants"]


@pytest.mark.long
def test_what_was_found_before_is_not_run_again(
    toy: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One test in three finds nothing; all of them do, and then none is needed."""
    file = tmp_path / "verdicts.json"
    edits = [change_of(toy, "return (number)")]
    monkeypatch.setattr(command, "Repository", lambda: toy)
    monkeypatch.setattr(command, "KERNELS", {"toy": TOY_KERNEL})
    monkeypatch.setattr(command, "draw", lambda *given: edits)

    def verdict(*more: str) -> tuple[str, str]:
        assert command.main(["--kernel", "toy", "--json", str(file), *more]) == 0
        [kept] = json.loads(file.read_text())["mutants"]
        return kept["verdict"], kept["by"]

    finds = "tests/test_sums.py::test_in_another_process"
    assert verdict("--every", "3") == ("lives", NOT_EXECUTED)
    assert verdict() == ("found", finds)
    monkeypatch.setattr(command.Judge, "judge", lambda *given: pytest.fail("it ran again"))
    assert verdict() == ("found", finds)


def test_only_code_of_the_toy_changes(toy: Repository) -> None:
    lines = {edit.line for edit in of_file(toy.source, "sums.py")}
    assert lines == {3, 8, 10, 11, 12, 17, 21}


def test_a_kernel_that_fails_by_itself_is_an_error(toy: Repository) -> None:
    (toy.source / "sums.py").write_text(TOY.replace("result + number", "result"))
    with pytest.raises(CampaignError, match="without any defect") as raised:
        control(toy, TOY_KERNEL, Limits(60))
    assert "test_total" in str(raised.value) and "assert" in str(raised.value)


def test_a_missing_package_is_named(toy: Repository) -> None:
    """Where the tests lack what they need, no verdict says anything about the kernel."""
    (toy.root / "tests/test_sums.py").write_text("import no_such_package\n")
    with pytest.raises(CampaignError, match="No module named 'no_such_package'"):
        control(toy, TOY_KERNEL, Limits(60))


def test_every_kernel_is_of_one_family() -> None:
    assert sorted(name for names in FAMILIES.values() for name in names) == sorted(KERNELS)
    blackwell = [test.path for test in family("blackwell").tests if "hopper" in test.path]
    assert blackwell == ["tests/kernels/hopper/indexer/test_defects.py"]
    assert {*KERNELS["hopper.few"].files(PACKAGE)} < {*family("hopper").files(PACKAGE)}


def test_a_family_has_so_many_of_each_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--family", "hopper", "--count", "2", "--list"]) == 0
    listed = capsys.readouterr().out
    assert [listed.count(f"[{group}: ") for group in CLASSES] == [2, 2, 2, 2]


def test_the_command_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--kernel", "portable.indexer", "--count", "3", "--list"]) == 0
    assert capsys.readouterr().out.count("kernels/portable/indexer/") == 3
