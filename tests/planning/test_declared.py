"""What kernels declare is what they plan: every combination of declared values has a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import pytest

from openmla.backward.problem import BACKWARD_FORMS, BackwardProblem
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.problem import INDEX_FORMS, IndexProblem
from openmla.planning.family import Kernel
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import family_named
from openmla.planning.serves import Allowed, Field, OneOf, Range, Second
from openmla.planning.target import Target, target_by_name
from openmla.problem import MAX_HEADS, Problem, RowSource

CHIPS = {"hopper": "h200", "blackwell": "b200", "cdna4": "mi355x"}
KERNELS = [(chip, kernel) for name, chip in CHIPS.items() for kernel in family_named(name).kernels]
# Which kernel serves does not depend on these, and they would multiply the combinations.
ALIKE = {"causal", "has_sink", "wants_lse", "wants_max_logits", "has_topk_lengths", "has_k_start"}
ALIKE |= {"has_q_scale", "range_keys"}
# Long enough for pairs of CTAs, and few enough rows for a workspace.
COUNTS = {"total_q": 8192, "total_k": 8192, "batch": 1}
NUMBERS = (0, 64, 1000, 2048)


def values_of(names: Field, allowed: Allowed) -> list[tuple[tuple[str, Any], ...]]:
    """The declared values of one field or group, as (name, value) pairs; of ranges, some."""
    if isinstance(allowed, Range):
        found: list[Any] = [n for n in NUMBERS if n in allowed]
    elif isinstance(allowed, Second):
        rows = allowed.allowed["kv_dtype"]
        assert isinstance(rows, OneOf)
        found = [None, *(RowSource(kv_dtype=x, page_size=64, topk=64) for x in rows.values)]
    else:
        found = list(allowed.values)
    if isinstance(names, str):
        return [((names, value),) for value in found]
    return [tuple(zip(names, group, strict=True)) for group in found]


def declared(kernel: Kernel, step: int) -> Iterator[AnyProblem]:
    """A problem of every `step`-th combination, where the fields make sense together."""
    axes = [
        values_of(names, allowed)[-1:] if names in ALIKE else values_of(names, allowed)
        for names, allowed in kernel.serves.allowed.items()
        if names not in COUNTS and names != "heads"
    ]
    for combination in islice(product(*axes), 0, None, step):
        values: dict[str, Any] = dict(pair for pairs in combination for pair in pairs)
        if values["form"] in INDEX_FORMS:
            if values.get("key_dtype") == "e2m1" and not values["page_size"]:
                continue  # FP4 keys lie in pages
            for heads in (32, 64, 128):
                yield IndexProblem(**values, total_q=8192, heads=heads)
            continue
        if values["form"] in BACKWARD_FORMS:
            if (values["rope"] == "none") == (values["d_rope"] == 0):
                problem = BackwardProblem(**values, **COUNTS, heads=MAX_HEADS)
                if not kernel.serves.why_not(problem):
                    yield problem
            continue
        if values["form"] == "dense":
            paged = bool(values.get("page_size"))
            if (values["rope"] == "cache") != paged or (values["rope"] == "none") != (
                values["d_rope"] == 0
            ):
                continue  # only the rope of a cache comes in pages
        if values.get("span"):
            # A span has no list, and lies in pages.
            pages = max(1, values["page_size"])
            values |= {"topk": 0, "has_topk_lengths": False, "page_size": pages}
        if not values.get("invariant"):
            values.pop("range_keys", None)  # which invariant calls alone have
        heads = MAX_HEADS if kernel.serves.takes("heads", MAX_HEADS) else MAX_HEADS // 2
        problem = Problem(**values, **COUNTS, heads=heads)
        if not kernel.serves.why_not(problem):
            yield problem


def id_of(value: object) -> str:
    return value.name if isinstance(value, Kernel) else str(value)


# A prime, so that a sample goes through the values of every field.
SAMPLE = 13


@pytest.mark.parametrize("step", [SAMPLE, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("chip", "kernel"), KERNELS, ids=id_of)
def test_declared_combinations_are_planned(chip: str, kernel: Kernel, step: int) -> None:
    target, count = target_by_name(chip), 0
    for problem in declared(kernel, step):
        count += 1
        assert kernel.plan(problem, target).reason == "", problem
    assert count > 0


@pytest.mark.parametrize(("name", "types"), [("dense", "bf16"), ("dense_fp8", "e4m3")])
def test_widths_that_blackwell_leaves_out_have_no_plan(name: str, types: str) -> None:
    """The planner refuses them by itself: the list leaves out nothing that would run."""
    kernel, target = family_named("blackwell").kernel_named(name), target_by_name("b200")
    dtypes = dict.fromkeys(("q_dtype", "kv_dtype", "v_dtype", "rope_dtype"), types)
    for d_nope, d_v in product(range(64, 449, 64), (64, 128, 192, 256)):
        problem = Problem(
            form="dense", heads=16, d_nope=d_nope, d_rope=64, d_v=d_v, total_q=64, **dtypes
        )
        served = kernel.serves.why_not(problem) == ""
        assert tried(kernel, problem, target) == served, (d_nope, d_v)


def tried(kernel: Kernel, problem: Problem, target: Target) -> bool:
    """Whether the planner would accept a problem that is not declared."""
    try:
        return not kernel.choose(problem, target).why_unsupported()
    except (Unsupported, InvalidArgument):
        return False


def test_what_kernels_count_in_32_bits_is_limited() -> None:
    """Partial results of an invariant token on Hopper; positions of spans in portable kernels."""
    latent = Problem("latent", 128, 512, 64, 512, page_size=64, total_q=1, total_k=64)
    long = replace(latent, table_keys=64 * (2**20 + 64), invariant=True)
    kernel = family_named("hopper").kernel_named("latent")
    assert "partial results of a token" in kernel.serves.why_not(long)
    assert kernel.serves.why_not(replace(long, invariant=False)) == ""
    spans = Problem("sparse", 16, 512, 0, 512, page_size=1024, total_q=1, total_k=1024, span=True)
    tiled = family_named("portable").kernel_named("tiled")
    assert tiled.serves.why_not(replace(spans, table_keys=2**20)) == ""
    assert "positions or rows" in tiled.serves.why_not(replace(spans, table_keys=2**31))
