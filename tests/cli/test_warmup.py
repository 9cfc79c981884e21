"""Compiling ahead: what would be compiled, and what happens without a GPU."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch
import typer

from openmla.aot import warmup
from openmla.aot.ahead import compiling_for
from openmla.aot.operands import operands_of
from openmla.cli.warmup import warmup_command
from openmla.dispatch import plan_for
from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.launch import calls
from openmla.planning import plan
from openmla.planning.models import MODELS
from openmla.planning.target import target_by_name


def test_examples():
    assert doctest.testmod(warmup).failed == 0


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_problems_whose_operands_say_the_same(model: str):
    problems = warmup.problems_of(model)
    assert problems
    for problem in problems:
        operands, results = operands_of(warmup.shortened(problem), "cpu")
        again = operands.problem(results)
        chosen, asked = (plan(p, "a100", "portable").config for p in (again, problem))
        assert (chosen.BM, chosen.BN, chosen.num_stages) == (asked.BM, asked.BN, asked.num_stages)


def test_what_is_compiled_is_what_runs():
    """On an H200: Hopper's dense kernel for tiles of one and of two, for split keys, for one block
    of them."""
    target, compiled = target_by_name("h200"), set()
    for problem in warmup.problems_of("deepseek-v3", tp=8):
        if problem.form == "dense":
            chosen = plan_for(problem, target)
            for call in calls(chosen, *operands_of(warmup.shortened(problem), "cpu")):
                tiles, split = (call.arguments.get(name, 0) for name in ("NC", "SPLIT"))
                compiled.add((chosen.backend, call.kernel.__name__, tiles, split > 0))
    assert compiled == {
        ("hopper", "dense_kernel", 2, False),
        ("hopper", "dense_kernel", 1, False),
        ("hopper", "dense_kernel", 1, True),
        ("hopper", "merge_kernel", 1, True),
        ("hopper", "one_block_kernel", 0, False),
    }


def test_processes_without_a_gpu_fill_the_cache_that_this_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Two processes compile for tensors without memory; this one finds it for some that have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target = target_by_name("a100")
    problems = [p for p in warmup.problems_of("minicpm3-4b") if p.form == "dense"][:2]
    assert len(warmup.groups_of(problems, target)) == 2  # with and without lse
    assert len(list(warmup.compile_side_by_side(problems, target, processes=2))) == 2
    written = {path.name for path in tmp_path.rglob("*.cubin")}
    assert written
    before = set(tmp_path.rglob("*"))
    with compiling_for(target.arch):
        for problem in problems:
            operands = operands_of(warmup.shortened(problem), "cpu")
            for call in calls(plan_for(problem, target), *operands):
                assert f"{call.kernel.__name__}.cubin" in written
                call.compile()
    assert set(tmp_path.rglob("*")) == before, "something was compiled again"


def test_what_a_process_cannot_compile_is_left_to_the_one_with_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
):
    def refuse(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(warmup, "calls", refuse)
    assert warmup.compile_group(warmup.problems_of("deepseek-v3")[:1], target_by_name("h200")) >= 0


def test_fp8_caches_are_compiled_where_a_form_reads_one():
    forms = {p.form for p in warmup.problems_of("deepseek-v3", dtypes=("fp8_656",))}
    assert forms == {"latent"}


def test_an_unknown_model_and_a_cpu_are_refused():
    with pytest.raises(InvalidArgument):
        warmup.problems_of("no-such-model")
    with pytest.raises(Unsupported, match="nothing to compile"):
        next(warmup.compile_model("deepseek-v3", torch.device("cpu")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_that_there_is_no_gpu():
    with pytest.raises(typer.BadParameter, match="no GPU"):
        warmup_command("deepseek-v3", "cuda", 1, None, 1)
    with pytest.raises(typer.BadParameter, match="nothing to compile"):
        warmup_command("deepseek-v3", "cpu", 1, None, 2)
