"""Blocks of the CDNA4 kernels that are openmla's own: their LDS, and the limits they must keep."""

from __future__ import annotations

import doctest
import importlib
from typing import Any, ClassVar

import pytest

from openmla.errors import InvalidArgument
from openmla.kernels.cdna4.dense.plan import Dense8, Dense16, DenseFP8
from openmla.kernels.cdna4.sparse.plan import MlaSparse16
from openmla.modular import MlaConfigV2, MlaPrefillV2
from openmla.modular.cdna4 import LDS_BYTES
from openmla.modular.cdna4.layout.k import KSlot

DSV3: dict[str, Any] = {
    "q_block_size": 32,
    "kv_block": 64,
    "depth": 128,
    "num_heads": 128,
    "num_kv_heads": 1,
    "d_qk": 192,
    "d_rope": 64,
    "cache_depth": 576,
    "rope_cache_offset": 512,
    "dtype": "bfloat16",
}


def dsv3(**changes: Any) -> MlaConfigV2:
    return MlaConfigV2(**{**DSV3, **changes})


@pytest.mark.parametrize("module", ["dense.plan", "sparse.plan", "lds"])
def test_worked_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"openmla.kernels.cdna4.{module}"))
    assert result.attempted and not result.failed


class TestFP8:
    SHAPE: ClassVar[dict[str, Any]] = {"dtype": "float8_e4m3fn", "kv_block": 128}

    @pytest.mark.parametrize("v_full_v227", [False, True])
    def test_the_lds_is_filled_as_the_original_fills_it(self, v_full_v227: bool) -> None:
        config = dsv3(**self.SHAPE)
        block = DenseFP8(config, v_full_v227=v_full_v227)
        original = MlaPrefillV2(config, v_full_v227=v_full_v227)
        assert (block.smem_used, block.BM) == (original.smem_used, original.BM)
        assert (block.k_slots, block.v_slots) == (original._RING_DEPTH, original._V_RING_DEPTH)
        assert (block.k_slot_bytes, block.v_slot) == (original.k_slot_bytes, original.v_slot)
        assert block.supported() and original.supported()

    def test_the_original_rescales_at_every_tile_too(self) -> None:
        lines = DenseFP8(dsv3(**self.SHAPE)).explain()
        assert "compiled: 148208 bytes, without the 16 of padding at the very end" in lines
        ends = "; O is rescaled at every tile, as in Modular's"
        assert lines[-1] == f"weights: bfloat16, Modular's are float8_e4m3fn{ends}"
        asked = DenseFP8(dsv3(**self.SHAPE), p_dtype="float8_e4m3fn")
        assert asked.explain()[-1] == f"weights: float8_e4m3fn{ends}"

    def test_limits_are_the_originals(self) -> None:
        config = dsv3(**self.SHAPE, q_block_size=64)
        assert DenseFP8(config).why_unsupported() == MlaPrefillV2(config).why_unsupported() != ""

    def test_arguments(self) -> None:
        with pytest.raises(InvalidArgument, match="p_dtype"):
            DenseFP8(dsv3(**self.SHAPE), p_dtype="float16")
        with pytest.raises(InvalidArgument, match="v_full_v227"):
            DenseFP8(dsv3(**self.SHAPE), v_full_v227=1)  # type: ignore[arg-type]


class Test16Bits:
    def test_deepseek_is_supported(self) -> None:
        for dtype in ("bfloat16", "float16"):
            block = Dense16(dsv3(dtype=dtype, kv_block=64))
            assert block.supported() and block.smem_used == 98304 <= LDS_BYTES
            assert KSlot(64, 128, 64, 2).slot_bytes * 2 == block.k_ring_bytes
            assert block.v_slot.slot_bytes * 3 == block.v_ring_bytes
            assert "LDS: 49152 + 49152 = 98304 of 163840" in block.explain()

    @pytest.mark.parametrize(
        ("shape", "rows", "parts", "used", "compiled"),
        [
            ({"depth": 256, "d_qk": 256}, 128, (64, 64, 64), 131072, 139264),  # GLM-5
            ({"depth": 256, "d_qk": 256, "d_rope": 0}, 128, (64,) * 4, 131072, 139264),
            ({"depth": 64, "d_qk": 96, "d_rope": 32, "kv_block": 128}, 256, (64,), 98304, 98304),
            ({"d_qk": 128, "d_rope": 0}, 256, (128,), 81920, 81920),
        ],
    )
    def test_other_widths(
        self, shape: dict[str, Any], rows: int, parts: tuple[int, ...], used: int, compiled: int
    ) -> None:
        block = Dense16(dsv3(**{"dtype": "bfloat16", "kv_block": 64, **shape}))
        assert block.supported() and (block.BM, block.k_widths) == (rows, parts)
        assert (block.smem_used, block.launch_smem_used) == (used, compiled)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
            ({"d_qk": 200}, "136 columns without rope are not parts of 64"),
            ({"depth": 192}, "depth 192: V is one tensor"),
            ({"depth": 256, "d_qk": 448}, "registers: 192 > 176"),
            ({"depth": 512}, "registers: 192 > 176"),
            ({"depth": 256, "d_rope": 128, "d_qk": 192}, "128 rope columns: parts that two waves"),
            ({"d_qk": 288, "d_rope": 32}, "32 rope columns: parts that two waves share have 64"),
            ({"d_rope": 32, "d_qk": 160}, "4 copies of 1024 bytes"),
            (
                {"kv_block": 128, "depth": 256, "d_qk": 256},
                "K 2 × 65536 + V 2 × 65536 = 262144 > 163840",
            ),
        ],
    )
    def test_reasons_spell_the_arithmetic_out(self, changes: dict[str, Any], reason: str) -> None:
        block = Dense16(dsv3(**{"dtype": "bfloat16", "kv_block": 64, **changes}))
        assert reason in block.why_unsupported()
        assert block.explain()[-1] == f"unsupported: {block.why_unsupported()}"


class Test8Bits:
    SHAPE: ClassVar[dict[str, Any]] = {"dtype": "float8_e4m3fn", "kv_block": 128}

    @pytest.mark.parametrize(
        ("shape", "more", "rows", "used", "compiled"),
        [
            ({"d_qk": 128, "d_rope": 0}, {}, 256, 81920, 81920),
            ({}, {"v_dtype": "bfloat16"}, 256, 147456, 147456),
            ({}, {"v_dtype": "bfloat16", "scaled_keys": True}, 256, 148480, 148480),
            ({"depth": 256, "d_qk": 256}, {}, 128, 131072, 139264),  # GLM-5
            ({"depth": 256, "d_qk": 320}, {"scaled_keys": True}, 128, 148480, 156672),
        ],
    )
    def test_what_the_original_does_not_have(
        self, shape: dict[str, Any], more: dict[str, Any], rows: int, used: int, compiled: int
    ) -> None:
        config = dsv3(**{**self.SHAPE, **shape})
        block = Dense8(config, **more)
        assert block.supported() and (block.BM, block.p_dtype) == (rows, "bfloat16")
        assert (block.smem_used, block.launch_smem_used) == (used, compiled)
        assert f"= {used} of {LDS_BYTES}" in "\n".join(block.explain())
        assert more or DenseFP8(config).why_unsupported()

    @pytest.mark.parametrize(
        ("changes", "more", "reason"),
        [
            ({"dtype": "bfloat16"}, {}, "dtype bfloat16"),
            ({"depth": 192}, {}, "depth 192: V is one tensor"),
            (
                {"depth": 256, "d_qk": 256},
                {"v_dtype": "bfloat16"},
                "K 2 × 32768 + V 2 × 65536 = 196608 > 163840",
            ),
        ],
    )
    def test_reasons(self, changes: dict[str, Any], more: dict[str, Any], reason: str) -> None:
        block = Dense8(dsv3(**{**self.SHAPE, **changes}), **more)
        assert reason in block.why_unsupported()
        assert block.explain()[-1] == f"unsupported: {block.why_unsupported()}"

    def test_arguments(self) -> None:
        with pytest.raises(InvalidArgument, match="v_dtype"):
            Dense8(dsv3(**self.SHAPE), v_dtype="float16")


class TestSparse:
    SHAPE: ClassVar[dict[str, Any]] = {
        "num_heads": 128,
        "latent": 512,
        "rope": 64,
        "dtype": "bfloat16",
    }

    @pytest.mark.parametrize(("heads", "blocks"), [(1, 1), (64, 1), (65, 2), (128, 2)])
    def test_heads_fill_blocks(self, heads: int, blocks: int) -> None:
        block = MlaSparse16(**{**self.SHAPE, "num_heads": heads})
        assert block.supported() and block.row_blocks == blocks
        assert block.launch_smem_used == 154112 <= LDS_BYTES

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"dtype": "float32"}, "dtype float32"),
            ({"latent": 128}, "latent 128"),
            ({"rope": 32}, "rope of 32 columns"),
            ({"num_kv_stages": 3}, "LDS: 229120 > 163840"),
        ],
    )
    def test_reasons(self, changes: dict[str, Any], reason: str) -> None:
        block = MlaSparse16(**{**self.SHAPE, **changes})
        assert reason in block.why_unsupported()
        assert block.explain()[-1] == f"unsupported: {block.why_unsupported()}"
