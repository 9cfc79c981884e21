"""All kernel families in one table, the plan of a problem, and how one is chosen.

Everything that depends on a family is derived from the table. `Plan` is data only: it prints
itself, compares equal, and kernels obey it. A plan is that of the first kernel, in the families'
order, that serves the problem: of those that could run where no version of Triton is given, of
those that run with a version where one is.

>>> [family.name for family in families_of(target_by_name("h200"))]
['hopper', 'portable']
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from openmla.backward.problem import BackwardProblem
from openmla.errors import InvalidArgument, OpenMLAError, Unsupported
from openmla.kernels.blackwell.family import BLACKWELL
from openmla.kernels.cdna4.family import CDNA4
from openmla.kernels.cpu.family import CPU, REFERENCE
from openmla.kernels.hopper.family import HOPPER
from openmla.kernels.portable.family import PORTABLE
from openmla.planning.evidence import GLUON, Word, forms_of, meaning_of, word_of
from openmla.planning.family import Block, Family, Kernel
from openmla.planning.latent_split import LatentSplit, why_slower_unsplit
from openmla.planning.problems import AnyProblem, decode_problem
from openmla.planning.target import Target, target_by_name
from openmla.problem import Problem
from openmla.records import decode, encode, parse_json, shown

FAMILIES = (REFERENCE, CPU, HOPPER, BLACKWELL, CDNA4, PORTABLE)
"""Best first: a chip's own family before the portable one."""
BACKENDS = ("auto", *(family.name for family in FAMILIES))
NEWEST_TRITON = (3, 9)
"""The newest version that kernels are compiled with."""
_VERSION = re.compile(r"(\d{1,3}\.\d{1,3})?")
_BY_NAME = {family.name: family for family in FAMILIES}
_KEYS = ("problem", "target", "backend", "kernel", "config", "passed_over", "triton")


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernel that serves a problem on a target, and its numbers.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128,
    ...                  total_q=4096, total_k=4096), "h200")
    >>> p.backend, p.config.BM, p.config.BN, Plan.from_json(p.to_json()) == p
    ('hopper', 128, 128, True)
    """

    problem: Any
    """What the kernel serves: a Problem, or an IndexProblem where it is one of the indexer."""
    target: str
    backend: str
    """Kernel family: reference, cpu, portable, hopper, blackwell, cdna4."""
    kernel_name: str
    """The family's kernel, as its declaration is called: "dense", "sparse_pair", "scores" …"""
    config: Any
    """The kernel's own frozen config (CpuConfig, HopperDenseConfig, …); None for the reference."""
    passed_over: tuple[str, ...] = ()
    """Families that would have come first, each with the reason it cannot serve the problem."""
    triton: str = ""
    """Version of Triton that it was made for, such as "3.6"; empty: whichever is needed."""

    @property
    def kernel(self) -> Kernel:
        """The declaration of the kernel that this is a plan of."""
        return family_named(self.backend).kernel_named(self.kernel_name)

    @property
    def variant(self) -> Any:
        """Which launches of its kernel run; None where there is one way only."""
        return self.kernel.variant(self.config, self.problem)

    @property
    def block(self) -> Block | None:
        """What one block takes of the chip; None on a CPU, and where the compiler decides."""
        block = self.kernel.block
        return None if block is None else block(self.config, self.problem)

    @property
    def runs_today(self) -> bool:
        """Whether the kernel exists and runs without being asked for; a plan may be ahead of it."""
        kernel = self.kernel
        return bool(kernel.launcher) and not kernel.on_request(self.config, self.problem)

    @property
    def word(self) -> Word:
        """How the kernel is known to work on the chip: measured, simulated or portable."""
        return word_of(self.backend, self.kernel_name, self.target, forms_of(self.problem))

    @property
    def meaning(self) -> str:
        """What the word says, in a sentence."""
        return meaning_of(self.backend, self.kernel_name, self.target, forms_of(self.problem))

    @property
    def status(self) -> str:
        """The word, and what keeps a call from running the kernel without being asked."""
        if not self.kernel.launcher:
            return "planned, its kernel is not implemented yet"
        return self.word if self.runs_today else f"{self.word}, only with backend={self.backend!r}"

    def explain(self) -> str:
        """What would run and why, as text."""
        lines = [
            str(self.problem),
            f"on {target_by_name(self.target)}",
            f"kernel: {self.backend} {self.kernel_name} ({self.status})",
            *([f"made for Triton {self.triton}"] if self.triton else []),
            *(f"passed over: {reason}" for reason in self.passed_over),
            *(f"  {line}" for line in self.config_lines()),
        ]
        return "\n".join(lines)

    def config_lines(self) -> list[str]:
        """How the config's numbers came about, one line each."""
        return self.kernel.explain(self.config, self.problem)

    def to_json(self) -> dict[str, Any]:
        """Plain values only; `Plan.from_json` is the way back."""
        return {
            "problem": self.problem.to_json(),
            "target": self.target,
            "backend": self.backend,
            "kernel": self.kernel_name,
            "config": encode(self.config),
            "passed_over": list(self.passed_over),
            "triton": self.triton,
        }

    @classmethod
    def from_json(cls, data: str | dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote, from its values or from their JSON text.

        Every field is checked. What is accepted is a plan of its kernel that can be explained.
        """
        values = parse_json("plan", data) if isinstance(data, str) else data
        if not isinstance(values, dict) or set(values) != set(_KEYS):
            got = sorted(map(str, values)) if isinstance(values, dict) else type(values).__name__
            raise InvalidArgument("plan", f"an object with {', '.join(_KEYS)}", shown(got))
        strings = ("target", "backend", "kernel", "triton")
        target, backend, name, triton = (decode(key, str, values[key]) for key in strings)
        chip = target_by_name(target)
        families = ("reference", *(family.name for family in families_of(chip)))
        if backend not in families:
            raise InvalidArgument("backend", "one of " + ", ".join(families), shown(backend))
        if not _VERSION.fullmatch(triton):
            raise InvalidArgument("triton", 'a version such as "3.6", or ""', shown(triton))
        kernel = family_named(backend).kernel_named(name)
        plan = cls(
            problem=decode_problem(values["problem"]),
            target=chip.name,
            backend=backend,
            kernel_name=name,
            config=decode("config", kernel.config, values["config"]),
            passed_over=decode("passed_over", tuple[str, ...], values["passed_over"]),
            triton=triton,
        )
        plan._require_sense()
        return plan

    def _require_sense(self) -> None:
        """Rejects a config that the kernel cannot have, or that its arithmetic fails on."""
        try:
            reason = self.kernel.why_not(self.config, self.problem, target_by_name(self.target))
            if not reason:
                _ = self.explain(), self.block
        except OpenMLAError:
            raise
        except Exception as error:  # numbers that no planner chose, divided by one another
            reason = f"{type(error).__name__}: {error}"
        if reason:
            expected = f"a plan of {self.backend}'s kernel {self.kernel_name}"
            raise InvalidArgument("config", expected, reason)


def family_named(name: str) -> Family:
    """The family of a backend that is not "auto"."""
    if name not in _BY_NAME:
        raise InvalidArgument("backend", "one of " + ", ".join(_BY_NAME), repr(name))
    return _BY_NAME[name]


def families_of(target: Target) -> tuple[Family, ...]:
    """Families that "auto" tries on a chip, best first; the reference is never among them."""
    return tuple(f for f in FAMILIES if f is not REFERENCE and f.runs_on(target))


def masks_keys(target: Target) -> bool:
    """Whether the chip's own dense kernel takes a mask of keys: then DSA has a masked form.

    >>> masks_keys(target_by_name("h200")), masks_keys(target_by_name("a100"))
    (True, False)
    """
    own = families_of(target)[0]
    kernels = () if own is PORTABLE else own.of_form("dense")
    return any(kernel.serves.takes("has_key_mask", True) for kernel in kernels)


def least_table_keys(target: Target, heads: int, d_v: int) -> int:
    """Keys that block tables should have room for, where their width follows from the longest
    request of a batch. The chip's own latent kernel may split no keys: then wide tables go to the
    portable one, which does, and with narrow ones a request's kernel would follow from its
    neighbors. 0 where one kernel has all tables.

    >>> [least_table_keys(target_by_name(chip), 128, 512) for chip in ("h200", "b200")]
    [0, 8193]
    """
    kernels = families_of(target)[0].of_form("latent")
    unsplit = any(kernel.slower is why_slower_unsplit for kernel in kernels)
    return LatentSplit(heads, d_v).least_keys if unsplit else 0


@lru_cache(maxsize=4096)
def cached_plan(
    problem: AnyProblem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> Plan:
    """The plan; raises Unsupported with every family's reason and the nearest supported form."""
    families = families_of(target)
    names = [family.name for family in families]
    if backend not in ("auto", "reference", *names):
        raise Unsupported(
            f"backend {backend!r} has no {problem.form} kernel for target {target.name!r}",
            nearest=f"backend 'auto' (there: {', '.join(names)})",
        )
    passed_over = [
        f"{family.name}: {family.near_misses[target.arch]}"
        for family in FAMILIES
        if target.arch in family.near_misses and family.of_form(problem.form)
    ]
    for family in families if backend == "auto" else (family_named(backend),):
        choice = family.choose(problem, target, triton, named=backend != "auto")
        if not choice.reason:
            return Plan(
                problem=problem,
                target=target.name,
                backend=family.name,
                kernel_name=choice.kernel,
                config=choice.config,
                passed_over=(*passed_over, *choice.passed_over),
                triton=version_text(target, triton),
            )
        passed_over.append(choice.reason)
    nearest = _nearest(problem, target, len(families), backend)
    raise Unsupported("; ".join(passed_over), nearest=nearest)


def plan_after(plan: Plan) -> Plan | None:
    """The plan of another kernel of the portable family, where the plan's kernel is not plain
    Triton; None where it is, and for all other families.

    >>> from openmla.indexer.problem import IndexProblem
    >>> problem = IndexProblem(form="select", topk=64, total_q=8, width=512)
    >>> first = cached_plan(problem, target_by_name("a100"), "auto", NEWEST_TRITON)
    >>> first.kernel_name, plan_after(first).kernel_name, plan_after(plan_after(first))
    ('select_gluon', 'select', None)
    """
    if (plan.backend, plan.kernel_name) not in GLUON:
        return None
    target, family = target_by_name(plan.target), family_named(plan.backend)
    triton = tuple(map(int, plan.triton.split("."))) if plan.triton else None
    names = {kernel for name, kernel in GLUON if name == plan.backend}
    choice = family.choose(plan.problem, target, triton, named=True, without=names)
    if choice.reason:
        return None
    return replace(plan, kernel_name=choice.kernel, config=choice.config)


def version_text(target: Target, triton: tuple[int, ...] | None) -> str:
    """A version of Triton as plans say it; empty where none was given, or none runs.

    >>> version_text(target_by_name("h200"), (3, 6)), version_text(target_by_name("cpu"), (3, 6))
    ('3.6', '')
    """
    if triton is None or target.vendor == "cpu":
        return ""
    return ".".join(map(str, triton[:2]))


def _nearest(problem: AnyProblem, target: Target, families: int, backend: str) -> str:
    """What to change so that something would serve the problem."""
    if target.vendor != "cpu" and not target.has_bf16:  # no other dtype or width helps there
        return "the same call with tensors on a CPU, or backend='reference'"
    if backend != "auto" and families > 1:
        return "backend='auto', which may take another kernel family"
    if not isinstance(problem, Problem):
        return "backend='reference'"
    if isinstance(problem, BackwardProblem):
        return "the same call under torch.no_grad(), or backend='reference'"
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if dtypes != {"bf16"}:
        return "bf16 tensors and a bf16 cache, or backend='reference'"
    return "the dims of a known model (openmla.planning.models), or backend='reference'"
