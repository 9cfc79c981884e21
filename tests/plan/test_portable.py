"""Tiles of the plain Triton kernels."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from openmla.errors import InvalidArgument
from openmla.plan import portable
from openmla.plan.portable import PortableConfig, portable_candidates, select_portable_config
from openmla.plan.target import TARGETS
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


def test_fp8_throughout_halves_the_bytes() -> None:
    fp8 = replace(DENSE, q_dtype="e4m3", kv_dtype="e4m3", v_dtype="e4m3")
    wide, narrow = (next(portable_candidates(p, TARGETS["h200"])) for p in (DENSE, fp8))
    assert wide.smem_used == 2 * narrow.smem_used
    widened = next(portable_candidates(fp8, TARGETS["a100"]))  # it has no e4m3 of its own
    assert widened.smem_used == wide.smem_used


def test_split_counts_the_tiles_of_the_form() -> None:
    dense = select_portable_config(DENSE, TARGETS["h200"]).split
    rows = select_portable_config(LATENT, TARGETS["h200"]).split
    assert dense is not None and dense.tiles(128) == 16
    assert rows is not None and rows.tiles(4) == 1
    assert select_portable_config(replace(LATENT, form="sparse"), TARGETS["h200"]).split is None
