"""Dense Blackwell plans: the reference values, the invariants behind them, the bad inputs."""

from __future__ import annotations

import doctest
import json
from dataclasses import FrozenInstanceError, replace
from functools import reduce
from importlib import import_module
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from openmla.errors import InvalidArgument
from openmla.modular.blackwell import (
    CausalMask,
    FA4Config,
    MLAConfig,
    NullMask,
    SM100AttentionSMem,
    Swizzle,
    select_mla_prefill_config,
)
from openmla.modular.blackwell.ring import base_bytes, slot_size

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "blackwell.json").read_text())

DEEPSEEK: dict[str, Any] = {
    "qkv_dtype": "bfloat16",
    "rope_gmem_dtype": "bfloat16",
    "rope_mma_dtype": "bfloat16",
    "num_q_heads": 128,
    "group": 128,
    "depth": 192,
    "page_size": 128,
}
GLM5: dict[str, Any] = DEEPSEEK | {"depth": 256, "v_depth": 256}
MHA: dict[str, Any] = {
    "qkv_dtype": "bfloat16",
    "num_q_heads": 32,
    "group": 4,
    "qk_depth": 128,
    "ov_depth": 128,
    "swizzle_mode": 128,
    "page_size": 0,
    "is_mla": False,
}


def read(plan: Any, path: str, arguments: dict[str, Any]) -> Any:
    """The value a dotted name reaches: attributes as they are, methods called."""
    if path.endswith("v_tma_box_rows(page_size)"):
        return plan.fa4_config.v_tma_box_rows(arguments["page_size"])

    def step(value: Any, name: str) -> Any:
        found = getattr(value, name)
        return found() if callable(found) else found

    return reduce(step, path.split("."), plan)


def mismatches(make: Any, tables: list[dict[str, Any]]) -> list[str]:
    found = []
    for table in tables:
        for arguments, values in table["rows"]:
            kwargs = dict(zip(table["in"], arguments, strict=True))
            plan = make(**kwargs)
            for name, want in zip(table["out"], values, strict=True):
                if (got := read(plan, name, kwargs)) != want:
                    found.append(f"{name}: {got}, not {want}, for {kwargs}")
    return found


@pytest.mark.parametrize("make", [FA4Config, MLAConfig, select_mla_prefill_config])
def test_reproduces_the_reference_plans(make: Any) -> None:
    tables = ORACLE[make.__name__]
    assert sum(len(table["rows"]) for table in tables) >= 90
    assert mismatches(make, tables) == []


@pytest.mark.parametrize("maker", ["for_mla", "for_mha"])
def test_reproduces_the_reference_memory_maps(maker: str) -> None:
    make = getattr(SM100AttentionSMem, maker)
    assert mismatches(make, ORACLE["smem_layout"][maker]) == []


@pytest.mark.parametrize(
    ("page_size", "BM", "crosses"), [(64, 256, True), (32, 256, False), (64, 128, False)]
)
def test_a_shared_ring_of_two_query_tiles_has_cross_stage_barriers(
    page_size: int, BM: int, crosses: bool
) -> None:
    """Where pages hold whole key tiles, which have 64 keys at this depth."""
    block = SM100AttentionSMem.for_mha(qkv_dtype="bfloat16", depth=192, page_size=page_size, BM=BM)
    assert block.config.ring.use_fused_kv and block.config.ring.cross_p is crosses


def test_reproduces_the_reference_choice_of_1q() -> None:
    for heads, num_qo, *batch, want in ORACLE["prefer_1q"]["rows"]:
        config = MLAConfig(**DEEPSEEK | {"num_q_heads": heads, "group": heads, "num_qo": num_qo})
        assert config.prefer_1q(*batch) is want, (heads, num_qo, batch)
    nobody = {"max_prompt_len": 4096, "num_partitions": 1, "batch_size": 0, "sm_count": 148}
    assert config.prefer_1q(**nobody)


def test_reproduces_the_reference_masks() -> None:
    masks = ORACLE["masks"]
    for row in masks["CausalMask.iters"]["rows"]:
        assert list(CausalMask.iters(*row[:4])) == row[4:]
    for row in masks["CausalMask.mask_bits"]["rows"]:
        assert CausalMask.mask_bits(*row[:-1]) == row[-1]
    for row in masks["NullMask.iters"]["rows"]:
        assert NullMask.iters(*row[:4]).total_iters == row[4]
    for row in masks["NullMask.mask_bits"]["rows"]:
        assert NullMask.mask_bits(*row[:-1]) == row[-1]


@pytest.mark.parametrize("score_row", range(0, 70, 3))
def test_causal_tiles_and_bits_agree_with_the_definition(score_row: int) -> None:
    BM, BN, num_keys = 32, 16, 100
    seen = [[key <= row for key in range(num_keys)] for row in range(score_row, score_row + BM)]
    tiles = CausalMask.iters(BM, BN, score_row, num_keys)
    assert tiles.total_iters == -(-min(num_keys, sum(seen[-1])) // BN)
    for tile in range(min(tiles.num_unmasked_end, tiles.total_iters)):
        assert all(all(row[tile * BN : (tile + 1) * BN]) for row in seen)
    bits = CausalMask.mask_bits(score_row, 32)
    assert [bool(bits >> i & 1) for i in range(32)] == seen[0][32:64]


def sweep() -> list[MLAConfig]:
    dtypes = ["bfloat16", "float8_e4m3fn"]
    plans = []
    for qkv, rope, scale, depth, v_depth, page, variant in product(
        dtypes,
        dtypes,
        [None, "float32"],
        [128, 192, 256, 320],
        [-1, 64, 128, 192, 256],
        [0, 16, 64, 128, 512],
        [{"num_qo": 2}, {"num_qo": 1}, {"num_qo": 1, "single_o": True}],
    ):
        problem = DEEPSEEK | {"qkv_dtype": qkv, "rope_mma_dtype": rope, "scale_dtype": scale}
        problem |= {"depth": depth, "v_depth": v_depth, "page_size": page}
        plans.append(MLAConfig(**problem | variant))
    return plans


def test_supported_plans_fit_and_nothing_overlaps() -> None:
    supported = [plan for plan in sweep() if plan.supported()]
    assert len(supported) > 500
    for plan in supported:
        fa4 = plan.fa4_config
        smem = SM100AttentionSMem(fa4)
        # The map never outgrows the plan, and a plan with two accumulators wastes nothing when
        # nope is as wide as V.
        assert smem.smem_size() <= plan.smem_used <= plan.sm100_smem_carveout
        if not plan.single_o and plan.v_depth == plan.nope_depth:
            assert smem.smem_size() == plan.smem_used
        assert smem.mbar_byte_offset % 8 == 0
        assert len(smem.mbars.init_counts) == smem.mbars.size
        # Tensor memory: S0 | S1 | O0 | O1, in that order, at least as wide as their contents.
        assert plan.TMEM_S1 >= plan.BN <= plan.TMEM_O0 - plan.TMEM_S1
        first_o = 0 if plan.single_o else fa4.padded_ov_depth
        assert first_o == plan.TMEM_O1 - plan.TMEM_O0
        assert plan.tmem_used == plan.TMEM_O1 + fa4.padded_ov_depth <= 512
        assert plan.launch_smem_used() >= plan.smem_used
        assert plan.num_kv_stages >= 2 and plan.BN % fa4.MMA_K == 0


def test_the_ring_is_as_deep_as_shared_memory_allows() -> None:
    for plan in (plan.fa4_config for plan in sweep() if plan.supported()):
        size = slot_size(plan, plan.BN)
        slots = plan.ring.slots
        room = plan.sm100_smem_carveout - base_bytes(plan)
        assert size.total(slots) <= room < size.total(slots + 1)


def test_verdict_and_reason_agree() -> None:
    plans: list[FA4Config | MLAConfig] = [*sweep()]
    plans += [FA4Config(**MHA | {"BM": BM, "qk_depth": d}) for BM in (32, 64) for d in (128, 192)]
    for plan in plans:
        assert plan.supported() == (plan.why_unsupported() == "")
        lines = plan.explain()
        assert all(isinstance(line, str) and line for line in lines)
        assert plan.supported() != lines[-1].startswith("not supported: ")
        assert not any(line.startswith("not supported: ") for line in lines[:-1])


def test_two_accumulators_of_v_256_leave_glm5_one() -> None:
    config = select_mla_prefill_config(**GLM5)
    assert (config.num_qo, config.single_o, config.BN) == (1, True, 64)
    assert config.launch_num_threads() == 384
    text = "\n".join(config.explain())
    assert "512 columns - 2 x 256 output = 0 for two score tiles" in text
    assert "1 K/V stages < 2: 232448 - 66660 bytes" in text
    # In fp8 a tile of 128 keys fits twice.
    fp8 = GLM5 | {"qkv_dtype": "float8_e4m3fn", "rope_mma_dtype": "float8_e4m3fn"}
    assert select_mla_prefill_config(**fp8).BN == 128


def test_the_absorbed_form_is_refused_with_its_arithmetic() -> None:
    config = select_mla_prefill_config(**DEEPSEEK | {"depth": 576, "v_depth": 512})
    assert not config.supported()
    assert config.num_qo == 2
    assert "512 columns - 2 x 512 output = -512" in config.why_unsupported()


def test_explain_accounts_for_deepseek() -> None:
    lines = select_mla_prefill_config(**DEEPSEEK).explain()
    assert "BN = 128: bound by tensor memory, in MMA steps of 16 keys" in lines
    assert "Q tile: 256 rows x (128 x 2 + 64 rope x 2) = 98304" in lines
    assert "3 slots, an odd number: K and V share one ring of 3 in turn" in lines
    assert "used: 230556 of 232448" in lines


def test_explain_names_what_bound_bn() -> None:
    def bound(**more: Any) -> str:
        return FA4Config(**MHA | more).explain()[2]

    assert "tensor memory" in bound()
    assert "the widest MMA" in bound(BM=32)
    assert "bn_cap 64" in bound(bn_cap=64)
    assert "pages of 128" in bound(qk_depth=64, ov_depth=64, page_size=128)


def test_pages_that_tiles_cannot_be_cut_into_are_unsupported() -> None:
    config = MLAConfig(**DEEPSEEK | {"page_size": 96})
    assert config.why_unsupported() == (
        "pages of 96 and tiles of 128 keys: neither divides the other"
    )


def test_equal_spellings_make_equal_plans() -> None:
    plans = [FA4Config(**MHA | {"rope_dtype": none}) for none in (None, "none", "invalid")]
    assert plans[0] == plans[1] == plans[2]
    assert len({hash(plan) for plan in plans}) == 1
    assert FA4Config(**MHA | {"swizzle_mode": Swizzle.B128}) == plans[0]
    assert MLAConfig(**DEEPSEEK) == MLAConfig(**DEEPSEEK | {"v_depth": 128})
    assert MLAConfig(**DEEPSEEK).with_num_qo(1).with_num_qo(2) == MLAConfig(**DEEPSEEK)
    with pytest.raises(FrozenInstanceError):
        plans[0].BM = 128  # type: ignore[misc]


def test_a_2q_plan_reserves_enough_for_its_1q_variant() -> None:
    fp8 = DEEPSEEK | {"qkv_dtype": "float8_e4m3fn", "rope_mma_dtype": "float8_e4m3fn"}
    config = MLAConfig(**fp8)
    assert config.can_switch_to_1q()
    assert config.smem_used < config.switch_1q_config().smem_used == config.launch_smem_used()
    assert not config.switch_1q_config().can_switch_to_1q()


def test_plain_attention_switches_only_with_the_same_pieces_of_k() -> None:
    config = FA4Config(**MHA | {"qkv_dtype": "float8_e4m3fn", "swizzle_mode": 64})
    variant = config.switch_1q_config()
    assert variant.num_qk_stages == config.num_qk_stages == 2
    assert config.can_switch_to_1q()
    assert not replace(config, pair_cta=True).can_switch_to_1q()


BAD_MLA = [
    ({"num_q_heads": -16}, "num_q_heads: expected an integer of at least 1, got -16"),
    ({"num_q_heads": 2.0}, "num_q_heads: expected an integer"),
    ({"group": 24}, "group: expected a divisor of num_q_heads 128, got 24 (128 = 5 x 24 + 8)"),
    (
        {"depth": 64},
        "depth: expected more than the 64 columns of rope, got 64 (nope = 64 - 64 = 0)",
    ),
    ({"depth": 32}, "nope = 32 - 64 = -32"),
    ({"v_depth": 0}, "v_depth: expected an integer of at least 1, got 0"),
    ({"page_size": 17}, "got 17 (= 2 x 8 + 1)"),
    ({"page_size": -16}, "page_size: expected an integer of at least 0, got -16"),
    ({"num_qo": 3}, "num_qo: expected 1 or 2 query tiles, got 3"),
    ({"bn_cap": -1}, "bn_cap"),
    ({"qkv_dtype": "int3"}, "qkv_dtype: expected one of bfloat16"),
    ({"qkv_dtype": None}, "qkv_dtype"),
    ({"rope_gmem_dtype": "bf17"}, "rope_gmem_dtype"),
    ({"rope_mma_dtype": "float64"}, "rope_mma_dtype"),
    ({"scale_dtype": "int8"}, "scale_dtype"),
]
BAD_FA4 = [
    ({"swizzle_mode": 100}, "swizzle_mode: expected 16 (none), 32, 64 or 128 bytes, got 100"),
    ({"qk_depth": 64}, "qk_depth: expected at least the 128 columns without rope, got 64"),
    ({"ov_depth": 0}, "ov_depth"),
    ({"BM": 96}, "BM: expected one of (32, 64, 128, 256) query rows, got 96"),
    ({"pinned_qk_stages": -1}, "pinned_qk_stages"),
    ({"group": 5}, "32 = 6 x 5 + 2"),
]


@pytest.mark.parametrize(("change", "message"), BAD_MLA)
def test_bad_mla_arguments_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        MLAConfig(**DEEPSEEK | change)
    assert message in str(error.value)


@pytest.mark.parametrize(("change", "message"), BAD_FA4)
def test_bad_attention_arguments_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        FA4Config(**MHA | change)
    assert message in str(error.value)


@pytest.mark.parametrize("bad", [(-1, 1, 1, 148), (1, 0, 1, 148), (1, 1, -1, 148), (1, 1, 1, 0)])
def test_bad_batches_raise(bad: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        MLAConfig(**DEEPSEEK).prefer_1q(*bad)


def test_planning_is_cheap() -> None:
    """The goal is 5,000 plans a second; the bound here is loose, for busy machines."""
    started = process_time()
    for heads in range(1, 201):
        problem = GLM5 | {"num_q_heads": heads, "group": heads}
        select_mla_prefill_config(**problem).launch_smem_used()
    assert process_time() - started < 200 * 1e-3


@pytest.mark.parametrize("name", ["fa4", "mla", "smem", "masks"])
def test_examples_in_the_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(f"openmla.modular.blackwell.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
