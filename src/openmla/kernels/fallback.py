"""What happens when the Triton that is installed cannot import or compile a kernel.

Gluon is experimental: a release of Triton may rename a call, or refuse a program that an earlier
one compiled. A call with `backend="auto"` is then served by the portable kernel, which uses nothing
experimental, and a `PortableFallback` warning says so once per kernel. A call that names its
backend gets `Unsupported`. Every plan comes through `without_failed`, so that a kernel fails once.

This module imports no Triton: a machine without a GPU need not have one.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar

from openmla.errors import Unsupported
from openmla.planning import Plan
from openmla.planning.registry import plan_after

DOCS = "https://openmla.github.io/openmla/triton/"


R = TypeVar("R")


class PortableFallback(UserWarning):
    """This Triton cannot compile a chip's own kernel; the portable kernel serves the call."""


class NotCompiled(Exception):
    """A kernel cannot be imported or compiled; caught in this module."""


_failed: dict[tuple[str, str], str] = {}
_warned: set[str] = set()


def launcher_of(plan: Plan) -> Any:
    """The module whose `calls` lists the launches of a plan; raises NotCompiled."""
    name = plan.kernel.launcher
    try:
        return import_module(name)
    except Exception as error:  # a renamed call, a decorator with another signature, …
        if plan.backend in ("cpu", "reference"):
            raise
        raise NotCompiled(f"{type(error).__name__}: {error}") from error


def run_calls(calls: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Launch calls in order; raises NotCompiled if it is the compiler that refuses one of them.

    Errors of the compiler have no type of their own, so a call that failed is compiled once more,
    without a launch: if that works, the error was of the launch and is the caller's to see. So is
    every error of a call that runs on the host, which has nothing to compile.
    """
    made = []
    for call in calls:
        try:
            made.append((call, call.run()))
        except Unsupported:
            raise
        except Exception as error:
            if not hasattr(call, "compile"):
                raise
            try:
                call.compile()
            except Exception:
                lines = str(error).strip().splitlines() or [""]
                reason = f"{call.kernel.__name__}: {type(error).__name__}: {lines[-1]}"
                raise NotCompiled(reason) from error
            raise
    return made


def run_plan(plan_call: Callable[[], Plan], launch: Callable[[Plan], R]) -> tuple[Plan, R]:
    """Plan and launch; after a kernel that cannot be compiled, plan and launch once more.

    `plan_call` asks `without_failed`, so that the second plan is another one or a typed error.
    """
    while True:
        plan = plan_call()
        try:
            return plan, launch(plan)
        except NotCompiled as failure:
            _remember(plan, failure)


def without_failed(choose: Callable[[str], Plan], backend: str) -> Plan:
    """The plan that `choose` finds for a backend, unless its kernel failed before.

    Instead of such a kernel, "auto" takes the portable one; a named backend is refused. Instead of
    one of the portable family that is written in Gluon, both take the one in plain Triton.
    """
    plan = choose(backend)
    reason = why_failed(plan)
    if reason and backend == "auto" and plan.backend != "portable":
        portable = choose("portable")
        passed_over = (*plan.passed_over, f"{plan.backend}: {reason}")
        plan = replace(portable, passed_over=passed_over)
        reason = why_failed(plan)
    if reason and (other := plan_after(plan)) is not None:
        plan = replace(other, passed_over=(*plan.passed_over, f"{plan.kernel_name}: {reason}"))
        reason = why_failed(plan)
    if reason:
        nearest = "" if plan.backend == "portable" else "backend='auto', the portable kernel"
        raise Unsupported(f"{plan.backend}: {reason}", nearest=nearest)
    return plan


def why_failed(plan: Plan) -> str:
    """Why the kernel of a plan could not be compiled in this process; empty if nobody tried."""
    whole = _failed.get((plan.kernel.launcher, ""), "")
    return whole or _failed.get((plan.kernel.launcher, repr(plan.config)), "")


def forget() -> None:
    """Try kernels again that failed, and warn again."""
    _failed.clear()
    _warned.clear()


def _remember(plan: Plan, failure: NotCompiled) -> None:
    """A module that cannot be imported serves no plan; a kernel may compile for other numbers."""
    launcher = plan.kernel.launcher
    imported = not isinstance(failure.__cause__, ImportError | AttributeError)
    _failed[launcher, repr(plan.config) if imported else ""] = str(failure)
    if (plan.backend != "portable" or plan_after(plan)) and launcher not in _warned:
        _warned.add(launcher)
        warnings.warn(
            f"openmla's kernel {launcher.removesuffix('.launch')} does not compile with "
            f"{versions()}, so calls with backend='auto' use the portable kernel, which is slower "
            f"({failure}). What to do: {DOCS}",
            PortableFallback,
            stacklevel=2,
        )


def versions() -> str:
    """The versions that decide which kernels compile.

    >>> versions().split()[0]
    'triton'
    """
    found = []
    for name in ("triton", "torch", "openmla"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} (version unknown)")
    return ", ".join(found)
