"""Cached launches: a call like one that was made before skips checks, plan and Triton's binding.

The key of a call is all arguments of its operator: a tensor's dtype, device, shape, strides and
address modulo 16, the type and value of anything else. Checks, plan and launch depend on nothing
more but whether `out` overlaps an input, so a launch is kept under its key (kernels.prepared) and
only addresses are exchanged. A call that differs from a kept one in token counts alone takes its
kernels if its plan would have the same variant; what follows from the counts, the launcher's
`numbers` says, for a kept launch and for a first one. Arguments that are not plain go the long way,
through checks, plan and Triton, where the error messages are. A view with torch's negative bit is
one of them: its memory holds other numbers until torch resolves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from openmla.arithmetic import round_up
from openmla.indexer.operands import SCORES_STEP
from openmla.operands import same_offsets
from openmla.planning import Plan
from openmla.problem import Problem

if TYPE_CHECKING:
    from openmla.kernels.call import Call, LaunchNumbers
    from openmla.kernels.prepared import CachedLaunch

MOST_KEPT = 1024
SAME = -1  # instead of an address: that of the tensor before
MOST_ROWS = 2**24  # of a call with other counts: times 128 heads, an int of 32 bits
# Arguments of operators whose rows are counted by token or sequence, and what counts them.
ROWS = {
    "dense": {
        "q": "queries",
        "out": "queries",
        "lse": "queries",
        "k_nope": "keys",
        "k_rope": "keys",
        "v": "keys",
        "cu_seqlens_q": "ends",
        "cu_seqlens_k": "ends",
        "k_start": "sequences",
        "q_scale": "queries",
        "k_scale": "keys",
    },
    "sparse": dict.fromkeys(
        ("q", "q_scale", "indices", "topk_lengths", "out", "lse", "max_logits"), "tokens"
    ),
    "attend": dict.fromkeys(
        (
            *("q", "out", "lse", "indices", "topk_lengths", "request", "begin", "end"),
            "turn_positions",
            *(f"second_{x}" for x in ("indices", "lengths", "request", "begin", "end")),
        ),
        "tokens",
    ),
}
ROW_STEPS = {"index_scores": SCORES_STEP}
"""By operator, the multiple that row strides of `out` are rounded up to."""
Key = tuple[Any, ...]


class Made:
    """Stands for an output that is to be made."""


MADE = Made()
PLAIN = frozenset({type(None), bool, int, float, str, Made})


def wanted(flag: object) -> object:
    """An output that a flag asks for, or not; what is no flag makes a call that is not plain."""
    return MADE if flag is True else None if flag is False else ...


def with_extras(out: Tensor, *extras: Tensor | None) -> Tensor | tuple[Tensor, ...]:
    """What a call returns: `out`, with the outputs that were asked for."""
    found = [x for x in extras if x is not None]
    return (out, *found) if found else out


class Template(NamedTuple):
    """A kept launch whose kernels serve other token counts."""

    plan: Plan
    variant: Any
    """The plan's: with another one, other kernels or another workspace would be needed."""
    numbers: Callable[[Plan, Problem], Sequence[LaunchNumbers] | None]
    """The launcher's own, of a problem's token counts."""
    launch: CachedLaunch


_launches: dict[Key, CachedLaunch] = {}
_templates: dict[Key | None, list[Template]] = {}
_names: dict[str, Sequence[str]] = {}


def any_kept() -> bool:
    """Whether `run` could find a launch: some are kept, and torch does not trace."""
    return not torch.compiler.is_compiling() and bool(_launches)


def run(name: str, args: Sequence[Any]) -> list[Any] | None:
    """Launch a call of operator `name` like one that was made before, and return its outputs.

    Nothing is assumed of `args`; outputs may be MADE. None: no such call is known, and nothing has
    happened.
    """
    if (
        not _launches
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    ):
        return None
    addresses: list[int] = []
    key = _key(name, args, addresses)
    if key is None:
        return None
    launch = _launches.get(key) or _other_counts(key, args)
    return None if launch is None else launch.run(args, addresses)


def remember(
    name: str,
    names: Sequence[str],
    args: Sequence[Any],
    plan: Plan | None,
    made: list[tuple[Call, Any]],
) -> None:
    """Keep what a checked call with these arguments, just launched with this plan, came to.

    Where a call takes several plans, this is the last one.
    """
    if plan is None or not made or not _on_this_gpu(args[0]):
        return
    key = _key(name, args, [])
    if key is None or key in _launches:
        return
    from openmla.kernels.prepared import NotPrepared, prepare

    calls = [args]
    outputs = args[names.index("out") :]
    # A call that makes its output makes it in the type that queries say.
    given_type = getattr(plan.problem, "fp32_out", False)
    if not given_type and all(x is None or _as_made(name, x) for x in outputs):
        unmade = [None if x is None else MADE for x in outputs]
        calls.append([*args[: -len(outputs)], *unmade])
    try:
        launch = prepare(made, names, args)
    except NotPrepared:
        return
    _names[name] = names
    for given in calls:
        key = _key(name, given, [])
        if key is not None:
            _keep(key, launch)
            _keep_template(name, given, plan, launch)


def _as_made(name: str, x: Tensor) -> bool:
    """Whether an output lies as one does that the call makes."""
    step = ROW_STEPS.get(name)
    plain = x.is_contiguous() if step is None else x.stride() == (round_up(x.shape[1], step), 1)
    return plain and not x.data_ptr() % 16


def _on_this_gpu(q: Tensor) -> bool:
    """Whether launches for q are launches on the current GPU, made at once."""
    here = q.is_cuda and torch.cuda.current_device() == q.device.index
    return here and not torch.cuda.is_current_stream_capturing()


def forget() -> None:
    """Keep nothing of the calls so far."""
    _launches.clear()
    _templates.clear()


def _key(name: str, args: Sequence[Any], addresses: list[int]) -> Key | None:
    """The key of a call, None for one that is not plain; fills in where its tensors lie."""
    facts: list[Any] = [name]
    gradients, before = torch.is_grad_enabled(), 0
    try:
        for x in args:
            if x is None:
                facts.append(None)
            elif type(x) is Tensor:
                if (gradients and x.requires_grad) or x.is_neg():
                    return None
                address = x.data_ptr()
                mark = SAME if address == before else address & 15
                facts += (x.dtype, x.device, x.shape, x.stride(), mark)
                addresses.append(address)
                before = address
            elif type(x) in PLAIN:
                facts += (type(x), x)
            else:
                return None
    except RuntimeError:  # a tensor without strides or without memory
        return None
    return tuple(facts)


def _keep(key: Key, launch: CachedLaunch) -> None:
    if len(_launches) >= MOST_KEPT:
        forget()
    _launches[key] = launch


def _keep_template(name: str, args: Sequence[Any], plan: Plan, launch: CachedLaunch) -> None:
    numbers = getattr(import_module(plan.kernel.launcher), "numbers", None)
    key = _key_without_counts(name, args)
    if numbers is None or key is None:
        return
    found = numbers(plan, plan.problem)
    if found and launch.has(found):
        _templates.setdefault(key, []).append(Template(plan, plan.variant, numbers, launch))


def _other_counts(key: Key, args: Sequence[Any]) -> CachedLaunch | None:
    """The launch of a call that differs from a kept one in token counts alone."""
    templates = _templates.get(_key_without_counts(key[0], args), ())
    named = dict(zip(_names[key[0]], args, strict=True)) if templates else {}
    for plan, variant, numbers, kept in templates:
        problem = _recounted(plan.problem, named)
        if plan.kernel.variant(plan.config, problem) != variant:
            continue
        found = numbers(plan, problem)
        if found:
            launch = kept.resized(args[0].shape[0], found)
            _keep(key, launch)
            return launch
    return None


def _recounted(problem: Problem, args: Mapping[str, Any]) -> Problem:
    """The problem with the token counts of other arguments of its operator."""
    if problem.form == "sparse":
        return replace(problem, total_q=args["q"].shape[0])
    offsets = args["cu_seqlens_q"], args["cu_seqlens_k"]
    return replace(
        problem,
        total_q=args["q"].shape[0],
        total_k=args["k_nope"].shape[0],
        batch=offsets[0].shape[0] - 1,
        self_attention=same_offsets(*offsets),
    )


def _key_without_counts(name: str, args: Sequence[Any]) -> Key | None:
    """The key without numbers of rows; None where these are 0 or do not go together."""
    if name not in ROWS or name not in _names:
        return None
    counts: dict[str, int] = {}
    facts: list[Any] = []
    rows_of, before = ROWS[name], 0
    for argument, x in zip(_names[name], args, strict=True):
        if type(x) is not Tensor:
            facts.append((type(x), x))
            continue
        shape, what = x.shape, rows_of.get(argument)
        if what and shape:
            rows = counts.setdefault(what, shape[0])
            if shape[0] != rows or not 0 < rows < MOST_ROWS:
                return None
            # Rows of an output with gaps might overlap if there were more of them.
            shape = shape[1:] if argument != "out" or x.is_contiguous() else shape
        address = x.data_ptr()
        facts.append((x.dtype, x.device, shape, x.stride(), address & 15, address == before))
        before = address
    return (name, *facts)
