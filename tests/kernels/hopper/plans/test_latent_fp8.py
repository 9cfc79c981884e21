"""Plans of the latent kernel for FP8 queries."""

from dataclasses import replace

import pytest

from openmla.errors import Unsupported
from openmla.kernels.hopper.chip import REGISTERS_PER_SM, SMEM_PER_BLOCK
from openmla.kernels.hopper.latent_fp8.plan import (
    HopperLatentFp8Config,
    select_hopper_latent_fp8_config,
)
from openmla.planning import plan
from openmla.problem import Problem

LISTS = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    total_q=4096,
    total_k=8192,
    topk=2048,
    q_dtype="e4m3",
    kv_dtype="e4m3",
)
PAGES = replace(LISTS, form="latent", topk=0, kv_dtype="fp8_token", page_size=64)


@pytest.mark.parametrize("problem", [LISTS, replace(LISTS, has_k_scale=True), PAGES], ids=str)
def test_two_steps_of_keys_fit(problem: Problem) -> None:
    chosen = plan(problem, "h200", "hopper")
    config = chosen.config
    assert isinstance(config, HopperLatentFp8Config)
    assert config.num_kv_stages == 2 and config.smem_used <= SMEM_PER_BLOCK
    assert config.scaled == (problem is not LISTS)
    assert config.registers.total <= REGISTERS_PER_SM and config.registers.threads == 512
    assert any("fp16" in line for line in chosen.config_lines())


def test_lists_run_it_and_pages_when_named() -> None:
    kernel = plan(LISTS, "h200", "hopper").kernel
    assert not kernel.on_request(None, LISTS) and not kernel.coarse and not kernel.fp8_weights
    assert "splits the keys" in plan(PAGES, "h200", "hopper").kernel.on_request(None, PAGES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"d_nope": 256, "d_v": 256}, "256"),
        ({"d_rope": 32}, "d_rope 32"),
        ({"kv_dtype": "fp8_656", "page_size": 64}, "fp8_656"),
        ({"kv_dtype": "fp8_token", "page_size": 64, "has_k_scale": True}, "has_k_scale"),
        ({"aligned_16": False}, "16 bytes"),
    ],
)
def test_what_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        plan(replace(LISTS, **change), "h200", "hopper")  # type: ignore[arg-type]


def test_a_config_says_what_it_cannot_do() -> None:
    config = select_hopper_latent_fp8_config(heads=128, latent=256, rope=32)
    assert "latent width 256" in config.why_unsupported()
