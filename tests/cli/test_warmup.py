"""Compiling ahead: what would be compiled, and what happens without a GPU."""

from __future__ import annotations

import doctest

import pytest
import torch
import typer

from openmla.aot import warmup
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
        warmup_command("deepseek-v3", "cuda", 1, None)
    with pytest.raises(typer.BadParameter, match="nothing to compile"):
        warmup_command("deepseek-v3", "cpu", 1, None)
