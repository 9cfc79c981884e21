"""What a kernel is compiled for on a machine without a GPU: named problems, as data.

Each kernel lists its own in `JOBS`, in a module `jobs` beside it, for one chip or for several;
`openmla.lab.compiling` compiles them and compares the compiler's report with what is `Predicted`
here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openmla.kernels.call import Call
from openmla.planning import Plan
from openmla.planning.problems import AnyProblem
from openmla.problem import Problem


@dataclass(frozen=True)
class Predicted:
    """What a plan expects of the compiler. None: no expectation.

    `shared` and `tmem` must match exactly; `registers` (VGPRs on AMD) and `spills` are limits.
    """

    shared: int | None = None
    tmem: int | None = None
    registers: int | None = None
    spills: int | None = 0
    serialized: bool = False
    """Whether ptxas may put waits between products of Hopper's tensor cores."""


NO_PLAN = Predicted()
SUMS_OF_WARPS = 64
"""Bytes of place_kernel, whose warps count rows that are named."""


@dataclass(frozen=True, kw_only=True)
class Jobs:
    """The problems of one kernel, by name."""

    chip: str
    """The target they are planned for."""
    backend: str = ""
    """The kernel family; unless given, the chip's own."""
    problems: Mapping[str, AnyProblem]
    predicted: Callable[[Plan, Call], Predicted]
    """What a plan expects of one of its calls."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fields of the plan's config that a job replaces, by name."""
    page_gaps: Mapping[str, int] = field(default_factory=dict)
    """Rows between the pages of the cache, by name; 0 for others."""


def typed(problem: Problem, dtype: str) -> Problem:
    """The problem with queries, keys and values of one type."""
    return replace(problem, q_dtype=dtype, kv_dtype=dtype, v_dtype=dtype, rope_dtype=dtype)


def block_memory(plan: Plan, call: Call) -> Predicted:
    """The bytes and registers that Hopper's configs promise for their own kernel."""
    if "REGISTERS" not in call.arguments:
        return Predicted(shared=0)  # a helper of the launch, such as the merge of split keys
    config = plan.config
    return Predicted(shared=config.smem_used, registers=config.registers.at_launch)
