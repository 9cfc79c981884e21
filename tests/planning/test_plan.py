"""The planner as a whole: dispatch, JSON, purity, words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from openmla.errors import InvalidArgument, Unsupported
from openmla.explain.support import FEATURES, TABLE_TARGETS
from openmla.formats import FORMATS
from openmla.kernels.blackwell.dense.plan import DenseConfig
from openmla.kernels.blackwell.pair.plan import PairConfig
from openmla.kernels.cdna4.dense.plan import Dense16, DenseFP8
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.hopper.dense.plan import HopperDenseConfig
from openmla.kernels.hopper.dense_fp8.plan import HopperDenseFp8Config
from openmla.kernels.hopper.latent.plan import HopperLatentConfig
from openmla.kernels.portable.plan import PortableConfig
from openmla.planning import NEWEST_TRITON, TARGETS, Plan, cached_plan, plan, target_by_name
from openmla.planning.budget import over_budget, uses
from openmla.planning.models import MODELS, problem_for_model
from openmla.planning.registry import families_of
from openmla.planning.serves import GLUON_CACHES, QUANTIZED_CACHES
from openmla.problem import FORMS, Problem

DENSE = Problem(form="dense", heads=128, d_nope=128, d_rope=64, d_v=128, total_q=4096, total_k=4096)
FP8 = replace(DENSE, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3", rope_dtype="e4m3")
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64)
SPARSE = replace(LATENT, form="sparse", topk=2048)
NO_ROPE = replace(DENSE, d_rope=0, rope="none")

EVERY_MODEL = [
    problem_for_model(name, tokens=1024, context=65536, tp=tp, form=form)
    for name, model in MODELS.items()
    for tp in (1, 4)
    for form in FORMS
    if (form != "dense" or not model.one_row) and (form != "sparse" or model.topk)
]


@pytest.mark.parametrize(
    ("problem", "target", "backend", "config"),
    [
        (DENSE, "cpu", "cpu", CpuConfig),
        (DENSE, "h200", "hopper", HopperDenseConfig),
        (LATENT, "h200", "hopper", HopperLatentConfig),
        (SPARSE, "h100", "hopper", HopperLatentConfig),
        (FP8, "h200", "hopper", HopperDenseFp8Config),
        (DENSE, "b200", "blackwell", DenseConfig),
        (replace(DENSE, total_q=512), "b200", "blackwell", DenseConfig),
        (NO_ROPE, "b200", "blackwell", DenseConfig),
        (LATENT, "b200", "blackwell", PairConfig),
        (replace(DENSE, d_rope=32), "b200", "blackwell", DenseConfig),
        (DENSE, "mi355x", "cdna4", Dense16),
        (FP8, "mi355x", "cdna4", DenseFP8),
        (NO_ROPE, "mi355x", "cdna4", Dense16),
        (DENSE, "a100", "portable", PortableConfig),
        (FP8, "a100", "portable", PortableConfig),
        (DENSE, "sm_86:84x101376", "portable", PortableConfig),
    ],
)
def test_dispatch(problem: Problem, target: str, backend: str, config: type) -> None:
    chosen = plan(problem, target)
    assert chosen.backend == backend
    assert type(chosen.config) is config
    assert len(chosen.passed_over) == (backend == "portable" and len(_families(target)) > 1)


def _families(target: str) -> tuple[str, ...]:
    return tuple(family.name for family in families_of(target_by_name(target)))


def test_fp8_on_cdna4() -> None:
    chosen = plan(FP8, "mi355x")
    assert chosen.backend == "cdna4"
    assert chosen.config.v_full_v227 and chosen.config.smem_used == 148224


@pytest.mark.parametrize(
    ("queries", "requests", "keys", "may_split"),
    [(32, 32, 32768, True), (32, 32, 4096, False), (8192, 2, 32768, True)],
)
def test_few_queries_over_many_keys_on_cdna4(
    queries: int, requests: int, keys: int, may_split: bool
) -> None:
    """Its kernel splits keys by each request's own lengths, so there is room for that wherever the
    table may name so many keys, however many queries there are."""
    problem = Problem(
        form="latent",
        heads=16,
        d_nope=512,
        d_rope=64,
        d_v=512,
        page_size=64,
        batch=requests,
        total_q=queries,
        total_k=requests * keys,
        table_keys=keys,
    )
    chip = target_by_name("mi355x")
    chosen = cached_plan(problem, chip, "auto", NEWEST_TRITON)
    assert chosen.backend == "cdna4" and (chosen.variant.ranges.rows > 0) == may_split


@pytest.mark.parametrize("target", TARGETS)
def test_every_model_has_a_plan_everywhere(target: str) -> None:
    for problem in EVERY_MODEL:
        chosen = plan(problem, target)
        assert over_budget(chosen) == "", problem
        assert Plan.from_json(json.dumps(chosen.to_json())) == chosen, problem


def test_json_keeps_nested_configs() -> None:
    for problem, target in ((FP8, "mi355x"), (replace(SPARSE, kv_dtype="fp8_656"), "h200")):
        chosen = plan(problem, target)
        again = Plan.from_json(json.loads(json.dumps(chosen.to_json())))
        assert again == chosen and hash(again) == hash(chosen)
        assert again.config == chosen.config


@pytest.mark.parametrize("data", ["[]", "{}", {"problem": {}}])
def test_json_of_something_else(data: object) -> None:
    with pytest.raises(InvalidArgument, match="plan: expected an object with problem, target"):
        Plan.from_json(data)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("problem", 3, "problem: expected an object with the fields of Problem"),
        ("problem", {"form": "dense"}, "problem: expected the fields of Problem.*missing"),
        ("problem", {"magic": 1}, "problem: expected the fields of Problem.*magic"),
        ("target", "magic", "target: expected one of cpu, h100"),
        ("target", 7, "target: expected a string"),
        ("backend", "magic", "backend: expected one of reference, hopper, portable, got 'magic'"),
        ("backend", "cdna4", "backend: expected one of reference, hopper, portable, got 'cdna4'"),
        ("kernel", "magic", "kernel: expected one of dense, dense_fp8, latent, .* got 'magic'"),
        ("kernel", "dense_fp8", "config.class: expected 'HopperDenseFp8Config', got 'HopperDense"),
        ("kernel", 7, "kernel: expected a string"),
        ("config", {"class": ["CpuConfig"]}, "config.class: expected 'HopperDenseConfig'"),
        ("config", {"heads": 8}, "config: expected the fields of HopperDenseConfig.*missing"),
        ("triton", "3.6.0", "triton: expected a version such as"),
        ("triton", 3.6, "triton: expected a string"),
        ("passed_over", "abc", "passed_over: expected a list of strings"),
        ("passed_over", 5, "passed_over: expected a list of strings"),
    ],
)
def test_json_with_a_wrong_part(name: str, value: object, complaint: str) -> None:
    values = plan(DENSE, "h200").to_json() | {name: value}
    with pytest.raises(InvalidArgument, match=complaint):
        Plan.from_json(values)


@pytest.mark.parametrize(
    ("problem", "target", "other"),
    [(DENSE, "h200", "b200"), (DENSE, "b200", "mi355x"), (SPARSE, "h200", "cpu")],
)
def test_json_with_the_config_of_another_family(problem: Problem, target: str, other: str) -> None:
    values = plan(problem, target).to_json()
    with pytest.raises(InvalidArgument, match=r"config\.class: expected '.*', got '"):
        Plan.from_json(values | {"config": plan(problem, other).to_json()["config"]})
    with pytest.raises(InvalidArgument, match=r"config: expected an object .*, got None"):
        Plan.from_json(values | {"config": None})


def test_json_with_the_config_of_another_form() -> None:
    dense, sparse = (plan(p, "h200").to_json() for p in (DENSE, SPARSE))
    with pytest.raises(InvalidArgument, match="got 'HopperLatentConfig'"):
        Plan.from_json(dense | {"config": sparse["config"]})
    with pytest.raises(InvalidArgument, match="hopper's kernel sparse, got form dense: sparse is"):
        Plan.from_json(dense | {"config": sparse["config"], "kernel": "sparse"})


def test_every_plan_comes_back_from_its_json() -> None:
    for problem in FEATURES.values():
        for target in TABLE_TARGETS:
            for backend in ("reference", *_families(target)):
                try:
                    chosen = plan(problem, target, backend)
                except Unsupported:
                    continue
                assert Plan.from_json(json.dumps(chosen.to_json())) == chosen


def test_text_that_is_not_json() -> None:
    with pytest.raises(InvalidArgument, match="plan: expected JSON"):
        Plan.from_json("{")


def test_json_of_an_unknown_config() -> None:
    values = plan(DENSE, "h200").to_json()
    values["config"]["class"] = "Problem"
    with pytest.raises(
        InvalidArgument, match=r"config\.class: expected 'HopperDenseConfig', got 'Problem'"
    ):
        Plan.from_json(values)


@pytest.mark.parametrize(
    ("problem", "target", "backend", "reason"),
    [
        (DENSE, "cpu", "portable", "backend 'portable' has no dense kernel for target 'cpu'"),
        (DENSE, "b200", "hopper", "backend 'hopper' has no dense kernel for target 'b200'"),
        (replace(DENSE, d_rope=16), "b200", "blackwell", "d_rope 16: 32 or 64 are served"),
        (replace(FP8, d_nope=48), "h200", "hopper", "d_nope 48: 32, 64"),
        (replace(DENSE, d_nope=96), "mi355x", "cdna4", "d_nope 96"),
        (replace(FP8, rope_dtype="bf16"), "mi355x", "cdna4", "rope_dtype bf16"),
        (
            replace(FP8, d_v=256, v_dtype="bf16"),
            "mi355x",
            "cdna4",
            "256 columns of V in bf16 beside FP8 keys: 128 at most fit the LDS",
        ),
        (
            replace(FP8, has_k_scale=True, has_key_mask=True),
            "mi355x",
            "cdna4",
            "key_mask beside scales: there are no registers for both",
        ),
        (replace(SPARSE, d_rope=32), "b200", "blackwell", "d_rope 32, d_v 512: 512/64/512"),
        (
            replace(DENSE, rope="cache", page_size=7),
            "b200",
            "blackwell",
            "page_size 7: pages of 8, 16, 32 or a multiple of 64 rows",
        ),
        (
            replace(DENSE, rope="cache", page_size=7),
            "h200",
            "hopper",
            "page_size 7: 0 to 1024 in",
        ),
        (replace(DENSE, aligned_16=False), "h200", "hopper", "multiple of 16 bytes"),
        (replace(DENSE, q_dtype="fp32"), "h200", "auto", "q_dtype fp32"),
        (FP8, "sm_75:40x65536", "auto", "sm_75: Triton's products of bf16 and fp16 need sm_80"),
        (DENSE, "sm_75:40x65536", "auto", "need sm_80"),
        (replace(DENSE, d_nope=4096, d_v=4096), "h200", "auto", "d_nope 4096: 1 to 576"),
    ],
)
def test_refusals(problem: Problem, target: str, backend: str, reason: str) -> None:
    """An explicit backend never falls back, and a refusal says why and what would work."""
    with pytest.raises(Unsupported) as caught:
        plan(problem, target, backend)
    assert reason in caught.value.reason
    assert caught.value.nearest


@pytest.mark.parametrize(("target", "backend"), [("h9000", "auto"), ("h200", "magic"), (7, "auto")])
def test_wrong_names(target: str, backend: str) -> None:
    with pytest.raises(InvalidArgument, match=r"target|backend"):
        plan(DENSE, target, backend)


@pytest.mark.parametrize(
    "change", [{"heads": -1}, {"heads": 129}, {"d_nope": 0}, {"page_size": -2}]
)
def test_wrong_problems(change: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(change))):
        replace(DENSE, **change)  # type: ignore[arg-type]


def test_reference_anywhere() -> None:
    for target in TARGETS:
        chosen = plan(DENSE, target, "reference")
        assert (chosen.backend, chosen.config) == ("reference", None)
        assert "float64" in chosen.explain() and chosen.runs_today


def test_target_objects_and_names_agree() -> None:
    assert plan(DENSE, TARGETS["h200"]) == plan(DENSE, "H200") == plan(DENSE, "sm_90")


@pytest.mark.parametrize(
    ("heads", "tokens", "num_qo"), [(128, 4096, 2), (16, 128, 1), (128, 60, 1)]
)
@pytest.mark.parametrize("target", ["h200", "b200"])
def test_short_prompts_take_one_query_tile(
    target: str, heads: int, tokens: int, num_qo: int
) -> None:
    chosen = plan(replace(DENSE, heads=heads, total_q=tokens), target)
    assert chosen.config.num_qo == num_qo
    assert chosen.config.BN == plan(DENSE, target).config.BN


@pytest.mark.parametrize("target", TARGETS)
def test_explanations_tell_the_status(target: str) -> None:
    text = plan(DENSE, target).explain()
    runs = bool(plan(DENSE, target).kernel.launcher)
    assert ("planned" not in text and "only with" not in text) == runs
    assert ("planned" in text) != runs
    assert str(DENSE) in text


def test_explanation_of_a_fallback() -> None:
    text = plan(replace(LATENT, d_nope=128, d_v=128), "b200").explain()
    assert "passed over: blackwell: d_nope 128, d_rope 64, d_v 128" in text


def test_explanation_of_a_split() -> None:
    text = plan(replace(DENSE, heads=16, total_q=64, total_k=131072), "h200").explain()
    assert "16 tiles on 132 SMs, 16 ranges of 8192 keys" in text
    assert "BM = 64: 1 query tile(s)" in text


@pytest.mark.parametrize(
    ("problem", "target", "backend"),
    [
        (LATENT, "h200", "hopper"),
        (SPARSE, "h200", "hopper"),
        (SPARSE, "b200", "blackwell"),
        (SPARSE, "mi355x", "cdna4"),
    ],
)
def test_a_row_format_is_served_by_those_that_declare_it(
    problem: Problem, target: str, backend: str
) -> None:
    """Gluon kernels read what they declare, at its widths; portable kernels read all formats."""
    declared = replace(problem, kv_dtype="fp8_token")
    assert plan(declared, target, backend).backend == backend
    assert plan(replace(declared, kv_dtype="fp8_584"), target).backend == "portable"
    with pytest.raises(Unsupported, match="kv_dtype fp8_584"):
        plan(replace(declared, kv_dtype="fp8_584"), target, backend)


def test_v4_rows_are_served_at_the_widths_that_they_have() -> None:
    v4 = replace(SPARSE, kv_dtype="fp8_584", d_nope=512, d_v=512, d_rope=0, page_size=64)
    assert plan(v4, "h200", "hopper").backend == "hopper"
    with pytest.raises(Unsupported, match=r"512 \+ 64 columns: 512 \+ 0"):
        plan(replace(v4, d_rope=64), "h200", "hopper")


def test_what_gluon_kernels_unpack_is_part_of_what_there_is() -> None:
    assert {*GLUON_CACHES} < {*QUANTIZED_CACHES} == {n for n, f in FORMATS.items() if f.scale}


@pytest.mark.parametrize(
    ("target", "backend"), [("h200", "hopper"), ("b200", "blackwell"), ("mi355x", "cdna4")]
)
@pytest.mark.parametrize("form", ["latent", "sparse"])
@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith(("fp8_528", "fp4", "nvfp4"))])
def test_rows_that_no_kernel_of_the_chip_unpacks_are_portable(
    name: str, form: Any, target: str, backend: str
) -> None:
    latent, rope = FORMATS[name].widths[0]
    rows = replace(SPARSE, form=form, kv_dtype=name, d_nope=latent, d_v=latent, d_rope=rope)
    rows = replace(rows, page_size=64, rope="shared" if rope else "none")
    if backend == "hopper":
        rows = replace(rows, topk=rows.topk * (form == "sparse"))
        assert plan(rows, target).backend == "hopper"
        return
    assert plan(rows, target).backend == "portable"
    with pytest.raises(Unsupported, match=f"kv_dtype {name}"):
        plan(rows, target, backend)


def test_fp8_cache_changes_the_plan_by_the_work() -> None:
    few = plan(replace(SPARSE, kv_dtype="fp8_656", total_q=1, total_k=65536), "h200")
    many = plan(replace(SPARSE, kv_dtype="fp8_656", total_q=4096, total_k=65536), "h200")
    modes = few.config.cache_read.mode, many.config.cache_read.mode
    assert modes == ("in_kernel", "workspace")
    assert "65536 x 1152 = 75497472 bytes" in many.explain()


@pytest.mark.parametrize(
    ("problem", "used"),
    [
        (DENSE, 221720),
        (replace(DENSE, wants_lse=True), 221736),
        (replace(DENSE, total_q=512), 229864),
        (replace(DENSE, total_q=512, wants_lse=True), 229880),
        (NO_ROPE, 229832),
        (FP8, 221720),
        (SPARSE, 222000),
        (replace(SPARSE, heads=64), 172680),
        (replace(SPARSE, heads=64, kv_dtype="fp8_block64"), 214024),
        (replace(SPARSE, kv_dtype="fp8_block64"), 222000),
    ],
    ids=str,
)
def test_blackwell_maps(problem: Problem, used: int) -> None:
    chosen = plan(problem, "b200")
    block = chosen.block
    assert chosen.backend == "blackwell" and block is not None
    assert block.memory.used == used
    regions = block.memory.regions
    assert all(a.offset + a.size <= b.offset for a, b in pairwise(regions))
    columns = block.tensor_memory
    assert columns and all(a.first + a.count <= b.first for a, b in pairwise(columns))
    assert {use.name for use in uses(chosen)} >= {"shared memory bytes", "tensor-memory columns"}


def test_planning_imports_no_heavy_package() -> None:
    code = (
        "import sys, types; package = types.ModuleType('openmla');"
        "package.__path__ = [sys.argv[1]]; sys.modules['openmla'] = package;"
        "from openmla.planning.models import problem_for_model; from openmla.planning import plan;"
        "[plan(problem_for_model('glm-5'), t) for t in ('h200', 'b200', 'mi355x', 'cpu')];"
        "print([name for name in ('torch', 'triton') if name in sys.modules])"
    )
    import openmla

    done = subprocess.run(
        [sys.executable, "-c", code, openmla.__path__[0]],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_the_package_is_the_call_and_still_a_package():
    import openmla
    import openmla.modular.blackwell

    problem = Problem(form="dense", heads=8, d_nope=128, d_rope=64, d_v=128)
    assert openmla.plan(problem, target="b200") == plan(problem, "b200")
    assert openmla.modular.blackwell.FA4Config.__name__ == "FA4Config"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [(("dense",), "problem"), ((None, ["h200"]), "target"), ((None, "cpu", ["cpu"]), "backend")],
)
def test_arguments_of_the_wrong_kind_are_named(arguments, name):
    problem = Problem(form="dense", heads=8, d_nope=128, d_rope=64, d_v=128)
    with pytest.raises(InvalidArgument, match=name):
        plan(arguments[0] or problem, *arguments[1:])


def test_a_near_miss_is_explained() -> None:
    chosen = plan(DENSE, "mi300x")
    assert chosen.backend == "portable"
    assert "transposing LDS reads" in chosen.passed_over[0]
    assert "passed over: cdna4: gfx942" in chosen.explain()
