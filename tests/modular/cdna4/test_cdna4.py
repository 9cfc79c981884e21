"""The CDNA4 plans against the original kernels' values, and the limits they must keep."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from openmla.errors import InvalidArgument, Unsupported
from openmla.modular import (
    MhaMmaOp,
    MlaConfigV2,
    MlaMmaOp,
    MlaPrefillV2,
    MlaPrefillV2Core,
    cdna4,
)
from openmla.modular.cdna4 import LDS_BYTES
from openmla.modular.cdna4.layout import v_map
from openmla.modular.cdna4.layout.k import KSlot

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "cdna4.json").read_text())

DSV3: dict[str, Any] = {
    "q_block_size": 32,
    "kv_block": 128,
    "depth": 128,
    "num_heads": 128,
    "num_kv_heads": 1,
    "d_qk": 192,
    "d_rope": 64,
    "cache_depth": 576,
    "rope_cache_offset": 512,
    "dtype": "float8_e4m3fn",
}

BUILDERS = {
    "MlaConfigV2": lambda config: config,
    "MhaMmaOp": lambda config: MhaMmaOp(config.mha()),
    "MlaMmaOp": lambda config: MlaMmaOp(config.mha()),
    "MlaPrefillV2Core": MlaPrefillV2Core,
    "MlaPrefillV2": MlaPrefillV2,
}
ROWS = [(kind, row) for kind in BUILDERS for row in ORACLE[kind]]


def dsv3(**changes: Any) -> MlaConfigV2:
    return MlaConfigV2(**{**DSV3, **changes})


def value(plan: Any, name: str) -> Any:
    """An attribute, property or method, in the form that JSON gives back."""
    found = getattr(plan, name)
    found = found() if callable(found) else found
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return dataclasses.asdict(found)
    return list(found) if isinstance(found, tuple) else found


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_every_value_of_the_original(kind: str, row: dict[str, Any]) -> None:
    plan = BUILDERS[kind](MlaConfigV2(**row["in"]))
    assert {name: value(plan, name) for name in row["out"]} == row["out"]


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_fields_build_what_a_config_builds(kind: str, row: dict[str, Any]) -> None:
    assert getattr(cdna4, kind)(**row["in"]) == BUILDERS[kind](MlaConfigV2(**row["in"]))


@pytest.mark.parametrize("make", [MhaMmaOp, MlaMmaOp, MlaPrefillV2Core, MlaPrefillV2])
def test_a_config_and_fields_do_not_mix(make: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"config: expected alone, .* got depth"):
        make(dsv3(), depth=64)
    with pytest.raises(InvalidArgument, match="config: expected an MhaConfigV2"):
        make("deepseek-v3")


def test_the_oracle_has_rows_of_every_kind() -> None:
    assert all(len(ORACLE[kind]) >= 6 for kind in BUILDERS)


@pytest.mark.parametrize("module", ["config", "mma", "core", "prefill"])
def test_worked_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"openmla.modular.cdna4.{module}"))
    assert result.attempted and not result.failed


class TestProducts:
    """The three shapes, from the arithmetic of a 64-lane wave."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
    @pytest.mark.parametrize("k_128", [False, True])
    @pytest.mark.parametrize("kv_block", [128, 256])
    @pytest.mark.parametrize("depth", [128, 256])
    def test_register_tiles_hold_whole_tensors(
        self, dtype: str, k_128: bool, kv_block: int, depth: int
    ) -> None:
        op = MhaMmaOp(dsv3(dtype=dtype, fp8_mma_k_128=k_128, kv_block=kv_block, depth=depth).mha())
        sizes = {
            op.Q_LAYOUT: 32 * depth,
            op.K_LAYOUT: kv_block * depth,
            op.V_LAYOUT: kv_block * depth,
            op.ATT_LAYOUT: kv_block * 32,
            op.ATT_BF16_FULL_LAYOUT: kv_block * 32,
            op.ATT_BF16_SUB_LAYOUT: op.MMA_K * 32,
            op.O_LAYOUT: depth * 32,
            op.O_T_LAYOUT: depth * 32,
        }
        for (rows, columns, per_lane), elements in sizes.items():
            assert rows * columns * per_lane * 64 == elements

    def test_k_128_is_for_fp8_only(self) -> None:
        fp8 = MhaMmaOp(dsv3(fp8_mma_k_128=True).mha())
        bf16 = MhaMmaOp(dsv3(fp8_mma_k_128=True, dtype="bfloat16").mha())
        assert (fp8.MMA_M, fp8.MMA_N, fp8.MMA_K) == (16, 16, 128)
        assert (fp8.ROWL_HALF_LANES, fp8.ROWL_STRIDE, fp8.FRAG_ELTS) == (16, 32, 32)
        assert (bf16.MMA_M, bf16.MMA_N, bf16.MMA_K) == (32, 32, 16)
        assert bf16.FP8_MMA_K_128

    def test_large_fp8_tiles_outside_the_streamed_shape_narrow_the_scores(self) -> None:
        core = MlaPrefillV2Core(dsv3(fp8_mma_k_128=True))
        assert core._SOFTMAX_DTYPE == "float16"
        assert core._NUM_K_ROPE_TILES == 0

    @pytest.mark.parametrize(("kv_block", "strips"), [(64, 1), (128, 2), (256, 4)])
    @pytest.mark.parametrize("k_128", [False, True])
    def test_fp8_strips_have_64_keys_in_either_product(
        self, kv_block: int, strips: int, k_128: bool
    ) -> None:
        counted = {
            dtype: MlaPrefillV2Core(
                dsv3(kv_block=kv_block, fp8_mma_k_128=k_128, dtype=dtype)
            )._NUM_PV_SUBTILES
            for dtype in ("float8_e4m3fn", "bfloat16")
        }
        assert counted == {"float8_e4m3fn": strips, "bfloat16": kv_block // 16}

    def test_fragment_addresses_follow_the_lds_maps(self) -> None:
        op = MlaMmaOp(dsv3().mha())
        v = v_map(v_full_v227=True)
        assert op.load_K_frag(37, 2) == (4464, 4448)
        assert op.precompute_v_lane_base(35, v_full_v227=True) == v.lane_base(35)
        assert op.load_V_frag(1, 3, v_full_v227=True) == tuple(v.cell(1, 3, r) for r in range(4))

    def test_a_whole_v_tile_is_its_fragments(self) -> None:
        op = MlaMmaOp(dsv3().mha())
        whole = op.load_V_from_lane_base()
        assert whole == tuple(op.load_V_frag(i, j) for i in range(2) for j in range(4))
        assert len(whole) * op.FRAG_ELTS == 64 * 4  # the 64 registers of a lane, 4 values each

    @pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"fp8_mma_k_128": True}])
    def test_no_fragments_for_other_products(self, changes: dict[str, Any]) -> None:
        with pytest.raises(Unsupported, match="32×32×64"):
            MlaMmaOp(dsv3(**changes).mha()).load_K_frag(0, 0)


class TestLds:
    def test_v227_costs_one_slot(self) -> None:
        with_v227 = MlaPrefillV2(dsv3())
        without = MlaPrefillV2(dsv3(), v_full_v227=False)
        assert (with_v227.smem_used, without.smem_used) == (148224, LDS_BYTES)
        assert (with_v227._V_RING_DEPTH, without._V_RING_DEPTH) == (3, 4)
        assert with_v227.smem_used + with_v227.v_slot_bytes > LDS_BYTES

    @pytest.mark.parametrize("v_full_v227", [False, True])
    def test_slots_are_as_large_as_their_maps(self, v_full_v227: bool) -> None:
        block = MlaPrefillV2(dsv3(), v_full_v227=v_full_v227)
        assert block.v_slot_bytes == v_map(v_full_v227=v_full_v227).slot_bytes
        assert block.k_slot_bytes == KSlot().slot_bytes
        assert KSlot().rope_sub_id == block._K_ROPE_SUBBLOCK_OFFSET

    def test_ring_layouts_cover_their_bytes(self) -> None:
        block = MlaPrefillV2(dsv3())
        for (rows, columns), size in (
            (block._Q_LDS_LAYOUT, block.q_bytes),
            (block._K_RING_LAYOUT, block.k_ring_bytes),
            (block._V_RING_LAYOUT, block.v_ring_bytes),
        ):
            assert rows * columns == size

    def test_explain_adds_up(self) -> None:
        lines = MlaPrefillV2(dsv3()).explain()
        assert "LDS: 49152 + 49152 + 49920 = 148224 of 163840, 15616 free" in lines
        assert "limit: a 4th V slot would make 148224 + 16640 = 164864 > 163840" in lines
        assert lines[-1].startswith("instead: V ring 4 slots × 16384 = 65536")

    def test_explain_says_why_not(self) -> None:
        block = MlaPrefillV2(dsv3(q_block_size=64))
        assert block.explain()[-1] == f"unsupported: {block.why_unsupported()}"
        assert "limit: not LDS" in "\n".join(MlaPrefillV2(dsv3(kv_block=64)).explain())


class TestLimits:
    def test_deepseek_is_supported(self) -> None:
        for v_full_v227 in (False, True):
            block = MlaPrefillV2(dsv3(), v_full_v227=v_full_v227)
            assert block.supported() and block.why_unsupported() == ""

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"dtype": "bfloat16"}, "dtype bfloat16"),
            ({"dtype": "float8_e5m2"}, "dtype float8_e5m2"),
            ({"fp8_mma_k_128": True}, "64 // 128 = 0 rope products"),
            ({"kv_block": 64}, "kv_block 64 < 128"),
            ({"d_qk": 200}, "d_qk 200 != depth 128 + d_rope 64 = 192"),
            ({"rope_cache_offset": 64}, "rope 64..127 do not fit side by side"),
            ({"rope_cache_offset": 576}, "rope 576..639 do not fit side by side in 576"),
            ({"num_heads": 128, "num_kv_heads": 3}, "128 % num_kv_heads 3 = 2"),
            ({"q_block_size": 48}, "q_block_size 48 % 32 = 16"),
            ({"kv_block": 160}, "kv_block 160 % 64 = 32"),
            ({"d_rope": 32, "d_qk": 160}, "d_rope 32 % 64 = 32"),
            ({"rope_cache_offset": 500}, "rope_cache_offset 500 % 64 = 52"),
            ({"num_warps": 6}, "16 copies of 1024 bytes, which 6 waves"),
            ({"num_warps": 4}, "16 chunks hold 128 keys × 128 columns written by 8 waves"),
            ({"depth": 256, "d_qk": 320}, "not 128 × 256 by 8"),
            ({"q_block_size": 64}, "98304 + K 2 × 24576 + V 3 × 16640 = 197376 > 163840"),
        ],
    )
    def test_reasons_spell_the_arithmetic_out(self, changes: dict[str, Any], reason: str) -> None:
        block = MlaPrefillV2(dsv3(**changes))
        assert reason in block.why_unsupported()
        assert not block.supported()

    def test_grouped_kv_heads_are_fine(self) -> None:
        assert MlaPrefillV2(dsv3(num_kv_heads=8)).supported()


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "bad"),
        [
            ("q_block_size", 0),
            ("kv_block", -128),
            ("depth", 128.0),
            ("num_heads", True),
            ("num_kv_heads", "1"),
            ("num_warps", None),
            ("rescale_threshold", float("nan")),
            ("rescale_threshold", -1.0),
            ("dtype", "fp8"),
            ("output_dtype", "int8"),
            ("fp8_mma_k_128", 1),
            ("d_qk", 0),
            ("d_rope", -1),
            ("cache_depth", -1),
            ("rope_cache_offset", -1),
        ],
    )
    def test_bad_values_name_the_argument(self, name: str, bad: object) -> None:
        with pytest.raises(InvalidArgument) as error:
            dsv3(**{name: bad})
        assert error.value.name == name

    @pytest.mark.parametrize("name", ["v_full_v227", "v227_layout"])
    def test_flags_are_booleans(self, name: str) -> None:
        flag: dict[str, Any] = {name: 1}
        with pytest.raises(InvalidArgument, match=name):
            MlaPrefillV2(dsv3(), **flag)

    def test_configs_are_values(self) -> None:
        assert dsv3() == dsv3() and hash(dsv3()) == hash(dsv3())
        with pytest.raises(dataclasses.FrozenInstanceError):
            dsv3().depth = 64  # type: ignore[misc]
