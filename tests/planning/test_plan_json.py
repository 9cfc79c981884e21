"""Plans as JSON: every plan comes back as it was, and damaged text is refused or still a plan."""

from __future__ import annotations

import json
import random
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openmla.errors import InvalidArgument, Unsupported
from openmla.explain.support import FEATURES
from openmla.indexer.problem import INDEX_FORMS, IndexProblem
from openmla.kernels.hopper.few.plan import FewQueries
from openmla.planning import TARGETS, Plan, cached_plan, plan
from openmla.planning.registry import FAMILIES
from openmla.planning.target import target_by_name
from openmla.problem import Problem
from openmla.records import describe
from planning.fuzz import random_problem
from planning.plan_mutations import mutated

TRITONS = ((3, 6), (3, 7), (3, 8), (3, 9), None)
SPARSE = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    topk=2048,
    total_q=4096,
    total_k=65536,
)
FEW = replace(SPARSE, heads=16, total_q=1)
GRID = [
    *(
        replace(problem, heads=heads, total_q=queries)
        for problem in FEATURES.values()
        for heads in (1, 16, 128)
        if heads % getattr(problem, "group", 1) == 0
        for queries in (1, 64, 8192)
    ),
    *(random_problem(random.Random(seed)) for seed in range(300)),
]


def plans_on(target: str, triton: tuple[int, int] | None) -> list[Plan]:
    """Plans of all problems of the grid that have one."""
    made = []
    for problem in GRID:
        try:
            made.append(cached_plan(problem, target_by_name(target), "auto", triton))
        except Unsupported:
            continue
    return made


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_plan_comes_back(target: str, triton: tuple[int, int] | None) -> None:
    made = plans_on(target, triton)
    assert len(made) > 100
    for chosen in made:
        again = Plan.from_json(json.dumps(chosen.to_json()))
        assert again == chosen and again.kernel is chosen.kernel, chosen
        assert again.explain() == chosen.explain()
        named = triton is not None and target != "cpu"
        assert chosen.triton == (".".join(map(str, triton)) if named and triton else "")


def test_few_queries_come_back() -> None:
    """A record inside a config that may also be missing."""
    chosen = plan(FEW, "h200")
    assert isinstance(chosen.config.few, FewQueries)
    assert Plan.from_json(chosen.to_json()).config.few == chosen.config.few


@pytest.mark.parametrize("triton", TRITONS)
def test_a_plan_is_of_the_kernel_that_was_chosen(triton: tuple[int, int] | None) -> None:
    """Two kernels share a class of configs: before Triton 3.8 the pair of CTAs does not run."""
    chosen = cached_plan(SPARSE, target_by_name("b200"), "auto", triton)
    pair = triton is None or triton >= (3, 8)
    assert chosen.kernel_name == ("sparse_pair" if pair else "sparse")
    assert chosen.config.ctas == (2 if pair else 1)
    assert triton is None or triton >= chosen.kernel.first_triton
    assert bool(chosen.passed_over) != pair


@pytest.mark.parametrize("triton", TRITONS)
@pytest.mark.parametrize("target", TARGETS)
def test_no_plan_is_of_a_kernel_that_does_not_run(
    target: str, triton: tuple[int, int] | None
) -> None:
    for chosen in plans_on(target, triton):
        assert type(chosen.config) is chosen.kernel.config
        assert triton is None or not chosen.kernel.why_not_run(chosen.problem, triton)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_names_of_kernels_are_unique_in_a_family(family: Any) -> None:
    names = [kernel.name for kernel in family.kernels]
    assert len(set(names)) == len(names) and all(names)
    assert all(family.kernel_named(kernel.name) is kernel for kernel in family.kernels)
    with pytest.raises(InvalidArgument, match=r"kernel: expected one of .* got 'magic'"):
        family.kernel_named("magic")


@pytest.mark.parametrize("triton", TRITONS)
def test_plans_of_the_indexer_name_their_kernel(triton: tuple[int, int] | None) -> None:
    problems = [p for p in FEATURES.values() if isinstance(p, IndexProblem)]
    assert {problem.form for problem in problems} == set(INDEX_FORMS)
    for target in TARGETS.values():
        for problem in problems:
            chosen = cached_plan(problem, target, "auto", triton)
            assert type(chosen.config) is chosen.kernel.config
            assert Plan.from_json(json.dumps(chosen.to_json())) == chosen
            assert problem.form in chosen.kernel.serves.allowed["form"]
            assert f"kernel: {chosen.backend} {chosen.kernel_name}" in chosen.explain()
            assert (f"made for Triton {chosen.triton}\n" in chosen.explain()) == bool(chosen.triton)


def test_an_explanation_says_which_triton_it_is_for() -> None:
    lines = cached_plan(SPARSE, target_by_name("b200"), "auto", (3, 6)).explain().splitlines()
    assert "made for Triton 3.6" in lines
    assert lines[2] == "kernel: blackwell sparse (simulated)"
    assert "Triton" not in plan(SPARSE, "h200").explain()


@pytest.mark.parametrize(
    "kernel",
    [k for f in FAMILIES for k in f.kernels if is_dataclass(k.config)],
    ids=lambda k: k.name,
)
def test_every_field_of_every_config_has_a_rule(kernel: Any) -> None:
    hints = get_type_hints(kernel.config)
    assert all(describe(hints[field.name]) for field in fields(kernel.config))


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("config", "num_kv_stages"), "2", "config.num_kv_stages: expected an integer, got '2'"),
        (("config", "num_kv_stages"), True, "config.num_kv_stages: expected an integer, got True"),
        (("config", "num_kv_stages"), 2.0, "config.num_kv_stages: expected an integer, got 2.0"),
        (("config", "num_kv_stages"), 2**128, "num_kv_stages: expected an integer of at most 128"),
        (("config", "dynamic"), 1, "config.dynamic: expected true or false, got 1"),
        (("config", "gather"), "x", "config.gather: expected 'indices' or 'pages', got 'x'"),
        (("config", "few"), 3, "config.few: expected an object .* FewQueries or null, got 3"),
        (("config", "few", "span"), None, "config.few.span: expected an integer, got None"),
        (("config", "few", "magic"), 1, r"config.few: .* FewQueries, got unknown \['magic'\]"),
        (("config", "cache_read", "mode"), 0, "config.cache_read.mode: expected 'plain', 'in_"),
        (("config", "cache_read", "class"), "X", "cache_read.class: expected 'CacheRead', got 'X'"),
        (("problem", "heads"), "16", "problem.heads: expected an integer, got '16'"),
        (("problem", "causal"), None, "problem.causal: expected true or false, got None"),
        (("passed_over",), ["a", 3], r"passed_over\[1\]: expected a string, got 3"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(
    path: tuple[str, ...], value: object, complaint: str
) -> None:
    values = plan(FEW, "h200").to_json()
    home = values
    for step in path[:-1]:
        home = home[step]
    home[path[-1]] = value
    with pytest.raises(InvalidArgument, match=complaint):
        Plan.from_json(values)


INDEX = IndexProblem(form="scores", heads=64, page_size=64, total_q=16, width=4096)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"problem": {"form": "scores", "d_nope": 64}}, r"fields of IndexProblem.*\['d_nope'\]"),
        ({"problem": {"form": "scores", "heads": 129}}, "heads: expected 1 to 128, got 129"),
        ({"problem": SPARSE.to_json()}, "config: .* hopper's kernel scores, got form sparse: scor"),
        ({"problem": {"form": "scores", "heads": 48}}, "got heads 48: 32, 64 or 128 are served"),
        ({"kernel": "select"}, "config.class: expected 'GluonSelectConfig', got 'HopperScores"),
        ({"kernel": "indexer"}, "kernel: expected one of dense, .*scores, select"),
        ({"target": "b200"}, "backend: expected one of reference, blackwell, portable"),
    ],
)
def test_a_damaged_plan_of_the_indexer_is_refused(changes: dict[str, Any], complaint: str) -> None:
    values = plan(INDEX, "h200").to_json()
    assert Plan.from_json(values) == plan(INDEX, "h200")
    with pytest.raises(InvalidArgument, match=complaint):
        Plan.from_json(values | changes)


def test_a_plan_of_the_scores_serves_the_other_chip_of_its_family() -> None:
    """sm_100 and sm_103 run the same kernels."""
    values = plan(INDEX, "b200").to_json() | {"target": "sm_103:148x232448"}
    assert Plan.from_json(values) == plan(INDEX, "sm_103:148x232448")


def test_a_chip_that_a_kernel_was_not_made_for_is_refused() -> None:
    chip = target_by_name("sm_103:148x232448")
    scores = replace(plan(INDEX, "b200").kernel, archs=("sm_100",))
    assert scores.plan(INDEX, chip).reason == "sm_103: the scores kernel is made for sm_100"
    assert scores.plan(INDEX, target_by_name("b200")).reason == ""


def nested(depth: int) -> Any:
    """Lists and objects in turn."""
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [3, 30, 500, 100_000])
@pytest.mark.parametrize("name", ["problem", "config", "passed_over", "target", "kernel", "triton"])
def test_deep_values_are_refused(name: str, depth: int) -> None:
    values = plan(FEW, "h200").to_json()
    with pytest.raises(InvalidArgument, match=name):
        Plan.from_json(values | {name: nested(depth)})


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "9" * 100_000, "\x00", "NaN"])
def test_text_that_is_no_plan(text: str) -> None:
    with pytest.raises(InvalidArgument, match="plan: expected"):
        Plan.from_json(text)


def test_numbers_that_no_planner_chose_are_refused() -> None:
    values = plan(FEW, "a100").to_json()
    for name, value, got in ("num_stages", 2**62, "shared memory"), ("warp", 0, "ZeroDivision"):
        damaged = values | {"config": values["config"] | {name: value}}
        with pytest.raises(InvalidArgument, match=f"portable's kernel tiled, got .*{got}"):
            Plan.from_json(damaged)


def test_a_billion_stages_are_refused_at_once() -> None:
    """Each would be a region of the map of shared memory."""
    values = plan(SPARSE, "h200").to_json()
    values["config"]["num_kv_stages"] = 2**30
    with pytest.raises(Unsupported, match="at most 4096 regions"):
        Plan.from_json(values)


@settings(max_examples=400, deadline=None, database=None)
@given(st.integers(0, 2**32))
def test_a_damaged_plan_is_refused_or_explains_itself(seed: int) -> None:
    rng = random.Random(seed)
    target, triton = rng.choice(list(TARGETS.values())), rng.choice(TRITONS)
    problem = rng.choice([FEW, *FEATURES.values(), random_problem(rng)])
    try:
        chosen = cached_plan(problem, target, "auto", triton)
    except Unsupported:
        return
    for _ in range(5):
        values = mutated(chosen.to_json(), rng)
        data = values if rng.random() < 0.5 else json.dumps(values)
        try:
            again = Plan.from_json(data)
        except (InvalidArgument, Unsupported):
            continue
        assert again.explain() and again.kernel.name == again.kernel_name
        assert Plan.from_json(again.to_json()) == again
