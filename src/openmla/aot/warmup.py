"""Compiling ahead what a model needs on a device, so that its first request does not wait for it.

Triton keeps compiled kernels on disk; a later process finds them there. Compiling launches nothing,
and holds tensors of a few hundred tokens and a few thousand keys on the device meanwhile.

Compilation of one kernel uses one core for up to 17 seconds, so it is done twice over: processes
that never touch the GPU first compile all kernels side by side into Triton's disk cache, then this
process, which has the GPU, takes them from there one by one. What a process could not compile, this
one does, so the result does not depend on them.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch

from openmla.aot.ahead import compiling_for
from openmla.aot.operands import operands_of
from openmla.dispatch import device_target, plan_for
from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.launch import calls, current
from openmla.planning.models import model_by_name, problem_for_model
from openmla.planning.target import Target
from openmla.problem import FORMS, Problem

log = logging.getLogger("openmla.aot.warmup")
SLOW_SECONDS = 1.0
MOST_PROCESSES = 16  # a model has about as many kernels that take long
# (new tokens, keys) of a long prompt, a short one, and a short one after a prefix or a long one,
# whose keys are split: each may have a kernel of its own. Operands have no more tokens than
# MOST_TOKENS: what is compiled follows from the plan, only whether keys can be split from these.
LENGTHS = ((4096, 4096), (64, 64), (64, 256), (64, 8192))
MOST_TOKENS = 256


class Warmed(NamedTuple):
    """A problem whose kernels are compiled."""

    problem: Problem
    backend: str
    kernels: frozenset[str]
    """Triton's hashes of them: problems share kernels."""
    seconds: float

    def __str__(self) -> str:
        p = self.problem
        lengths = f"{p.total_q} of {p.total_k}" + ", lse" * p.wants_lse
        return f"{self.backend} {p.form} {p.kv_dtype}, {lengths}: {self.seconds:.1f} s"


def problems_of(model: str, tp: int = 1, dtypes: tuple[str, ...] = ("bf16",)) -> list[Problem]:
    """What a model poses in each form it can be computed in, for each of LENGTHS and each ratio of
    compressed rows, also with lse.

    >>> len(problems_of("deepseek-v3")), {p.form for p in problems_of("deepseek-v3")} - {"dense"}
    (16, {'latent'})
    """
    found = []
    ratios = model_by_name(model).ratios or (None,)
    for form, dtype, (tokens, keys), ratio in product(FORMS, dtypes, LENGTHS, ratios):
        try:
            problem = problem_for_model(
                model, tokens=tokens, context=keys, tp=tp, dtype=dtype, form=form, ratio=ratio
            )
        except InvalidArgument as error:
            if error.name not in ("form", "dtype"):
                raise
            continue  # the model has no such form
        found += [problem, replace(problem, wants_lse=True)]
    return list(dict.fromkeys(found))


def compile_model(
    model: str,
    device: torch.device,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    tell: Callable[[str], None] = log.info,
) -> Iterator[Warmed]:
    """Compile the kernels that a model runs on a GPU; yields each problem when it is done."""
    if device.type != "cuda":
        raise Unsupported(
            f"warming up on {device}: there is nothing to compile", nearest="--device cuda"
        )
    target = device_target(device)
    for problem in problems_of(model, tp, dtypes):
        chosen = plan_for(problem, target)
        started, kernels = time.perf_counter(), set()
        for call in calls(chosen, *operands_of(shortened(problem), device)):
            before = time.perf_counter()
            with current(device):
                kernels.add(getattr(call.compile(), "hash", call.kernel.__name__))
            seconds = time.perf_counter() - before
            if seconds > SLOW_SECONDS:
                tell(f"{call.kernel.__name__} ({problem.form}): compiled in {seconds:.1f} s")
        yield Warmed(problem, chosen.backend, frozenset(kernels), time.perf_counter() - started)


def compile_side_by_side(
    problems: Sequence[Problem], target: Target, processes: int
) -> Iterator[float]:
    """Fill Triton's disk cache by processes without a GPU; yields seconds of each group's work.

    Groups are problems that share kernels (`groups_of`): one process compiles them one after
    another, so that nothing is compiled twice.
    """
    spawned = get_context("spawn")  # a forked child would share the compiler's threads and the GPU
    with ProcessPoolExecutor(processes, spawned) as pool:
        waiting = [pool.submit(compile_group, g, target) for g in groups_of(problems, target)]
        for done in as_completed(waiting):
            try:
                yield done.result()
            except BrokenProcessPool:  # killed, for want of memory say: the rest is compiled later
                log.warning("a compiling process died; its kernels are compiled one by one")
                return


def groups_of(problems: Sequence[Problem], target: Target) -> list[list[Problem]]:
    """Problems by the kernel, config and outputs of their plans, the largest groups first.

    >>> from openmla.planning.target import target_by_name
    >>> groups = groups_of(problems_of("deepseek-v3"), target_by_name("h200"))
    >>> sum(map(len, groups)) == len(problems_of("deepseek-v3"))
    True
    """
    groups: dict[tuple[str, object, bool], list[Problem]] = {}
    for problem in problems:
        chosen = plan_for(problem, target)
        groups.setdefault((chosen.kernel_name, chosen.config, problem.wants_lse), []).append(
            problem
        )
    return sorted(groups.values(), key=len, reverse=True)


def compile_group(problems: Sequence[Problem], target: Target) -> float:
    """Compile problems for a GPU that this process does not touch; returns seconds.

    A kernel that cannot be compiled so is left to the process that has the GPU, which says why.
    """
    started = time.perf_counter()
    for problem in problems:
        try:
            with compiling_for(target.arch):
                for call in calls(plan_for(problem, target), *operands_of(shortened(problem))):
                    call.compile()
        except Exception as error:
            log.info("%s: %s", problem, error)
    return time.perf_counter() - started


def usable_cores() -> int:
    """Cores that this process may use, as a container or taskset limits them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def shortened(problem: Problem) -> Problem:
    """The problem with no more tokens than MOST_TOKENS; a whole prompt stays a whole prompt."""
    tokens = min(problem.total_q, MOST_TOKENS)
    keys = tokens if problem.self_attention else problem.total_k
    return replace(problem, total_q=tokens, total_k=keys)
