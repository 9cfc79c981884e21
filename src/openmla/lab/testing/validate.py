"""The first day with a chip: every kernel of its family, from one tile to a pair of CTAs.

`STEPS` rise in difficulty, so the first one that fails says most. Each step is run in a child
process with a time limit: what hangs or faults is a finding, and the next step gets a fresh child.
The same steps run in the simulator on a machine without the chip, which shows that each is one the
kernels take.

    report = validate("b200")            # on a B200
    report = validate("b200", simulated=True)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from openmla.errors import InvalidArgument, Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.checker import Checker
from openmla.lab.testing.fuzz import child_for
from openmla.lab.testing.isolate import AnyCase, Child, end_all
from openmla.lab.testing.result import Result, refusal
from openmla.lab.testing.sources import SourcesCase, new_results, operands
from openmla.planning import NEWEST_TRITON, TARGETS
from openmla.planning.registry import families_of

SECONDS_PER_CASE = 120.0  # a first compilation is among them
_DENSE = Case("dense", 1, 128, 64, 128, q_lens=(16,), k_lens=(16,))
_WIDE = replace(_DENSE, d_nope=192, d_v=256)
_MANY = replace(_DENSE, heads=2, q_lens=(300,), k_lens=(300,))
_RAGGED = replace(_DENSE, heads=2, q_lens=(1, 0, 129, 64), k_lens=(70, 5, 129, 0), spare=3)
_SPARSE = Case("sparse", 64, 512, 64, 512, q_lens=(1,), k_lens=(150,), topk=64, scale=0.04)
_LISTS = replace(_SPARSE, q_lens=(5,), topk=129, index_kind="mixed", topk_lengths="ragged")
_LATENT = Case(
    "latent", 16, 512, 64, 512, q_lens=(4,), k_lens=(60,), kv="bf16", page_size=64, scale=0.04
)
STEPS: dict[str, tuple[Case, ...]] = {
    "one tile": (replace(_DENSE, causal=False), _DENSE, _SPARSE, _LATENT),
    "several tiles": (
        _MANY,
        replace(_MANY, causal=False),
        replace(_MANY, dtype="fp16"),
        replace(_SPARSE, topk=256, k_lens=(300,)),
        replace(_LATENT, q_lens=(9,), k_lens=(300,)),
        replace(_DENSE, heads=10, q_lens=(2048,), k_lens=(90,)),  # a pair of CTAs on a B200
    ),
    "ragged": (
        _RAGGED,
        replace(_RAGGED, sink="mixed", values="rising"),
        _LISTS,
        replace(_LATENT, q_lens=(1, 0, 33), k_lens=(65, 5, 130), spare=2),
    ),
    "other widths": (
        _WIDE,
        replace(_WIDE, q_lens=(130, 5), k_lens=(200, 66)),
        replace(_MANY, d_nope=64, d_rope=32, d_v=64),
        replace(_MANY, d_rope=0, rope="none"),
        replace(_MANY, d_nope=256, d_rope=0, d_v=256, rope="none"),
        replace(_MANY, d_nope=64),
        replace(_LISTS, d_rope=0, rope="none"),
        replace(_LATENT, d_nope=256, d_v=256),
    ),
    "paged": (
        replace(_RAGGED, rope="cache", kv="bf16", page_size=64),
        replace(_RAGGED, rope="cache", kv="bf16", page_size=16),
        replace(_WIDE, q_lens=(130,), k_lens=(200,), rope="cache", kv="bf16", page_size=64),
        replace(_LISTS, kv="bf16", page_size=64),
        replace(_LATENT, q_lens=(1, 0, 33), k_lens=(65, 5, 130), spare=2, page_size=16),
    ),
    "FP8": (
        replace(_MANY, dtype="e4m3"),
        replace(_MANY, dtype="e4m3", side_dtype="bf16"),
        replace(_RAGGED, dtype="e4m3", q_scale=True, k_scale=True),
        replace(_LISTS, kv="fp8_656", page_size=64),
        replace(_LISTS, kv="fp8_block64"),
        replace(_LISTS, dtype="e4m3"),
        replace(_LATENT, kv="fp8_656"),
        replace(_LATENT, kv="fp8_block64", q_lens=(3, 2), k_lens=(70, 130)),
        replace(_LATENT, d_rope=0, rope="none", kv="fp8_584"),
        replace(_LISTS, dtype="e4m3", kv="fp8_token", page_size=64),
        replace(_LATENT, dtype="e4m3", kv="fp8_token"),
        replace(_MANY, dtype="e4m3", d_rope=0, rope="none"),
    ),
    "windows": (
        replace(_MANY, window=128),
        replace(_RAGGED, window=65, sink="mixed"),
        replace(_MANY, window=50, key_mask="half"),
        replace(_RAGGED, window=40, rope="cache", kv="bf16", page_size=16),
        replace(_MANY, window=128, dtype="e4m3"),
        replace(_WIDE, q_lens=(130,), k_lens=(200,), window=33),
        replace(_LATENT, q_lens=(9, 3), k_lens=(300, 130), window=128),
        replace(_LATENT, q_lens=(9, 3), k_lens=(300, 130), window=65, kv="fp8_656"),
        replace(_LATENT, heads=128, q_lens=(2,), k_lens=(420,), window=300),
    ),
    "grouped heads": (
        replace(_MANY, heads=4, group=2, q_lens=(140,)),
        replace(_RAGGED, heads=6, group=6, sink="mixed"),
    ),
    "fp32 outputs": tuple(
        replace(case, out="aligned", fp32_out=True)
        for case in (
            _RAGGED,
            replace(_MANY, dtype="e4m3"),
            replace(_WIDE, q_lens=(130,), k_lens=(200,)),
            _LISTS,
            replace(_LATENT, q_lens=(3, 2), k_lens=(70, 130), kv="fp8_block64"),
            replace(_LATENT, q_lens=(1, 1), k_lens=(4200, 70)),
        )
    ),
    "128 heads": (
        replace(_SPARSE, heads=128),
        replace(_LISTS, heads=128, sink="normal"),
        replace(_LISTS, heads=128, kv="fp8_656", page_size=64),
        replace(_LATENT, heads=128, k_lens=(300,)),
        replace(_LATENT, heads=128, k_lens=(300,), kv="fp8_656"),
    ),
    "few queries of many keys": (
        replace(_LATENT, q_lens=(1, 1), k_lens=(4200, 70), sink="normal"),
        replace(_LATENT, q_lens=(2,), k_lens=(4200,), heads=128),
        replace(_LATENT, q_lens=(1,), k_lens=(4200,), kv="fp8_656"),
    ),
}
OPTIONS = {"windows": "window", "grouped heads": "group", "fp32 outputs": "fp32_out"}
"""Steps of the families whose kernels serve this field of a problem."""
SEVERAL_SOURCES = "several sources"
_LONG = SourcesCase(first=(128,), second=(512,), heads=64)  # spread over the chip
SOURCES = (
    SourcesCase(first=(1,), second=(65,)),
    SourcesCase(heads=64),
    SourcesCase(kinds=("span", "list"), pages=(64, 2), heads=64, seed=1),
    SourcesCase(kinds=("span", "span"), pages=(64, 2), heads=128, sink=False, seed=3),
    SourcesCase(kinds=("span", "list"), formats=("bf16", "fp8_584"), pages=(16, 2), seed=5),
    SourcesCase(kinds=("span",), formats=("bf16",), pages=(24,), seed=9),
    # Pools too large to be dequantized whole.
    SourcesCase(kinds=("span", "list"), pages=(64, 64), heads=64, seed=6, spare=600),
    SourcesCase(kinds=("span",), pages=(64,), heads=16, seed=7, spare=1100),
    _LONG,
    replace(_LONG, kinds=("span", "list"), lengths=False, heads=8, seed=2),
    # Results that are turned back.
    SourcesCase(kinds=("span", "list"), pages=(64, 2), heads=64, seed=11, turned=64),
    SourcesCase(kinds=("list",), formats=("bf16",), heads=70, seed=12, turned=64),
    replace(_LONG, kinds=("span", "list"), seed=13, turned=64),
)
"""A step of the families that have a kernel for it: windows, lists and spans in one softmax."""
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """One case of a step."""

    step: str
    case: AnyCase
    result: Result
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """For the file that is sent back."""
        return {
            "step": self.step,
            "case": self.case.to_json(),
            "seconds": round(self.seconds, 2),
            **asdict(self.result),
        }


@dataclass
class Validation:
    """What a run found."""

    target: str
    family: str
    simulated: bool
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False
    """Somebody ended it with Ctrl-C: cases are missing."""

    @property
    def ok(self) -> bool:
        """Nothing failed, and something ran in every step."""
        ran = {o.step for o in self.outcomes if o.result.status == "right"}
        failed = any(o.result.status == "failed" for o in self.outcomes)
        return not failed and not self.interrupted and ran == set(steps_of(self.target))

    def counts(self, step: str) -> dict[str, int]:
        """How many cases of a step are right, refused and failed."""
        found = [o.result.status for o in self.outcomes if o.step == step]
        return {status: found.count(status) for status in ("right", "refused", "failed")}

    def to_json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "target": self.target,
            "family": self.family,
            "simulated": self.simulated,
            "interrupted": self.interrupted,
            "ok": self.ok,
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }


def validate(
    target: str,
    *,
    simulated: bool = False,
    device: str = "cuda",
    jobs: int = 1,
    tell: Tell = lambda line: None,
) -> Validation:
    """Run all steps with the kernels of the target's own family; a failure does not end a run.

    Ctrl-C does, and what was found so far is the report. On a device `jobs` children run at once:
    most of the time goes to the compiler.
    """
    family = families_of(TARGETS[target])[0].name
    report = Validation(target, family, simulated)
    runs = _simulated(target) if simulated else _on_device(target, family, device, jobs)
    try:
        for step, case, result, seconds in runs:
            report.outcomes.append(Outcome(step, case, result, seconds))
            tell(f"{step}: {case}: {result.status} {result.message}".rstrip())
    except KeyboardInterrupt:
        report.interrupted = True
    order = {case: number for number, case in enumerate(_cases(target))}
    report.outcomes.sort(key=lambda o: order[o.step, o.case])
    return report


Ran = tuple[str, AnyCase, Result, float]


def steps_of(target: str) -> dict[str, tuple[AnyCase, ...]]:
    """The steps of the target's own family."""
    family = families_of(TARGETS[target])[0]
    steps: dict[str, tuple[AnyCase, ...]] = {
        step: cases
        for step, cases in STEPS.items()
        if step not in OPTIONS
        or any(kernel.serves.mentions(OPTIONS[step]) for kernel in family.kernels)
    }
    op = operands(SOURCES[0])
    problem = op.problem(new_results(op))
    if not family.choose(problem, TARGETS[target], NEWEST_TRITON, named=True).reason:
        steps[SEVERAL_SOURCES] = SOURCES
    return steps


def _cases(target: str) -> Iterator[tuple[str, AnyCase]]:
    return ((step, case) for step, cases in steps_of(target).items() for case in cases)


def _on_device(target: str, family: str, device: str, jobs: int) -> Iterator[Ran]:
    """Cases as they are done; each thread asks a child of its own."""
    own = threading.local()
    children: list[Child] = []

    def run(step: str, case: AnyCase) -> Ran:
        if not hasattr(own, "child"):
            own.child = child_for(Checker(family, device), SECONDS_PER_CASE, deep_every=1)
            children.append(own.child)
        started = time.monotonic()
        answer = own.child.ask_or_blame(case)
        return step, case, Result(**answer), time.monotonic() - started

    pool = ThreadPoolExecutor(jobs)
    try:
        for done in as_completed([pool.submit(run, step, case) for step, case in _cases(target)]):
            yield done.result()
    finally:
        end_all(pool, children)


def _simulated(target: str) -> Iterator[Ran]:
    from openmla.lab.testing import simulate

    for step, case in _cases(target):
        started = time.monotonic()
        try:
            if isinstance(case, SourcesCase):
                result = simulate.check_simulated_sources(case, target)
            else:
                result = simulate.check_simulated(case, target)
        except (InvalidArgument, Unsupported) as error:
            result = Result("refused", message=refusal(error))
        yield step, case, result, time.monotonic() - started
