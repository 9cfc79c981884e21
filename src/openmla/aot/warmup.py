"""Compiling ahead what a model needs on a device, so that its first request does not wait for it.

Triton keeps compiled kernels on disk; a later process finds them there. Compiling launches nothing,
and holds tensors of a few hundred tokens and a few thousand keys on the device meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from openmla.cache import LatentCache
from openmla.dispatch import device_target, plan_for
from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.launch import calls
from openmla.operands import (
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.planning.models import problem_for_model
from openmla.problem import FORMS, Problem

log = logging.getLogger("openmla.aot.warmup")
SLOW_SECONDS = 1.0
PAGE = 64
# (new tokens, keys) of a long prompt, a short one, and a short one after a long prefix, whose keys
# are split: each may have a kernel of its own. Operands have no more tokens than MOST_TOKENS: what
# is compiled follows from the plan, and only whether keys can be split from the operands.
LENGTHS = ((4096, 4096), (64, 64), (64, 8192))
MOST_TOKENS = 256


def problems_of(model: str, tp: int = 1, dtypes: tuple[str, ...] = ("bf16",)) -> list[Problem]:
    """What a model poses in each form it can be computed in, for each of LENGTHS, also with lse.

    >>> len(problems_of("deepseek-v3")), {p.form for p in problems_of("deepseek-v3")} - {"dense"}
    (12, {'latent'})
    """
    found = []
    for form, dtype, (tokens, keys) in product(FORMS, dtypes, LENGTHS):
        try:
            problem = problem_for_model(
                model, tokens=tokens, context=keys, tp=tp, dtype=dtype, form=form
            )
        except InvalidArgument as error:
            if error.name not in ("form", "dtype"):
                raise
            continue  # the model has no such form
        found += [problem, replace(problem, wants_lse=True)]
    return found


def compile_model(
    model: str,
    device: torch.device,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    tell: Callable[[str], None] = log.info,
) -> Iterator[str]:
    """Compile the kernels that a model runs on a GPU; yields a line per problem when it is done."""
    if device.type != "cuda":
        raise Unsupported(
            f"warming up on {device}: there is nothing to compile", nearest="--device cuda"
        )
    target = device_target(device)
    for problem in problems_of(model, tp, dtypes):
        chosen = plan_for(problem, target)
        started = time.perf_counter()
        for call in calls(chosen, *operands_of(problem, device)):
            before = time.perf_counter()
            call.compile()
            seconds = time.perf_counter() - before
            if seconds > SLOW_SECONDS:
                tell(f"{call.kernel.__name__} ({problem.form}): compiled in {seconds:.1f} s")
        what = f"{chosen.backend} {problem.form} {problem.kv_dtype}"
        lengths = f"{problem.total_q} of {problem.total_k}"
        lengths += ", lse" * problem.wants_lse
        yield f"{what}, {lengths}: {time.perf_counter() - started:.1f} s"


def operands_of(problem: Problem, device: torch.device) -> tuple[Operands, Results]:
    """Zeros in the shapes of a problem that compile its kernels."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    stats: dict[str, Any] = {"dtype": torch.float32, "device": device}
    T, H = min(problem.total_q, MOST_TOKENS), problem.heads
    square = problem.total_q == problem.total_k
    N = T if square else problem.total_k
    q = torch.zeros(T, H, problem.d_qk, **make)
    lse = torch.zeros(T, H, **stats) if problem.wants_lse else None
    results = Results(torch.zeros(T, H, problem.d_v, **make), lse)
    sink = torch.zeros(H, **stats) if problem.has_sink else None
    weights = Weights(problem.d_qk**-0.5, sink)
    cu, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (T, N))
    cu_k = cu if square else cu_k
    if problem.form == "dense":
        k, v = (torch.zeros(N, H, n, **make) for n in (problem.d_nope, problem.d_v))
        rope = torch.zeros(N, problem.d_rope, **make) if problem.d_rope else None
        return DenseOperands(q, k, rope, v, cu, cu_k, True, weights), results
    cache = LatentCache.allocate(
        num_pages=N // PAGE, page_size=PAGE, latent=problem.d_nope, rope=problem.d_rope,
        format=problem.kv_dtype, device=device,
    )  # fmt: skip
    if problem.form == "latent":
        table = torch.zeros(1, N // PAGE, dtype=torch.int32, device=device)
        op = LatentOperands(q, cache, table, cu_k[1:], cu, True, problem.d_v, weights)
        return op, results
    indices = torch.zeros(T, problem.topk, dtype=torch.int32, device=device)
    return SparseOperands(q, cache, indices, None, problem.d_v, weights), results
