"""Gradient cases on the dense backward kernels of a Gluon family, by way of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from gluon_sim import Kind, Limits, Report, intercept, unreserved
from kernels.far_memory import FarMemory
from kernels.mutants import Defect
from openmla.backward.operands import EVERY, Gradients, Wanted
from openmla.backward.reference import Saved
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_twice
from openmla.lab.testing.gradients import BuiltGradients, GradientCase, build_gradients
from openmla.lab.testing.memory import Memory
from openmla.planning import Plan, cached_plan, target_by_name

LIMITS = Limits(steps=20_000)

V3 = Case("dense", 2, 128, 64, 128, q_lens=(70, 33, 5), k_lens=(70, 300, 2), spare=3)
NARROW = replace(V3, d_nope=64, d_rope=32, d_v=64)
# One row into a tile, a block, half of a tile; and one row less.
EDGES = replace(NARROW, heads=1, q_lens=(3, 65, 129, 63), k_lens=(129, 65, 257, 191), spare=0)
CASES: dict[str, GradientCase] = {
    "causal": GradientCase(V3),
    "full": GradientCase(replace(V3, causal=False)),
    "gradient of lse": GradientCase(V3, d_lse=True),
    "sink": GradientCase(replace(V3, sink="mixed")),
    "rope per head": GradientCase(replace(V3, rope="per_head")),
    "128+0": GradientCase(replace(V3, d_rope=0, rope="none")),
    "edges": GradientCase(EDGES),
    "edges, full, sink": GradientCase(replace(EDGES, causal=False, sink="normal")),
    "edges, 128+64": GradientCase(
        replace(V3, heads=1, q_lens=(129, 65), k_lens=(128, 257)), d_lse=True
    ),
    "more queries than keys": GradientCase(
        replace(NARROW, q_lens=(200, 0, 3, 64), k_lens=(50, 10, 0, 64))
    ),
    "more keys than queries": GradientCase(replace(NARROW, q_lens=(1, 40), k_lens=(300, 170))),
    "no sequences": GradientCase(replace(NARROW, q_lens=(), k_lens=(), spare=4)),
    "40 sequences": GradientCase(replace(NARROW, heads=1, q_lens=(1,) * 40, k_lens=(3,) * 40)),
    "negative scale": GradientCase(replace(NARROW, scale=-0.1)),
    "scale 0": GradientCase(replace(NARROW, scale=0.0)),
    "peaky": GradientCase(replace(NARROW, values="peaky")),
    "small gradients": GradientCase(replace(NARROW), d_out="small"),
    "strided": GradientCase(replace(NARROW, layout="aligned")),
    "5 heads": GradientCase(replace(NARROW, heads=5, q_lens=(20,), k_lens=(30,))),
}
# Rings of both passes turn several times, over several work items of a program.
RINGS = GradientCase(replace(NARROW, heads=1, q_lens=(260, 130), k_lens=(300, 400), causal=False))
FAR_ROWS = 2**29
"""Rows of the statistics of one head, as many as tokens: with four heads they pass 2^31."""
# Four tokens and four heads at least: half of them lie past element 2^31 in far memory.
FAR = GradientCase(
    replace(NARROW, heads=4, q_lens=(8, 1), k_lens=(8, 70), rope="per_head"),
    d_lse=True,
)


LATER = (
    "edges",
    "strided",
    "192+64→256, edges",
    "192+64→256, full, sink",
    "192+64→256, negative scale, strided",
)
"""Cases that `make test` has from plans (lengths at their edges, and uneven memory), or in other
widths."""


def names_of(cases: Mapping[str, GradientCase]) -> list[Any]:
    """The names of cases, those that are run later marked."""
    return [pytest.param(n, marks=pytest.mark.long) if n in LATER else n for n in cases]


@dataclass(frozen=True)
class BackwardDefect(Defect):
    """A seeded defect of a backward pass, with the case that it shows in."""

    case: str = "causal"


def on(case: GradientCase, background: str = "zero") -> BuiltGradients:
    """A case on the CPU; `background` fills what it does not address."""
    return build_gradients(case, Memory("cpu", background))


def forward(built: BuiltGradients) -> Saved:
    """out and lse, by the CPU kernel."""
    with torch.no_grad():
        return Saved(*openmla.mla_prefill(**built.built.arguments, return_lse=True))


def moved(x: Tensor | None, memory: Memory) -> Tensor | None:
    """A copy that lies in another memory."""
    return None if x is None else memory.new(x.shape, x.dtype).copy_(x)


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all gradients are equal, signs of zeros too."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    pairs = ((got[name], want[name]) for name in want)
    return all(torch.equal(*(x.contiguous().view(integer[x.dtype]) for x in p)) for p in pairs)


def as_built(built: BuiltGradients) -> BuiltGradients:
    """A case as it is."""
    return built


def deep_scores(built: BuiltGradients) -> BuiltGradients:
    """A case whose scores are all about -200. A key that is not there and counts all the same, with
    a score of 0, has an infinite weight; where scores are small its row of zeros hides it."""
    op = built.operands
    op.q.copy_(16 + op.q)
    for keys in (op.k_nope, op.k_rope):
        if keys is not None:
            keys.copy_(keys / 16 - 1)
    return built


def lone_sequences(case: GradientCase) -> list[tuple[slice, slice]]:
    """Rows and keys of every sequence of a case."""
    found = []
    q_first = k_first = 0
    for q_len, k_len in zip(case.case.q_lens, case.case.k_lens, strict=True):
        found.append((slice(q_first, q_first + q_len), slice(k_first, k_first + k_len)))
        q_first, k_first = q_first + q_len, k_first + k_len
    return found


def ring_of(config: Any) -> tuple[int, int]:
    """Rows of a step of a backward pass, and of a whole ring of them."""
    if hasattr(config, "step_rows"):
        return config.step_rows, config.step_rows * config.slots
    return config.BN, config.BN * config.key_stages


Change = Callable[[BuiltGradients], BuiltGradients]


@dataclass(frozen=True)
class Passes:
    """A family's backward kernels on a chip."""

    launch: ModuleType
    chip: str
    backend: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan's config that are replaced."""
    triton: tuple[int, int] = (3, 6)
    """The first one that compiles them."""

    def plan_of(self, built: BuiltGradients, saved: Saved, **changes: Any) -> Plan:
        """The plan of a case."""
        chip = target_by_name(self.chip)
        chosen = cached_plan(built.backward(saved).problem(), chip, self.backend, self.triton)
        return replace(chosen, config=replace(chosen.config, **{**self.changes, **changes}))

    def run(
        self,
        built: BuiltGradients,
        saved: Saved,
        plan: Plan | None = None,
        wanted: Wanted = EVERY,
        launch: ModuleType | None = None,
        memory: Memory | None = None,
        **options: Any,
    ) -> tuple[dict[str, Tensor], list[Report]]:
        """Gradients by name, every element of which is written exactly once, and the reports.
        memory: where the gradients of q, k and v lie, unless side by side."""
        op = built.backward(saved)
        gradients = Gradients.allocate(op.forward, wanted)
        if memory is not None:
            rope = gradients.k_rope
            gradients = replace(
                gradients,
                q=moved(gradients.q, memory),
                kv=moved(gradients.kv, memory),
                k_rope=moved(rope, memory) if rope is not None and rope.dim() == 3 else rope,
            )
        names = ("q", "kv", "k_rope", "sink")
        buffers = {name: getattr(gradients, name) for name in names}
        given = {name: x for name, x in buffers.items() if x is not None}
        for x in given.values():
            x.fill_(torch.nan)
        chosen = plan or self.plan_of(built, saved)
        with intercept(outputs=given, **options) as reports:
            for call in (launch or self.launch).calls(chosen, op, gradients):
                call.run()
        return gradients.tensors(), reports

    def assert_right_clean_and_deaf_to_poison(
        self, case: GradientCase, seed: int = 1, change: Change = as_built
    ) -> None:
        """By the acceptance rule, and with the same bits when all around the operands is NaN and
        some partitions run far ahead of others."""
        found = []
        for background, schedule in (("zero", "random"), ("nan", "unfair")):
            built = change(on(case, background))
            gradients, reports = self.run(built, forward(built), seed=seed, schedule=schedule)
            assert [str(f) for report in reports for f in report.findings] == []
            found.append(gradients)
        assert same_bits(found[1], found[0])
        built = change(on(case))
        for verdict in judge_twice(built, found[0], forward(built)):
            assert verdict.ok, verdict.report()

    def assert_same_bits_in_every_schedule(self, case: GradientCase, schedule: str) -> None:
        """Clean, too."""
        built = on(case)
        saved = forward(built)
        want, _ = self.run(built, saved, seed=1)
        for seed in (2, 3):
            got, reports = self.run(built, saved, schedule=schedule, seed=seed)
            assert all(report.ok for report in reports) and same_bits(got, want)

    def assert_same_bits_alone(self, case: GradientCase) -> None:
        """Every sequence has the gradients that it has without the others."""
        built = on(case)
        saved = forward(built)
        together, _ = self.run(built, saved)
        op = built.operands
        for number, (rows, keys) in enumerate(lone_sequences(case)):
            single = replace(
                op,
                q=op.q[rows],
                k_nope=op.k_nope[keys],
                k_rope=None if op.k_rope is None else op.k_rope[keys],
                v=op.v[keys],
                cu_seqlens_q=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                cu_seqlens_k=torch.tensor([0, keys.stop - keys.start], dtype=torch.int32),
                key_mask=None if op.key_mask is None else op.key_mask[rows],
            )
            apart = replace(
                built, built=replace(built.built, operands=single), d_out=built.d_out[rows]
            )
            got, _ = self.run(apart, Saved(saved.out[rows], saved.lse[rows]), seed=number)
            want = {n: x[rows if n == "q" else keys] for n, x in together.items()}
            assert same_bits(got, want), number

    def assert_what_is_not_wanted_is_not_written(self, case: GradientCase, wanted: Wanted) -> None:
        """What is has the bits that it has beside all others."""
        built = on(case)
        saved = forward(built)
        every, _ = self.run(built, saved)
        some, reports = self.run(built, saved, wanted=wanted)
        assert all(report.ok for report in reports)
        assert set(some) < set(every) and same_bits(some, {name: every[name] for name in some})

    def assert_blind_rows_are_not_read(self, case: GradientCase) -> None:
        """NaN that comes back to a row without keys reaches no gradient."""
        built = on(case)
        saved = forward(built)
        want, _ = self.run(built, saved)
        blind = saved.lse == -torch.inf
        assert blind.any() and not blind.all()
        poisoned = built.d_out.masked_fill(blind[..., None], torch.nan)
        got, reports = self.run(replace(built, d_out=poisoned), saved)
        assert all(report.ok for report in reports) and same_bits(got, want)

    def is_right_and_clean_far_away(
        self, case: GradientCase, axis: int, launch: ModuleType | None = None
    ) -> bool:
        """Operands, what the forward pass saved and gradients past element 2^31 have the same
        bits."""
        return self.is_right_and_clean_in(FarMemory(axis), case, launch)

    def is_right_and_clean_in(
        self,
        memory: Memory,
        case: GradientCase,
        launch: ModuleType | None = None,
        operands: Memory | None = None,
    ) -> bool:
        """What the forward pass saved and gradients in another memory have the same bits; operands
        lie there as well, unless in a memory of their own."""
        built = on(case)
        saved = forward(built)
        want, _ = self.run(built, saved)
        apart = build_gradients(case, operands or memory)
        out, lse = (moved(x, memory) for x in saved)
        assert out is not None and lse is not None and out.stride() != saved.out.stride()
        got, reports = self.run(apart, Saved(out, lse), memory=memory, launch=launch)
        return all(report.ok for report in reports) and same_bits(got, want)

    def assert_same_bits_with_far_statistics(
        self, case: GradientCase, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What one pass leaves to the other has offsets of 64 bits as well."""
        built = on(case)
        saved = forward(built)
        want, _ = self.run(built, saved)
        new_empty, heads = torch.Tensor.new_empty, built.operands.q.shape[1]
        made = []

        def apart(x: Tensor, *sizes: Any, **options: Any) -> Tensor:
            if isinstance(sizes[0], int) and prod(sizes[:-1]) == 2 * heads:
                room = unreserved(2 * heads * FAR_ROWS * 4)
                made.append(torch.frombuffer(room, dtype=torch.float32))
                return made[-1].view(*sizes[:-1], FAR_ROWS)
            return new_empty(x, *sizes, **options)

        monkeypatch.setattr(torch.Tensor, "new_empty", apart)
        got, reports = self.run(built, saved)
        assert len(made) == 1 and heads * FAR_ROWS >= 2**31
        assert all(report.ok for report in reports) and same_bits(got, want)

    def at_edges(self, case: GradientCase) -> GradientCase:
        """A case with lengths one less than a tile, a block and a ring of the plan, as many, and
        one more; some rows see no key."""
        built = on(case)
        config = self.plan_of(built, forward(built)).config
        own, block, turn = config.own_rows, *ring_of(config)
        lengths = {
            "q_lens": (own - 1, own, own + 1, 3, turn + 1, block),
            "k_lens": (block - 1, block, block + 1, turn + 1, own + 1, own - 1),
        }
        return replace(case, case=replace(case.case, heads=1, spare=0, **lengths))

    def check(
        self,
        launch: ModuleType,
        case: GradientCase,
        schedule: str,
        seed: int,
        launches: int = 1,
    ) -> tuple[set[Kind], bool]:
        """What the simulator found with a launcher, and whether the numbers are right. Around the
        operands is NaN."""
        kinds: set[Kind] = set()
        right = True
        for _ in range(launches):
            built = on(case, "nan")
            saved = forward(built)
            options = {"schedule": schedule, "seed": seed, "limits": LIMITS}
            gradients, reports = self.run(built, saved, launch=launch, **options)
            kinds |= {kind for report in reports for kind in report.kinds()}
            right &= all(verdict.ok for verdict in judge_twice(on(case), gradients, saved))
        return kinds, right
