"""What families declare: allow-lists over every field of a Problem, in one table."""

from __future__ import annotations

import doctest
import importlib.util
from dataclasses import MISSING, dataclass, fields, replace
from importlib import import_module

import pytest

from openmla.backward.problem import BACKWARD_FORMS, BackwardProblem
from openmla.errors import Unsupported
from openmla.explain.support import FEATURES
from openmla.indexer.loss_problem import LOSS_FORM, LossProblem
from openmla.indexer.problem import IndexProblem
from openmla.planning import TARGETS, plan, problems, registry, serves
from openmla.planning.budget import over_budget, uses
from openmla.planning.family import Kernel
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import FAMILIES, Plan, families_of, family_named
from openmla.planning.target import generic_target
from openmla.problem import FORMS, Problem

DENSE = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64)
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64)
SPARSE = replace(LATENT, form="sparse", topk=64)
SCORES = IndexProblem(form="scores", heads=64, page_size=64, total_q=64, width=4096)
SELECT = IndexProblem(form="select", topk=64, total_q=64, width=4096)
KERNELS = [(family, kernel) for family in FAMILIES for kernel in family.kernels]


@dataclass(frozen=True, slots=True)
class WithSoftcap(Problem):
    """A Problem of tomorrow: one option more than any kernel has heard of."""

    softcap: int = 0


@dataclass(frozen=True, slots=True)
class BackwardWithSoftcap(BackwardProblem):
    """A backward pass of tomorrow."""

    softcap: int = 0


@dataclass(frozen=True, slots=True)
class StepWithSoftcap(IndexProblem):
    """A step of the indexer of tomorrow."""

    softcap: int = 0


def id_of(value: object) -> str:
    return value.config.__name__ if isinstance(value, Kernel) else getattr(value, "name", "")


def test_examples() -> None:
    assert [doctest.testmod(m).failed for m in (problems, serves, registry)] == [0, 0, 0]


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=id_of)
def test_a_declaration_names_fields_of_a_problem_once(family: object, kernel: Kernel) -> None:
    names = [
        name
        for key in kernel.serves.allowed
        for name in (key if isinstance(key, tuple) else (key,))
    ]
    forms = kernel.serves.allowed["form"].values
    kinds = dict.fromkeys(FORMS, Problem)
    kinds |= {**dict.fromkeys(BACKWARD_FORMS, BackwardProblem), LOSS_FORM: LossProblem}
    known = fields(kinds.get(forms[0], IndexProblem))
    assert set(names) <= {f.name for f in known} and len(set(names)) == len(names)
    assert {f.name for f in known if f.default is MISSING} <= set(names)


@pytest.mark.parametrize("launcher", sorted({k.launcher for _, k in KERNELS if k.launcher}))
def test_every_launcher_is_there(launcher: str) -> None:
    assert callable(import_module(launcher).calls)


@pytest.mark.parametrize("problem", [DENSE, LATENT, SPARSE, SCORES, SELECT], ids=lambda p: p.form)
@pytest.mark.parametrize("target", ["cpu", "h200", "b200", "mi355x", "a100"])
def test_an_option_that_nobody_declares_is_refused_everywhere(
    problem: AnyProblem, target: str
) -> None:
    values, kind = problem.to_json(), type(problem)
    tomorrow = WithSoftcap if kind is Problem else StepWithSoftcap
    assert plan(tomorrow(**values), target).backend == plan(problem, target).backend
    with pytest.raises(Unsupported, match="softcap 7: not served"):
        plan(tomorrow(**values, softcap=7), target)


@pytest.mark.parametrize("target", ["cpu", "h200", "mi355x", "a100"])
def test_gradients_under_an_option_that_nobody_declares_are_refused(target: str) -> None:
    values = BackwardProblem.of(DENSE).to_json()
    assert plan(BackwardWithSoftcap(**values), target).kernel_name == "backward"
    with pytest.raises(Unsupported, match="softcap 7: not served"):
        plan(BackwardWithSoftcap(**values, softcap=7), target)


@pytest.mark.parametrize("d_nope", [112, 176, 208, 224, 240])
@pytest.mark.parametrize(("d_rope", "d_v"), [(64, 128), (0, 64)])
def test_widths_of_three_tiles_are_not_hoppers(d_nope: int, d_rope: int, d_v: int) -> None:
    """The kernel has two tiles of K besides rope; it once took the first two of three."""
    problem = replace(DENSE, d_nope=d_nope, d_rope=d_rope, d_v=d_v)
    assert plan(problem, "h200").backend == "portable"
    with pytest.raises(Unsupported, match=f"d_nope {d_nope}: 16, 32"):
        plan(problem, "h200", "hopper")


@pytest.mark.parametrize("d_v", [1, 7, 8, 24])
def test_narrow_values_are_not_hoppers(d_v: int) -> None:
    assert plan(replace(DENSE, d_v=d_v), "h200").backend == "portable"


def plans_of(family: str, kernel: Kernel) -> list[Plan]:
    """A plan of every feature of the support table that this kernel serves."""
    chips = [t for t in TARGETS.values() if family_named(family) in families_of(t)]
    chips = [t for t in chips if not kernel.archs or t.arch in kernel.archs]
    target = chips[0] if chips else TARGETS["cpu"]
    made = []
    for problem in FEATURES.values():
        choice = (
            kernel.plan(problem, target) if problem.form in kernel.serves.allowed["form"] else None
        )
        if choice is not None and not choice.reason:
            made.append(Plan(problem, target.name, family, kernel.name, choice.config))
    return made


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=id_of)
def test_every_config_answers_the_same_questions(family: object, kernel: Kernel) -> None:
    plans = plans_of(id_of(family), kernel)
    assert plans, "no feature of the support table runs this kernel"
    for chosen in plans:
        assert chosen.config_lines()
        if kernel.block is None:
            assert uses(chosen) == []
            continue
        block = chosen.block
        assert block is not None and chosen.config.why_unsupported() == ""
        assert min(block.tile_rows, block.tile_keys, block.stages, block.threads) > 0
        assert block.memory.used > 0 and over_budget(chosen) == ""


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=id_of)
def test_a_smaller_chip_is_over_budget(family: object, kernel: Kernel) -> None:
    """The check can fail for every kernel: on a chip with a byte less than the block takes."""
    for chosen in plans_of(id_of(family), kernel):
        if chosen.block is None:
            continue
        whole = TARGETS[chosen.target]
        less = generic_target(whole.arch, whole.sm_count, chosen.block.memory.used - 1)
        assert "shared memory" in over_budget(replace(chosen, target=less.name))


@pytest.mark.parametrize(("family", "kernel"), KERNELS, ids=id_of)
def test_a_launcher_that_is_named_is_there(family: object, kernel: Kernel) -> None:
    """Its module is imported at the first call, which no test on a CPU makes."""
    if kernel.launcher:
        assert importlib.util.find_spec(kernel.launcher) is not None
