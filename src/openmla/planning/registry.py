"""All kernel families in one table, the plan of a problem, and how one is chosen.

Everything that depends on a family is derived from the table. `Plan` is data only: it prints
itself, compares equal, and kernels obey it. A plan is that of the first kernel, in the families'
order, that serves the problem: of those that could run where no version of Triton is given, of
those that run with a version where one is.

>>> [family.name for family in families_of(target_by_name("h200"))]
['hopper', 'portable']
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from openmla.errors import InvalidArgument, Unsupported
from openmla.planning.blackwell.family import BLACKWELL
from openmla.planning.cdna4.family import CDNA4
from openmla.planning.family import Block, Family, Kernel
from openmla.planning.hopper.family import HOPPER
from openmla.planning.host.family import CPU, REFERENCE
from openmla.planning.portable.family import PORTABLE
from openmla.planning.target import Target, target_by_name
from openmla.problem import Problem

FAMILIES = (REFERENCE, CPU, HOPPER, BLACKWELL, CDNA4, PORTABLE)
"""Best first: a chip's own family before the portable one."""
BACKENDS = ("auto", *(family.name for family in FAMILIES))
NEWEST_TRITON = (3, 9)
"""The newest version that kernels are compiled with."""
_BY_NAME = {family.name: family for family in FAMILIES}
_KEYS = ("problem", "target", "backend", "config", "passed_over")


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernel that serves a problem on a target, and its numbers.

    >>> from openmla.planning import plan
    >>> p = plan(Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128,
    ...                  total_q=4096, total_k=4096), "h200")
    >>> p.backend, p.config.BM, p.config.BN, Plan.from_json(p.to_json()) == p
    ('hopper', 128, 128, True)
    """

    problem: Problem
    target: str
    backend: str
    """Kernel family: reference, cpu, portable, hopper, blackwell, cdna4."""
    config: Any
    """The family's own frozen config (CpuConfig, MLAConfig, …); None for the reference."""
    passed_over: tuple[str, ...] = ()
    """Families that would have come first, each with the reason it cannot serve the problem."""

    @property
    def kernel(self) -> Kernel:
        """The declaration of the kernel that this is a plan of."""
        family = _BY_NAME.get(self.backend)
        kernel = None if family is None else family.kernel_of(self.problem, self.config)
        if kernel is None:
            raise InvalidArgument("config", self._expected(), type(self.config).__name__)
        return kernel

    @property
    def block(self) -> Block | None:
        """What one block takes of the chip; None on a CPU."""
        block = self.kernel.block
        return None if block is None else block(self.config, self.problem)

    @property
    def runs_today(self) -> bool:
        """Whether the kernel exists and runs without being asked for; a plan may be ahead of it."""
        kernel = self.kernel
        return bool(kernel.launcher) and not kernel.on_request(self.config, self.problem)

    def explain(self) -> str:
        """What would run and why, as text."""
        status = "runs today" if self.runs_today else "planned, its kernel is not implemented yet"
        lines = [
            str(self.problem),
            f"on {target_by_name(self.target)}",
            f"kernel: {self.backend} {self.problem.form} ({status})",
            *(f"passed over: {reason}" for reason in self.passed_over),
            *(f"  {line}" for line in self.config_lines()),
        ]
        return "\n".join(lines)

    def config_lines(self) -> list[str]:
        """How the config's numbers came about, one line each."""
        return self.kernel.explain(self.config, self.problem)

    def _expected(self) -> str:
        """Classes of config that the family plans the form with."""
        family = _BY_NAME.get(self.backend)
        kernels = family.of_form(self.problem.form) if family else ()
        forms = [kernel.config.__name__ for kernel in kernels]
        return (
            f"{' or '.join(dict.fromkeys(forms))} for {self.backend} and form {self.problem.form}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values only; `Plan.from_json` is the way back."""
        return {
            "problem": self.problem.to_json(),
            "target": self.target,
            "backend": self.backend,
            "config": _encode(self.config),
            "passed_over": list(self.passed_over),
        }

    @classmethod
    def from_json(cls, data: str | dict[str, Any]) -> Plan:
        """The plan that `to_json` wrote, from its values or from their JSON text."""
        values = _parse(data) if isinstance(data, str) else data
        if not isinstance(values, dict) or set(values) != set(_KEYS):
            got = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise InvalidArgument("plan", f"an object with {', '.join(_KEYS)}", got)
        for name in ("target", "backend"):
            if not isinstance(values[name], str):
                raise InvalidArgument(name, "a string", repr(values[name]))
        passed_over = values["passed_over"]
        if not isinstance(passed_over, list) or not all(isinstance(x, str) for x in passed_over):
            raise InvalidArgument("passed_over", "a list of strings", repr(passed_over))
        chip = target_by_name(values["target"])
        families = ("reference", *(family.name for family in families_of(chip)))
        if values["backend"] not in families:
            raise InvalidArgument("backend", "one of " + ", ".join(families), values["backend"])
        plan = cls(
            problem=_record("problem", Problem, values["problem"]),
            target=values["target"],
            backend=values["backend"],
            config=_decode(values["config"]),
            passed_over=tuple(passed_over),
        )
        _ = plan.kernel  # raises for the config of another family or form
        return plan


def family_named(name: str) -> Family:
    """The family of a backend that is not "auto"."""
    return _BY_NAME[name]


def families_of(target: Target) -> tuple[Family, ...]:
    """Families that "auto" tries on a chip, best first; the reference is never among them."""
    return tuple(f for f in FAMILIES if f is not REFERENCE and f.runs_on(target))


@lru_cache(maxsize=4096)
def cached_plan(
    problem: Problem, target: Target, backend: str, triton: tuple[int, ...] | None
) -> Plan:
    """The plan; raises Unsupported with every family's reason and the nearest supported form."""
    nearest = _nearest(problem, len(families_of(target)), backend)
    chosen = first_that_serves(problem, target, backend, triton, FAMILIES, nearest)
    name, config, passed_over = chosen
    return Plan(problem, target.name, name, config, passed_over)


def first_that_serves(
    problem: Any, target: Target, backend: str, triton: tuple[int, ...] | None,
    table: tuple[Family, ...], nearest: str,
) -> tuple[str, Any, tuple[str, ...]]:  # fmt: skip
    """Of a table of families: the name of the one that serves, its config, and who was passed over.

    `nearest` is what to suggest when none does.
    """
    families = [f for f in table if f.name != "reference" and f.runs_on(target)]
    names = [family.name for family in families]
    if backend not in ("auto", "reference", *names):
        raise Unsupported(
            f"backend {backend!r} has no {problem.form} kernel for target {target.name!r}",
            nearest=f"backend 'auto' (there: {', '.join(names)})",
        )
    passed_over = [
        f"{family.name}: {family.near_misses[target.arch]}"
        for family in table
        if target.arch in family.near_misses
    ]
    for family in families if backend == "auto" else [f for f in table if f.name == backend]:
        choice = family.choose(problem, target, triton, named=backend != "auto")
        if not choice.reason:
            return family.name, choice.config, (*passed_over, *choice.passed_over)
        passed_over.append(choice.reason)
    raise Unsupported("; ".join(passed_over), nearest=nearest)


def _nearest(problem: Problem, families: int, backend: str) -> str:
    """What to change so that something would serve the problem."""
    if backend != "auto" and families > 1:
        return "backend='auto', which may take another kernel family"
    dtypes = {problem.q_dtype, problem.kv_dtype, problem.v_dtype, problem.rope_dtype}
    if dtypes != {"bf16"}:
        return "bf16 tensors and a bf16 cache, or backend='reference'"
    return "the dims of a known model (openmla.planning.models), or backend='reference'"


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgument("plan", "JSON", str(error)) from None


def _record(name: str, record_class: type, values: Any) -> Any:
    """An instance from its fields; missing and unknown ones are a wrong argument, not a bug."""
    if not isinstance(values, dict):
        raise InvalidArgument(name, f"an object with the fields of {record_class.__name__}", values)
    try:
        return record_class(**values)
    except TypeError as error:
        raise InvalidArgument(name, f"the fields of {record_class.__name__}", str(error)) from None


def _encode(value: Any) -> Any:
    """A config as plain values, each record with the name of its class."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    record = {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    return {"class": type(value).__name__, **record}


@lru_cache(maxsize=1)
def _records() -> dict[str, type]:
    """Config classes and the records inside them, by name."""
    configs = [kernel.config for family in FAMILIES for kernel in family.kernels]
    found: dict[str, type] = {}
    for config in (kind for kind in configs if is_dataclass(kind)):
        hints = get_type_hints(config)
        inner: list[type] = [hints[f.name] for f in fields(config)]
        found |= {kind.__name__: kind for kind in (config, *inner) if is_dataclass(kind)}
    return found


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    record = dict(value)
    name = record.pop("class", None)
    known = _records()
    if not isinstance(name, str) or name not in known:
        raise InvalidArgument("config", "one of " + ", ".join(sorted(known)), repr(name))
    return _record("config", known[name], {key: _decode(item) for key, item in record.items()})
