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
from openmla.indexer.problem import INDEX_FORMS, IndexProblem
from openmla.kernels.launch import calls, current
from openmla.planning.latent_split import RANGES_FIT
from openmla.planning.models import index_problem_for_model, model_by_name, problem_for_model
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
# What a server's batches differ in: requests, new tokens of all of them, keys of the longest, rows
# of the pool that its pages lie in. Between two of these sizes no kernel turns into another one.
BATCHES = (1, 2, 4, 32, 33, 64, 128, 256)
BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 33, 48, 64, 128, 256, 1024, 8192)
BATCH_KEYS = (64, 128, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 524288)
POOLS = (1 << 17, 1 << 22)
TURNED = 64  # columns that DeepSeek-V4 and V4.1 turn: by the layers of openmla.nn in the kernel
Asked = Problem | IndexProblem


class Kernel(NamedTuple):
    """A kernel as it is compiled: another constant or a missing tensor makes it another kernel."""

    name: str
    arguments: tuple[tuple[str, str], ...]


class Warmed(NamedTuple):
    """A problem whose kernels are compiled."""

    problem: Asked
    backend: str
    kernels: frozenset[str]
    """Triton's hashes of them: problems share kernels."""
    seconds: float

    def __str__(self) -> str:
        p = self.problem
        if isinstance(p, IndexProblem):
            return f"{self.backend} {p}: {self.seconds:.1f} s"
        lengths = f"{p.total_q} of {p.total_k}" + ", lse" * p.wants_lse
        return f"{self.backend} {p.form} {p.kv_dtype}, {lengths}: {self.seconds:.1f} s"


def problems_of(
    model: str,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    page_size: int = 0,
    range_keys: int = 0,
) -> list[Asked]:
    """What a model poses for one request, in each form it can be computed in: for each of LENGTHS
    and each ratio of compressed rows, also with lse, and the two steps of its indexer. range_keys:
    of calls in latent form that name it, beside those that do not; 0: there are none.

    >>> len(problems_of("deepseek-v3")), {p.form for p in problems_of("deepseek-v3")} - {"dense"}
    (16, {'latent'})
    >>> sorted({p.form for p in problems_of("deepseek-v3.2")})
    ['dense', 'latent', 'scores', 'select', 'sparse']
    """
    found: list[Asked] = []
    for problem in _attention_of(model, tp, dtypes, page_size, range_keys, LENGTHS):
        found += [problem, replace(problem, wants_lse=True)]
    return list(dict.fromkeys([*found, *_index_steps_of(model, page_size, LENGTHS)]))


def _attention_of(
    model: str,
    tp: int,
    dtypes: tuple[str, ...],
    page_size: int,
    range_keys: int,
    lengths: Sequence[tuple[int, int]],
) -> Iterator[Problem]:
    """The problems of attention, for each (new tokens, keys) of `lengths`."""
    ratios = model_by_name(model).ratios or (None,)
    for form, dtype, (tokens, keys), ratio in product(FORMS, dtypes, lengths, ratios):
        try:
            problem = problem_for_model(
                model,
                tokens=tokens,
                context=keys,
                tp=tp,
                page_size=0 if form == "dense" else page_size,
                dtype=dtype,
                form=form,
                ratio=ratio,
            )
        except InvalidArgument as error:
            if error.name not in ("form", "dtype"):
                raise  # otherwise the model has no such form
            continue
        yield problem
        if range_keys and problem.form == "latent":
            yield replace(problem, invariant=True, range_keys=range_keys)
        if problem.is_attend:
            yield replace(problem, turned_back=TURNED)


def _index_steps_of(
    model: str, page_size: int, lengths: Sequence[tuple[int, int]]
) -> Iterator[IndexProblem]:
    """The two steps of an indexer over pages, where the model has one."""
    for form, (tokens, keys) in product(INDEX_FORMS, lengths):
        try:
            yield index_problem_for_model(
                model, tokens=tokens, context=keys, page_size=page_size, form=form
            )
        except InvalidArgument as error:
            if error.name != "form":
                raise
            return


def batches_of(
    model: str,
    target: Target,
    requests: int,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    page_size: int = 0,
    range_keys: int = 0,
) -> list[Asked]:
    """What a server poses whose batches have up to so many requests, beside what one request poses:
    a problem for each set of kernels that the target's plans name over all of BATCHES,
    BATCH_TOKENS, BATCH_KEYS and POOLS.

    >>> from openmla.planning.target import target_by_name
    >>> served = batches_of("deepseek-v3", target_by_name("h200"), requests=2)
    >>> {problem.form for problem in served}
    {'latent'}
    """
    one = [(1, 1)]
    posed: list[Asked] = list(_attention_of(model, tp, dtypes, page_size, range_keys, one))
    posed += _index_steps_of(model, page_size, one)
    alone = {kernels_of(p, target) for p in problems_of(model, tp, dtypes, page_size, range_keys)}
    found: dict[frozenset[Kernel], Asked] = {}
    for problem in posed:
        for sized in dict.fromkeys(_batches(problem, requests)):
            found.setdefault(kernels_of(sized, target), sized)
    attention = [problem for problem in found.values() if isinstance(problem, Problem)]
    with_lse = [replace(problem, wants_lse=True) for problem in attention]
    found.update((kernels_of(problem, target), problem) for problem in with_lse)
    return [problem for kernels, problem in found.items() if kernels not in alone]


def _batches(one: Asked, requests: int) -> Iterator[Asked]:
    """A problem of one token, for batches of every size."""
    sizes = [size for size in BATCHES if size < requests] + [requests]
    for batch, tokens, keys in product(sizes, BATCH_TOKENS, BATCH_KEYS):
        if tokens < batch:
            continue
        if isinstance(one, IndexProblem):
            yield replace(one, batch=batch, total_q=tokens, width=keys)
        elif one.form == "dense":
            fresh = replace(one, batch=batch, total_q=tokens, total_k=tokens, self_attention=True)
            yield fresh
            yield replace(fresh, total_k=max(keys, tokens), self_attention=False)
        else:
            paged = (_paged(one, batch, tokens, keys, pool) for pool in POOLS)
            yield from filter(RANGES_FIT.holds, paged)  # others are refused when they are called


def _paged(one: Problem, batch: int, tokens: int, keys: int, pool: int) -> Problem:
    """A batch over pages: tables end at a page, pools of compressed rows are as large."""
    page = one.page_size
    rows = -(-pool // page) * page
    table = -(-keys // page) * page if one.form == "latent" else 0
    second = one.second and replace(one.second, total_k=rows)
    requests = batch if one.form == "latent" else one.batch
    paged = replace(one, batch=requests, total_q=tokens, total_k=rows)
    return replace(paged, table_keys=table, second=second)


def kernels_of(problem: Asked, target: Target) -> frozenset[Kernel]:
    """What is compiled for a problem."""
    chosen = plan_for(problem, target)
    return frozenset(
        Kernel(call.kernel.__name__, tuple((n, _told(n, x)) for n, x in call.arguments.items()))
        for call in calls(chosen, *operands_of(shortened(problem)))
    )


def _told(name: str, value: object) -> str:
    """What the compiler is told of an argument: a constant's value, or whether a tensor is there.
    Counts and strides are declared not to matter."""
    is_constant = name.isupper() or name.startswith(("num_", "launch_"))
    return str(value if is_constant else value is None)


def compile_model(
    model: str,
    device: torch.device,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    page_size: int = 0,
    range_keys: int = 0,
    tell: Callable[[str], None] = log.info,
) -> Iterator[Warmed]:
    """Compile the kernels that a model runs on a GPU; yields each problem when it is done."""
    if device.type != "cuda":
        raise Unsupported(
            f"warming up on {device}: there is nothing to compile", nearest="--device cuda"
        )
    target = device_target(device)
    for problem in problems_of(model, tp, dtypes, page_size, range_keys):
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
    groups: Sequence[Sequence[Asked]], target: Target, processes: int
) -> Iterator[float]:
    """Fill Triton's disk cache by processes without a GPU; yields seconds of each group's work.

    Groups are problems that share kernels (`groups_of`, or one problem that shares none): one
    process compiles them one after another, so that nothing is compiled twice.
    """
    spawned = get_context("spawn")  # a forked child would share the compiler's threads and the GPU
    with ProcessPoolExecutor(processes, spawned) as pool:
        waiting = [pool.submit(compile_group, g, target) for g in groups]
        for done in as_completed(waiting):
            try:
                yield done.result()
            except BrokenProcessPool:  # killed, for want of memory say: the rest is compiled later
                log.warning("a compiling process died; its kernels are compiled one by one")
                return


def groups_of(problems: Sequence[Asked], target: Target) -> list[list[Asked]]:
    """Problems by the kernel, config and outputs of their plans, the largest groups first.

    >>> from openmla.planning.target import target_by_name
    >>> groups = groups_of(problems_of("deepseek-v3"), target_by_name("h200"))
    >>> sum(map(len, groups)) == len(problems_of("deepseek-v3"))
    True
    """
    groups: dict[tuple[str, object, bool], list[Asked]] = {}
    for problem in problems:
        chosen, lse = plan_for(problem, target), getattr(problem, "wants_lse", False)
        groups.setdefault((chosen.kernel_name, chosen.config, lse), []).append(problem)
    return sorted(groups.values(), key=len, reverse=True)


def compile_group(problems: Sequence[Asked], target: Target) -> float:
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


def shortened(problem: Asked) -> Asked:
    """The problem with no more tokens than MOST_TOKENS; a whole prompt stays a whole prompt."""
    tokens = min(problem.total_q, MOST_TOKENS)
    if isinstance(problem, IndexProblem):
        return replace(problem, total_q=tokens)
    keys = tokens if problem.self_attention else problem.total_k
    return replace(problem, total_q=tokens, total_k=keys)
