"""Compiling ahead: what would be compiled, and what happens without a GPU."""

from __future__ import annotations

import doctest
import random
from dataclasses import replace
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
from openmla.indexer.problem import IndexProblem
from openmla.kernels.launch import calls
from openmla.lab.compiling.jobs import CompileJob, job_key
from openmla.planning import plan
from openmla.planning.models import MODELS
from openmla.planning.target import Target, target_by_name


def test_examples():
    assert doctest.testmod(warmup).failed == 0


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_problems_whose_operands_say_the_same(model: str):
    problems = warmup.problems_of(model)
    assert problems
    for problem in problems:
        if isinstance(problem, IndexProblem):
            continue
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
    groups = warmup.groups_of(problems, target)
    assert len(groups) == 2  # with and without lse
    assert len(list(warmup.compile_side_by_side(groups, target, processes=2))) == 2
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


@pytest.mark.parametrize(
    ("model", "tp", "dtype", "target"),
    [
        ("deepseek-v3", 1, "bf16", "h200"),
        pytest.param("deepseek-v3", 8, "fp8_656", "h200", marks=pytest.mark.long),
        pytest.param("deepseek-v3.2", 1, "bf16", "h200", marks=pytest.mark.long),
        pytest.param("deepseek-v3.2", 1, "fp8_656", "b200", marks=pytest.mark.long),
        pytest.param("deepseek-v3", 1, "bf16", "mi355x", marks=pytest.mark.long),
    ],
)
def test_no_batch_meets_a_kernel_that_was_not_compiled(
    model: str, tp: int, dtype: str, target: str
):
    """Drawn batches of up to 256 requests, of any number of tokens, keys and rows of the pool."""
    chip, draw = target_by_name(target), random.Random(5)
    compiled: set[warmup.Kernel] = set()
    asked = [
        *warmup.problems_of(model, tp, (dtype,)),
        *warmup.batches_of(model, chip, 256, tp, (dtype,)),
    ]
    for problem in asked:
        compiled |= warmup.kernels_of(problem, chip)
    forms = {(p.form, getattr(p, "self_attention", None)): p for p in asked}
    for one in forms.values():
        for _ in range(40):
            problem = drawn_batch(one, draw)
            missing = warmup.kernels_of(problem, chip) - compiled
            assert not missing, (problem, [kernel.name for kernel in missing])


def test_calls_that_name_their_ranges_are_warmed_up_too():
    """A kernel is told whether there is a length, the portable one which."""
    for chip, shared in (("h200", True), ("a100", False)):
        target = target_by_name(chip)

        def kernels(range_keys: int, target: Target = target) -> set[warmup.Kernel]:
            asked = warmup.problems_of("deepseek-v3", tp=8, range_keys=range_keys)
            chosen = [p for p in asked if p.form == "latent"]
            found = (warmup.kernels_of(p, target) for p in chosen)
            return {k for made in found for k in made if k.name == "latent_kernel"}

        assert kernels(0) < kernels(512)
        assert (kernels(512) == kernels(1024)) == shared
    assert not [p for p in warmup.problems_of("deepseek-v3", range_keys=512) if _names(p, 0)]
    served = warmup.batches_of("deepseek-v3", target_by_name("h200"), 2, range_keys=128)
    assert any(_names(p, 128) for p in served)


def _names(problem: warmup.Asked, keys: int) -> bool:
    """Whether it is an invariant call with ranges of so many keys."""
    return getattr(problem, "invariant", False) and getattr(problem, "range_keys", 0) == keys


@pytest.mark.parametrize("dtype", ["bf16", "fp8_656"])
@pytest.mark.parametrize("gap", [0, 16])
def test_page_sizes_share_their_kernels(dtype: str, gap: int):
    """In pages of a multiple of 64 rows whole blocks are boxes: those sizes share one kernel, all
    others another. So it is where there is room between pages, too."""
    chip = target_by_name("h200")
    posed = warmup.problems_of("deepseek-v3", dtypes=(dtype,), page_size=64)
    one = replace(next(p for p in posed if p.form == "latent"), total_q=1, total_k=6000)

    def kernels(page_size: int) -> frozenset[object]:
        problem = replace(one, page_size=page_size)
        launched = calls(plan_for(problem, chip), *operands_of(problem, page_gap=gap))
        return frozenset(job_key(CompileJob("page size", call, "sm90")) for call in launched)

    assert len({kernels(size) for size in (1, 16, 48, 80)}) == 1
    assert len({kernels(size) for size in (64, 128, 192)}) == 1


def test_selections_of_all_page_sizes_share_a_kernel():
    chip = target_by_name("h200")
    posed = warmup.problems_of("deepseek-v3.2", page_size=64)
    one = next(p for p in posed if p.form == "select" and p.page_size)
    keys = set()
    for size in (1, 16, 48, 64, 128):
        problem = replace(one, page_size=size)
        (call,) = calls(plan_for(problem, chip), *operands_of(problem))
        keys.add(job_key(CompileJob("page size", call, "sm90")))
    assert len(keys) == 1


def drawn_batch(one: warmup.Asked, draw: random.Random) -> warmup.Asked:
    """The problem for another batch."""
    batch = draw.choice((1, 2, 3, 7, 31, 32, 33, 63, 100, 128, 129, 200, 256))
    tokens = batch + draw.choice((0, 0, 1, 5, 30, 100, 700, 5000, 20000))
    keys = draw.choice((1, 63, 64, 65, 127, 500, 2000, 4096, 4097, 8193, 30000, 100000, 500000))
    if isinstance(one, IndexProblem):
        return replace(one, batch=batch, total_q=tokens, width=-(-keys // 64) * 64)
    shape = {"batch": batch, "total_q": tokens, "wants_lse": draw.random() < 0.5}
    if one.form == "dense":
        total = tokens if one.self_attention else tokens + keys
        return replace(one, **shape, total_k=total)
    pool = draw.choice((140_000, 300_000, 3_000_000, 6_000_000)) // 64 * 64
    if one.form == "sparse":
        return replace(one, **{**shape, "batch": one.batch}, total_k=pool)
    return replace(one, **shape, total_k=pool, table_keys=-(-keys // 64) * 64)


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
        warmup_command("deepseek-v3", "cuda", 1, None, jobs=1)
    with pytest.raises(typer.BadParameter, match="nothing to compile"):
        warmup_command("deepseek-v3", "cpu", 1, None, jobs=2)
