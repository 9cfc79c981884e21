"""The interface of a kernel family: what it serves, how it plans, what a block takes of the chip.

A `Family` is a list of `Kernel` declarations; `openmla.planning.registry` holds all of them in one
table, and everything that depends on a family is asked of its declaration.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openmla.errors import InvalidArgument, Unsupported
from openmla.planning.memory import Columns, MemoryMap
from openmla.planning.problems import AnyProblem
from openmla.planning.serves import Serves
from openmla.planning.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What overlaps in a block: groups of rows, and the slots that their keys and values take."""

    groups: int
    """Softmax groups."""
    rows: int
    """Query rows of one group."""
    keys: int
    """Keys of one block."""
    d_qk: int
    d_v: int
    element: int
    k_slots: int
    v_slots: int
    """0 when V is part of the row that K is; -1 when K and V take turns in k_slots slots."""
    shares_keys: bool = True
    """Whether all groups work on every block, or take turns."""
    v_element: int = 0
    """Bytes of an element of V, where they are not those of K; 0: they are."""

    def element_of(self, kind: str) -> int:
        """Bytes of an element of "k" or "v"."""
        return (self.v_element if kind == "v" else 0) or self.element


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of a kernel: the same questions for every family."""

    tile_rows: int
    """Query rows of the block: tokens, or heads of tokens."""
    tile_keys: int
    """Keys of one step."""
    stages: int
    """Steps whose keys are in flight."""
    threads: int
    memory: MemoryMap
    """Shared memory (LDS), region by region."""
    pipeline: Pipeline | None = None
    """None for kernels without a softmax."""
    tensor_memory: tuple[Columns, ...] = ()
    registers: int = 0
    """Registers of the block that the plan fixes; 0 where the compiler decides."""


class Choice(NamedTuple):
    """A family's answer to a problem: a config, or why there is none."""

    config: Any
    reason: str
    kernel: str = ""
    """Name of the kernel that the config is for."""
    passed_over: tuple[str, ...] = ()
    """Kernels that would have come first, each with the reason that it does not run."""


def no_reason(config: Any, problem: Any) -> str:
    """For kernels that run whenever they are planned."""
    return ""


def always_compiled(problem: Any, triton: tuple[int, ...]) -> str:
    """For kernels that every version from their first on compiles."""
    return ""


def one_way(config: Any, problem: Any) -> None:
    """For kernels whose launches are the same for every problem that they serve."""


def given_windows(config: Any) -> bool:
    """For kernels of the indexer's scores that read windows."""
    return False


def own_lines(config: Any, problem: Any) -> list[str]:
    """What a config says of itself."""
    lines: list[str] = config.explain()
    return lines


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """One kernel of a family."""

    name: str
    """What a plan calls it: no other kernel of its family has this name."""
    serves: Serves
    config: type
    """Class of its configs: frozen, with `explain()` and `why_unsupported()`."""
    choose: Callable[[Any, Target], Any]
    """The config for a problem that `serves` lets through."""
    archs: tuple[str, ...] = ()
    """The architectures of the family that it runs on; empty: all of them."""
    launcher: str = ""
    """Module whose `calls` lists the launches of a plan; empty while there is no kernel."""
    first_triton: tuple[int, int] = (0, 0)
    """The first version that compiles it."""
    not_compiled: Callable[[Any, tuple[int, ...]], str] = always_compiled
    """Why a later version does not compile it for a problem; empty where it does."""
    variant: Callable[[Any, Any], Any] = one_way
    """Which launches a config takes for a problem: a frozen record, equal where the kernels, their
    constants and their workspaces are. Launchers read it, and a kept launch serves other token
    counts only if it is the same for them."""
    block: Callable[[Any, Any], Block] | None = None
    """What one block takes of a GPU; None on a CPU, and where the compiler alone decides."""
    explain: Callable[[Any, Any], list[str]] = own_lines
    slower: Callable[[Any, Any], str] = no_reason
    """Why another kernel is faster, so that this one runs only when its backend is named."""
    coarse: str = ""
    """Why results are less accurate than the contract asks: likewise only when it is named."""
    finds_windows: Callable[[Any], bool] = given_windows
    """Whether the indexer's scores over pages, with a config, need no windows: the kernel finds
    them, and writes them for a selection that may follow."""
    fp8_weights: bool = False
    """Whether it rounds weights to e4m3, as V is: the acceptance rule allows what that costs."""

    def plan(self, problem: AnyProblem, target: Target) -> Choice:
        """The config for a problem, or the reason that there is none."""
        reason = self._why_not_serve(problem, target)
        if reason:
            return Choice(None, reason)
        try:
            config = self.choose(problem, target)
        except Unsupported as error:
            return Choice(None, error.reason)
        except InvalidArgument as error:
            # A config refuses what it cannot even describe, such as pages that cut a swizzle.
            return Choice(None, str(error))
        return Choice(config, _why_unsupported(config), self.name)

    def why_not(self, config: Any, problem: AnyProblem, target: Target) -> str:
        """Why a config that came from elsewhere is no plan of this kernel; empty when it is."""
        return self._why_not_serve(problem, target) or _why_unsupported(config)

    def _why_not_serve(self, problem: AnyProblem, target: Target) -> str:
        reason = self.serves.why_not(problem)
        if not reason and self.archs and target.arch not in self.archs:
            reason = f"{target.arch}: the {self.name} kernel is made for {', '.join(self.archs)}"
        return reason

    def on_request(self, config: Any, problem: AnyProblem) -> str:
        """Why the kernel runs only when its backend is named; empty when it need not be."""
        return self.coarse or self.slower(config, problem)

    def why_not_run(self, problem: Any, triton: tuple[int, ...]) -> str:
        """Why this kernel does not run a problem with a version of Triton; empty when it does."""
        if not self.launcher:
            return "planned, its kernel is not implemented yet"
        major, minor = self.first_triton
        if triton < self.first_triton:
            return f"needs Triton {major}.{minor} or later"
        why = self.not_compiled(problem, triton)
        return f"does not compile with Triton {triton[0]}.{triton[1]}: {why}" if why else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Kernels for one kind of chip."""

    name: str
    archs: tuple[str, ...]
    """Architectures they run on; "gpu" stands for every GPU that Triton reaches."""
    kernels: tuple[Kernel, ...]
    """In the order they are tried."""
    near_misses: dict[str, str] = field(default_factory=dict)
    """Architectures one might expect to be served, with the reason they are not."""

    def runs_on(self, target: Target) -> bool:
        """Whether the family has kernels for a chip."""
        return target.arch in self.archs or ("gpu" in self.archs and target.vendor != "cpu")

    def of_form(self, form: str) -> tuple[Kernel, ...]:
        """Kernels that serve a form."""
        return tuple(k for k in self.kernels if form in k.serves.allowed["form"])

    def choose(
        self,
        problem: AnyProblem,
        target: Target,
        triton: tuple[int, ...] | None,
        named: bool,
        without: Collection[str] = (),
    ) -> Choice:
        """The config of the first kernel that serves the problem, or why none does.

        With a `triton` version, of the first that runs with it; `named` says that the caller asked
        for this family and no other: then of the first that serves, which may run when named only.
        Kernels `without` are passed over.
        """
        kernels = tuple(k for k in self.of_form(problem.form) if k.name not in without)
        if not kernels:
            return Choice(None, f"{self.name}: the {problem.form} form has no {self.name} kernel")
        waiting: dict[str, None] = {}  # in order, each reason once
        planned: Choice | None = None  # of kernels that run when named, where no other serves
        nearest = (-1, "")
        for kernel in kernels:
            config, reason, name, _ = kernel.plan(problem, target)
            if reason:
                nearest = max(nearest, (kernel.serves.misfit(problem)[0], reason))
                continue
            why = "" if triton is None else kernel.why_not_run(problem, triton)
            if not why and not named:
                asked_for = kernel.on_request(config, problem)
                why = f"runs when named, {asked_for}" if asked_for else ""
            if not why:
                return Choice(config, "", name, tuple(waiting))
            if triton is None and planned is None:
                planned = Choice(config, "", name)
            waiting[f"{self.name}: {why}"] = None
        if planned is not None:
            return planned
        # Kernels that serve the problem and do not run say more than those that do not serve it,
        # and of those the one that came nearest.
        return Choice(None, "; ".join(waiting) or f"{self.name}: {nearest[1]}")

    def kernel_named(self, name: str) -> Kernel:
        """The kernel of this name."""
        for kernel in self.kernels:
            if kernel.name == name:
                return kernel
        names = ", ".join(kernel.name for kernel in self.kernels)
        raise InvalidArgument("kernel", f"one of {names} ({self.name})", repr(name))


def _why_unsupported(config: Any) -> str:
    """The limit that a config breaks; the reference has no config."""
    return "" if config is None else str(config.why_unsupported())
