"""Compiling ahead what a model needs on a device, so that its first request does not wait for it.

Triton keeps compiled kernels on disk; a later process finds them there. Compiling launches nothing,
and holds tensors of a few hundred tokens and a few thousand keys on the device meanwhile.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch

from openmla.aot.operands import operands_of
from openmla.dispatch import device_target, plan_for
from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.launch import calls, current
from openmla.planning.models import problem_for_model
from openmla.problem import FORMS, Problem

log = logging.getLogger("openmla.aot.warmup")
SLOW_SECONDS = 1.0
# (new tokens, keys) of a long prompt, a short one, and a short one after a prefix or a long one,
# whose keys are split: each may have a kernel of its own. Operands have no more tokens than
# MOST_TOKENS: what is compiled follows from the plan, only whether keys can be split from these.
LENGTHS = ((4096, 4096), (64, 64), (64, 256), (64, 8192))
MOST_TOKENS = 256


def problems_of(model: str, tp: int = 1, dtypes: tuple[str, ...] = ("bf16",)) -> list[Problem]:
    """What a model poses in each form it can be computed in, for each of LENGTHS, also with lse.

    >>> len(problems_of("deepseek-v3")), {p.form for p in problems_of("deepseek-v3")} - {"dense"}
    (16, {'latent'})
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
        for call in calls(chosen, *operands_of(shortened(problem), device)):
            before = time.perf_counter()
            with current(device):
                call.compile()
            seconds = time.perf_counter() - before
            if seconds > SLOW_SECONDS:
                tell(f"{call.kernel.__name__} ({problem.form}): compiled in {seconds:.1f} s")
        what = f"{chosen.backend} {problem.form} {problem.kv_dtype}"
        lengths = f"{problem.total_q} of {problem.total_k}"
        lengths += ", lse" * problem.wants_lse
        yield f"{what}, {lengths}: {time.perf_counter() - started:.1f} s"


def shortened(problem: Problem) -> Problem:
    """The problem with no more tokens than MOST_TOKENS; a whole prompt stays a whole prompt."""
    tokens = min(problem.total_q, MOST_TOKENS)
    keys = tokens if problem.self_attention else problem.total_k
    return replace(problem, total_q=tokens, total_k=keys)
