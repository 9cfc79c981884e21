"""Compiling ahead what a model needs on a device, so that its first request does not wait for it.

Triton keeps compiled kernels on disk; a later process finds them there. Compiling launches nothing
and needs a few megabytes of the device's memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from openmla.cache import LatentCache
from openmla.dispatch import device_target
from openmla.errors import InvalidArgument, Unsupported
from openmla.operands import (
    DenseOperands,
    LatentOperands,
    Operands,
    Results,
    SparseOperands,
    Weights,
)
from openmla.plan import plan
from openmla.plan.models import problem_for_model
from openmla.problem import FORMS, Problem

log = logging.getLogger("openmla.warmup")
SLOW_SECONDS = 1.0
TOKENS, PAGE = 256, 64


def problems_of(model: str, tp: int = 1, dtypes: tuple[str, ...] = ("bf16",)) -> list[Problem]:
    """What a model poses in each form it can be computed in.

    >>> [p.form for p in problems_of("deepseek-v3")]
    ['dense', 'latent']
    """
    found = []
    for form in FORMS:
        for dtype in dtypes:
            try:
                problem = problem_for_model(
                    model, tokens=TOKENS, context=2 * TOKENS, tp=tp, dtype=dtype, form=form
                )
            except InvalidArgument as error:
                if error.name not in ("form", "dtype"):
                    raise
                continue  # the model has no such form
            found.append(problem)
    return found


def compile_model(
    model: str,
    device: torch.device,
    tp: int = 1,
    dtypes: tuple[str, ...] = ("bf16",),
    tell: Callable[[str], None] = log.info,
) -> Iterator[str]:
    """Compile the portable kernels of a model for a GPU; yields a line per form when it is done."""
    if device.type != "cuda":
        raise Unsupported(
            f"warming up on {device}: there is nothing to compile", nearest="--device cuda"
        )
    from openmla.kernels.portable.launch import calls

    target = device_target(device)
    for problem in problems_of(model, tp, dtypes):
        chosen = plan(problem, target, "portable")
        started = time.perf_counter()
        for call in calls(chosen, *operands_of(problem, device)):
            before = time.perf_counter()
            call.compile()
            seconds = time.perf_counter() - before
            if seconds > SLOW_SECONDS:
                tell(f"{call.kernel.__name__} ({problem.form}): compiled in {seconds:.1f} s")
        yield f"{problem.form} {problem.kv_dtype}: {time.perf_counter() - started:.1f} s"


def operands_of(problem: Problem, device: torch.device) -> tuple[Operands, Results]:
    """Zeros in the shapes of a problem that compile its kernels."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    T, N, H = TOKENS, 2 * TOKENS, problem.heads
    q = torch.zeros(T, H, problem.d_qk, **make)
    lse = torch.zeros(T, H, device=device)
    results = Results(torch.zeros(T, H, problem.d_v, **make), lse)
    weights = Weights(problem.d_qk**-0.5)
    cu, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=device) for n in (T, N))
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
