"""`Plan`: what will run. Data only: it prints itself, compares equal, and kernels obey it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from openmla.errors import InvalidArgument
from openmla.plan.blackwell_mla import MLAConfig
from openmla.plan.blackwell_sparse_prefill import MLAPrefillSparseFP8
from openmla.plan.blackwell_sparse_qkv_fp8 import MLAPrefillSparseQKVFP8
from openmla.plan.cpu import CpuConfig
from openmla.plan.families import fp8_cache_smem
from openmla.plan.hopper_dense import HopperDenseConfig
from openmla.plan.target import target_by_name
from openmla.problem import FORMS, Problem

# Where each config class lives. Names only, so that no family is imported before it is needed.
_CONFIG_MODULES = {
    "CacheRead": "hopper_cache",
    "CpuConfig": "cpu",
    "FA4Config": "blackwell_fa4",
    "HopperDenseConfig": "hopper_dense",
    "HopperSparseConfig": "hopper_sparse",
    "MLAConfig": "blackwell_mla",
    "MLAPrefillSparse": "blackwell_sparse_prefill",
    "MLAPrefillSparseFP8": "blackwell_sparse_prefill",
    "MLAPrefillSparseQKVFP8": "blackwell_sparse_qkv_fp8",
    "MlaConfigV2": "cdna4_config",
    "MlaPrefill16": "cdna4_16bit",
    "MlaPrefillV2": "cdna4_prefill",
    "MlaSparse16": "cdna4_sparse",
    "PortableConfig": "portable",
}
# Which of them a family plans a form with; the reference has none.
_CONFIGS: dict[tuple[str, str], tuple[str, ...]] = {
    **{("cpu", form): ("CpuConfig",) for form in FORMS},
    **{("portable", form): ("PortableConfig",) for form in FORMS},
    ("hopper", "dense"): ("HopperDenseConfig",),
    ("hopper", "latent"): ("HopperSparseConfig",),
    ("hopper", "sparse"): ("HopperSparseConfig",),
    ("blackwell", "dense"): ("MLAConfig", "FA4Config"),
    ("blackwell", "sparse"): (
        "MLAPrefillSparse", "MLAPrefillSparseFP8", "MLAPrefillSparseQKVFP8",
    ),
    ("cdna4", "dense"): ("MlaPrefillV2", "MlaPrefill16"),
    ("cdna4", "sparse"): ("MlaSparse16",),
}  # fmt: skip
_KEYS = ("problem", "target", "backend", "config", "passed_over")


@dataclass(frozen=True, slots=True)
class Plan:
    """The kernel that serves a problem on a target, and its numbers.

    >>> from openmla.plan import plan
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
    def runs_today(self) -> bool:
        """Whether the kernel exists already; a plan may be ahead of it."""
        from openmla.plan.support import has_kernel

        return has_kernel(self)

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
        if self.config is None:
            return ["the definition in float64, no tiling"]
        if isinstance(self.config, MLAPrefillSparseQKVFP8):
            return self.config.smem.explain()
        if isinstance(self.config, CpuConfig):
            return [f"{f.name} = {getattr(self.config, f.name)}" for f in fields(self.config)]
        lines = [*self.config.explain(), *self._query_tile_lines()]
        if isinstance(self.config, MLAPrefillSparseFP8):
            smem = fp8_cache_smem(self.config, self.problem)
            scales = f"{smem.size_of - self.config.smem_used} bytes of scales and their barriers"
            lines.append(f"FP8 cache: {scales} more, {smem.size_of} in all")
        split = getattr(self.config, "split", None)
        if split is not None:
            problem = self.problem
            requests = max(problem.batch, 1)
            q_len, k_len = -(-problem.total_q // requests), -(-problem.total_k // requests)
            lines.append(split.explain(q_len, k_len, requests))
        return lines

    def _query_tile_lines(self) -> list[str]:
        """Why one query tile was preferred to two, where both would fit."""
        config, problem = self.config, self.problem
        both_fit = isinstance(config, HopperDenseConfig) or (
            isinstance(config, MLAConfig) and not config.single_o
        )
        if not both_fit or config.num_qo != 1:
            return []
        requests = max(problem.batch, 1)
        mean = -(-problem.total_q // requests)
        if mean <= config.BM:
            return [f"1Q: {mean} queries a request fit one tile of {config.BM} rows"]
        blocks = (-(-problem.total_q // (2 * config.BM)) + requests - 1) * problem.heads
        sm_count = target_by_name(self.target).sm_count
        return [f"1Q: two tiles a block would make {blocks} blocks for {sm_count} SMs"]

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
        families = ("reference", *target_by_name(values["target"]).families)
        if values["backend"] not in families:
            raise InvalidArgument("backend", "one of " + ", ".join(families), values["backend"])
        problem = _record("problem", Problem, values["problem"])
        return cls(
            problem=problem,
            target=values["target"],
            backend=values["backend"],
            config=_config(values["config"], values["backend"], problem.form),
            passed_over=tuple(passed_over),
        )


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


def _config(value: Any, backend: str, form: str) -> Any:
    """The config of a plan: kernels read it without asking whose it is."""
    config = _decode(value)
    known = _CONFIGS.get((backend, form), ("NoneType",))
    if type(config).__name__ not in known:
        expected = f"{' or '.join(known)} for {backend} and form {form}"
        raise InvalidArgument("config", expected, type(config).__name__)
    return config


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    record = dict(value)
    name = record.pop("class", None)
    if not isinstance(name, str) or name not in _CONFIG_MODULES:
        raise InvalidArgument("config", "one of " + ", ".join(_CONFIG_MODULES), repr(name))
    config_class = getattr(import_module(f"openmla.plan.{_CONFIG_MODULES[name]}"), name)
    return _record("config", config_class, {key: _decode(item) for key, item in record.items()})
