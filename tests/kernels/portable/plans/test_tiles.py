"""Tiles of the plain Triton kernels."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openmla.errors import InvalidArgument, Unsupported
from openmla.kernels.portable import plan as portable
from openmla.kernels.portable import tuned
from openmla.kernels.portable.plan import (
    MIN_WGMMA,
    PortableConfig,
    padded,
    portable_candidates,
    select_portable_config,
)
from openmla.planning import plan
from openmla.planning.latent_split import LatentSplit
from openmla.planning.target import TARGETS, generic_target, target_by_name
from openmla.problem import Form, Problem

GPUS = [name for name in TARGETS if name != "cpu"]
DENSE = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128)
LATENT = Problem(form="latent", heads=16, d_nope=512, d_rope=64, d_v=512)


def test_examples() -> None:
    assert doctest.testmod(portable).failed == 0


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
@pytest.mark.parametrize("name", GPUS)
def test_the_first_that_fits(name: str, form: Form) -> None:
    shape = DENSE if form == "dense" else replace(LATENT, form=form)
    chosen = select_portable_config(shape, TARGETS[name])
    before = []
    for candidate in portable_candidates(shape, TARGETS[name]):
        if candidate == chosen:
            break
        before.append(candidate)
    assert chosen.supported() and chosen.smem_used <= TARGETS[name].smem_per_block
    assert not any(candidate.supported() for candidate in before)


def tile(config: PortableConfig) -> tuple[int, int, int]:
    return config.BM, config.BN, config.num_stages


def test_the_measured_tile_on_an_h200() -> None:
    assert tile(select_portable_config(DENSE, TARGETS["h200"])) == (128, 64, 3)


def test_less_memory_smaller_tiles() -> None:
    sizes = [
        select_portable_config(LATENT, TARGETS[name]).smem_used
        for name in ("h200", "a100", "rtx4090", "mi300x")
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("heads", "most"), [(1, 16), (16, 16), (20, 32), (128, 64)])
def test_a_token_list_fills_no_more_rows_than_heads(heads: int, most: int) -> None:
    shape = replace(LATENT, form="sparse", heads=heads)
    rows = select_portable_config(shape, TARGETS["h200"]).BM
    assert rows <= most


def test_odd_widths_are_padded() -> None:
    shape = replace(DENSE, d_nope=448, d_rope=8, d_v=100)
    config = select_portable_config(shape, TARGETS["a100"])
    assert (config.nope_cols, config.tail_cols) == (512, 0)
    assert (config.rope_cols, config.v_cols) == (16, 128)


def test_too_wide_says_why() -> None:
    shape = replace(DENSE, d_nope=4096, d_v=4096)
    config = select_portable_config(shape, TARGETS["rtx4090"])
    assert not config.supported()
    assert "16 rows x (4096 of O + 1.5 x 16 scores) over 128 threads" in config.why_unsupported()
    assert config.explain()[-1].startswith("not supported: ")


def test_registers_are_counted() -> None:
    config = select_portable_config(LATENT, TARGETS["h200"])
    why = replace(config, BM=256).why_unsupported()
    assert why == "registers: 256 rows x (512 of O + 1.5 x 64 scores) over 256 threads = 608 > 192"


def test_bad_arguments() -> None:
    config = select_portable_config(DENSE, TARGETS["h200"])
    with pytest.raises(InvalidArgument, match="form"):
        replace(config, form="square")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="BM"):
        replace(config, BM=0)


def test_a_tail_instead_of_padding() -> None:
    config = select_portable_config(replace(DENSE, d_nope=192, d_v=256), TARGETS["h200"])
    assert (config.nope_cols, config.tail_cols, config.qk_cols) == (128, 64, 256)


@pytest.mark.parametrize("name", GPUS)
def test_fp8_operands_are_planned_as_wide_as_they_are_multiplied(name: str) -> None:
    fp8 = replace(DENSE, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3", rope_dtype="e4m3")
    wide, narrow = (select_portable_config(p, TARGETS[name]) for p in (DENSE, fp8))
    assert narrow.supported() and wide.smem_used == narrow.smem_used
    assert not narrow.bulk_copies


def test_measured_tiles_come_first_and_say_so() -> None:
    few = select_portable_config(replace(LATENT, form="sparse"), TARGETS["h200"])
    assert (few.BM, few.BN, few.num_stages, few.num_warps) == (16, 64, 2, 4)
    assert "16 heads" in few.explain()[0] and "measured" in few.explain()[0]
    many = select_portable_config(replace(LATENT, form="sparse", heads=128), TARGETS["h200"])
    assert tile(many)[:2] == (64, 64) and "128 heads" in many.measured
    elsewhere = select_portable_config(LATENT, TARGETS["h100"])
    assert elsewhere.measured == "" and "first candidate" in elsewhere.explain()[0]


def test_a_measured_tile_that_does_not_fit_is_passed_over() -> None:
    wide = select_portable_config(replace(DENSE, d_nope=512, d_v=512), TARGETS["h200"])
    assert wide.supported() and wide.measured == ""


def test_tuned_files_say_where_they_come_from() -> None:
    for path in Path(tuned.__file__).parent.glob("*.json"):
        record = json.loads(path.read_text())
        assert path.stem in TARGETS
        assert set(record["provenance"]) >= {"date", "gpu", "torch", "triton", "command"}
        assert all(entry["measured"] for entry in record["tiles"])
    assert doctest.testmod(tuned).failed == 0


@pytest.mark.parametrize(
    ("change", "target", "expected"),
    [
        ({}, "h200", True),
        ({}, "a100", False),
        ({}, "mi300x", False),
        ({"d_v": 96}, "h200", False),
        ({"d_nope": 192}, "h200", False),
        ({"rope_dtype": "e4m3"}, "h200", False),
        ({"rope": "cache", "rope_dtype": "fp8_656"}, "h200", True),
        ({"aligned_16": False}, "h200", False),
    ],
)
def test_bulk_copies_need_a_chip_and_tensors_that_have_them(
    change: dict[str, Any], target: str, expected: bool
) -> None:
    config = select_portable_config(replace(DENSE, **change), TARGETS[target])
    assert config.bulk_copies == expected


def test_an_fp8_cache_is_widened_once_when_that_pays() -> None:
    busy = replace(
        LATENT, form="sparse", heads=128, kv_dtype="fp8_656", topk=2048, total_q=4096, total_k=8192
    )
    modes = [
        select_portable_config(problem, TARGETS["h200"]).cache_read
        for problem in (busy, replace(busy, total_q=2), replace(busy, total_k=2**20), LATENT)
    ]
    assert [read.mode for read in modes] == ["workspace", "in_kernel", "in_kernel", "plain"]
    assert modes[0].workspace_bytes == 8192 * 576 * 2
    assert any(
        "workspace" in line for line in select_portable_config(busy, TARGETS["h200"]).explain()
    )


def test_the_tile_does_not_depend_on_how_the_cache_is_read() -> None:
    """Or the bits of a request would depend on the others in its call."""
    base = replace(LATENT, form="sparse", heads=128, kv_dtype="fp8_656", topk=64, total_k=8192)
    for name in GPUS:
        tiles = {
            tile(select_portable_config(replace(base, total_q=n), TARGETS[name])) for n in (1, 4096)
        }
        assert len(tiles) == 1


def test_split_counts_the_tiles_of_the_form() -> None:
    dense = select_portable_config(DENSE, TARGETS["h200"]).split
    rows = select_portable_config(LATENT, TARGETS["h200"]).split
    assert dense is not None and dense.tiles(128) == 16
    assert isinstance(rows, LatentSplit) and rows.ranges(rows=16, keys=32768) == 32
    assert select_portable_config(replace(LATENT, form="sparse"), TARGETS["h200"]).split is None


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
@pytest.mark.parametrize("width", [16, 32, 64, 128, 256, 512])
def test_warps_beside_each_other_have_whole_lines_of_v(form: str, width: int) -> None:
    """64 rows and 8 warps over 64 columns made Triton read past the end of shared memory."""
    base = DENSE if form == "dense" else LATENT
    problem = replace(base, form=form, heads=128, d_nope=width, d_v=width)  # type: ignore[arg-type]
    for name in GPUS:
        config = select_portable_config(problem, TARGETS[name])
        if config.BM >= 64 and config.num_warps > config.BM // 16:
            assert config.out_cols * (config.BM // 16) >= 64 * config.num_warps


@pytest.mark.parametrize("d_v", [1, 7, 10, 24, 32])
@pytest.mark.parametrize("d_nope", [17, 52, 136, 220])
def test_narrow_values_stay_out_of_asynchronous_products(d_nope: int, d_v: int) -> None:
    """With 128 rows they read past shared memory or gave wrong sums on an H200."""
    problem = Problem(form="dense", heads=4, d_nope=d_nope, d_rope=8, d_v=d_v)
    config = select_portable_config(problem, target_by_name("h200"))
    assert config.supported() and config.BM < MIN_WGMMA


@pytest.mark.parametrize("kv", ["bf16", "fp8_block64"])
@pytest.mark.parametrize("d_nope", [256, 448, 512])
def test_second_terms_of_fp16_queries_are_counted(d_nope: int, kv: str) -> None:
    """Triton asked for 315648 bytes at 512 + 64, where the plan had counted 229376."""
    wide = Problem(form="latent", heads=16, d_nope=d_nope, d_rope=64, d_v=d_nope, kv_dtype=kv)
    h200 = target_by_name("h200")
    one, two = (select_portable_config(replace(wide, q_dtype=q), h200) for q in ("bf16", "fp16"))
    assert (one.terms, two.terms) == (1, 2) and two.supported()
    same = replace(one, terms=2)
    assert same.smem_used >= one.smem_used + one.q_bytes + one.p_bytes


@pytest.mark.parametrize("d_nope", [96, 192, 320])
def test_latent_rows_are_one_tile_as_wide_as_the_kernel_makes_it(d_nope: int) -> None:
    problem = Problem(form="latent", heads=16, d_nope=d_nope, d_rope=64, d_v=d_nope // 2)
    config = select_portable_config(problem, target_by_name("h200"))
    assert (config.nope_cols, config.tail_cols) == (padded(d_nope), 0)
    assert config.out_cols == config.nope_cols


@pytest.mark.parametrize("name", GPUS)
def test_a_value_of_two_types_takes_more_shared_memory(name: str) -> None:
    """Triton asked for 246016 bytes at 16 x 64, where the plan had counted 150528."""
    rows = {"kv_dtype": "fp8_584", "v_dtype": "fp8_584", "rope_dtype": "fp8_584"}
    problem = replace(LATENT, form="sparse", d_rope=0, rope="none", topk=64, page_size=64, **rows)
    config = select_portable_config(problem, TARGETS[name])
    assert config.supported()
    if TARGETS[name].warp == 32:
        rest = config.q_bytes + config.p_bytes + config.scratch_bytes
        assert config.smem_used == rest + config.buffers * config.BN * (2 * 512 + 768)


def test_a_chip_without_room_for_it_is_refused_with_the_sum() -> None:
    rows = {"kv_dtype": "fp8_584", "v_dtype": "fp8_584", "rope_dtype": "fp8_584"}
    problem = replace(LATENT, form="sparse", d_rope=0, rope="none", topk=64, page_size=64, **rows)
    with pytest.raises(Unsupported, match=r"shared memory: Q 16384 .* = .* > 40960"):
        plan(problem, generic_target("sm_86", 84, 40960), "portable")
