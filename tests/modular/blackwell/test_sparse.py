"""Sparse Blackwell plans: the reference values, the invariants behind them, the bad inputs."""

from __future__ import annotations

import doctest
import json
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import openmla.modular.blackwell.sparse as sparse
from openmla.errors import InvalidArgument
from openmla.modular.blackwell.sparse import (
    MLAPrefillSparse,
    MLAPrefillSparseQKVFP8,
    MLASparseConfig,
    MLASparseSharedMemory,
    MLASparseSharedMemoryFP8,
    MLASparseSharedMemoryQKVFP8,
    select_mla_sparse_config,
)

TABLES = json.loads((Path(__file__).parents[1] / "oracle" / "blackwell.json").read_text())["sparse"]
PAIR: dict[str, Any] = {"num_q_heads": 128, "indices_stride": 2048}
ONE_CTA: dict[str, Any] = {"indices_stride": 2048, "cta_group": 1, "b_topk": 64}


def value_at(plan: Any, path: str) -> Any:
    for name in path.split("."):
        plan = getattr(plan, name)
        if callable(plan):
            plan = plan()
    return plan


@pytest.mark.parametrize("kind", sorted(TABLES))
def test_reproduces_the_reference_values(kind: str) -> None:
    for table in TABLES[kind]:
        for arguments, values in table["rows"]:
            plan = getattr(sparse, kind)(**dict(zip(table["in"], arguments, strict=True)))
            got = {name: value_at(plan, name) for name in table["out"]}
            assert got == dict(zip(table["out"], values, strict=True))


def test_every_kind_has_reference_values() -> None:
    classes = {name for name in sparse.__all__ if name.startswith("MLA")}
    assert classes == set(TABLES)


class TestTypes:
    """The members of MLAPrefillSparse that are types in the original."""

    pair = MLAPrefillSparse(**PAIR)
    one_cta = MLAPrefillSparse(num_q_heads=16, **ONE_CTA)

    def test_dtypes(self) -> None:
        assert MLAPrefillSparse.accum_dtype == "float32"
        assert MLAPrefillSparse.k_tma_dtype_fp8 == MLAPrefillSparse.v_tma_dtype_fp8 == "int64"

    def test_SMemType(self) -> None:
        assert MLAPrefillSparse.SMemType is MLASparseSharedMemory
        assert type(self.pair.smem) is self.pair.SMemType

    def test_FULL_Q_TYPE(self) -> None:
        assert self.pair.FULL_Q_TYPE == ("bfloat16", 64 * 576)
        assert self.one_cta.FULL_Q_TYPE == ("bfloat16", 64 * 576)

    def test_SHARED_QKV_TYPE(self) -> None:
        assert self.pair.SHARED_QKV_TYPE == ("bfloat16", 64 * 192 + 64 * 576 + 128 * 256)
        assert self.one_cta.SHARED_QKV_TYPE == ("bfloat16", 64 * 192 + 64 * 576 + 64 * 512)

    def test_O_TYPE(self) -> None:
        assert self.pair.O_TYPE == self.one_cta.O_TYPE == ("bfloat16", 64 * 512)

    def test_the_three_uses_of_a_region_are_its_union(self) -> None:
        uses = (self.pair.FULL_Q_TYPE, self.pair.SHARED_QKV_TYPE, self.pair.O_TYPE)
        assert self.pair.smem.offsets.scores == 2 * max(use.size for use in uses)

    def test_QKMMAOpType(self) -> None:
        made = self.pair.QKMMAOpType
        ss, ts = made.SSMMAType, made.TSMMAType
        assert (ss.dtype, ss.accum_dtype, ss.cta_group) == ("bfloat16", "float32", 2)
        assert (ss.MMA_M, ss.MMA_N, ss.BK, ss.a_tmem, ss.num_stages) == (128, 128, 192, False, 1)
        assert (ts.MMA_M, ts.MMA_N, ts.BK, ts.a_tmem, ts.num_stages) == (128, 128, 384, True, 3)
        assert made.NUM_TS_STAGES == self.pair.QK_TS_stages == 3
        assert (ss.swizzle_a, ss.swizzle_b, ss.transpose_b) == (128, 128, True)
        assert self.one_cta.QKMMAOpType.SSMMAType[2:6] == (64, 64, 192, 1)

    def test_SVMMAType(self) -> None:
        first, second = self.pair.SVMMAType
        assert first == second
        assert (first.MMA_M, first.MMA_N, first.BK, first.cta_group) == (128, 256, 64, 2)
        assert (first.swizzle_a, first.swizzle_b, first.transpose_b) == (16, 128, False)
        assert self.one_cta.SVMMAType.SS_P1MMAType[2:6] == (64, 256, 32, 1)

    def test_an_issue_stays_within_its_limit(self) -> None:
        """Sixteen steps of 16 columns."""
        for made in (self.pair, self.one_cta):
            for product in (*made.QKMMAOpType, *made.SVMMAType):
                assert product.BK // product.num_stages <= 16 * 16


@pytest.mark.parametrize("heads", [8, 16, 24, 32, 40, 48, 56, 64, 128])
def test_the_selected_plan_is_supported(heads: int) -> None:
    config = select_mla_sparse_config(num_q_heads=heads, indices_stride=2048)
    assert config.why_unsupported() == ""
    assert config.cta_group == (2 if heads == 128 else 1)
    assert config.smem_used <= 232448
    assert config.explain()[-1] == f"used: {config.smem_used} of 232448"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_q_heads": 96}, "96 heads on 2 CTA(s): a pair serves 128"),
        ({"num_q_heads": 12, **ONE_CTA}, "a multiple of 8 up to 64"),
        ({"num_q_heads": 72, **ONE_CTA}, "a multiple of 8 up to 64"),
        ({"qk_depth": 640, "q_smem_depth": 256}, "rows of 640 with 512 of V"),
        ({"num_kv_heads": 2}, "2 latent heads"),
        ({"b_topk": 256}, "scores end at 256 + 128 = 384, Q starts at 512 - 384 / 2 = 320"),
        (
            {"q_smem_depth": 448, "q_tmem_depth": 128, "b_topk": 128},
            "247032 bytes of shared memory, 14584 more than 232448",
        ),
    ],
)
def test_unsupported_plans_say_why(change: dict[str, Any], reason: str) -> None:
    config = MLASparseConfig(**PAIR | change)
    assert not config.supported()
    assert reason in config.why_unsupported()
    assert config.explain()[-1].startswith("not supported: ")


@pytest.mark.parametrize(
    "memory",
    [
        MLASparseSharedMemory(**PAIR),
        MLASparseSharedMemory(**PAIR | {"num_mbars": 3, "b_topk": 16}),
        MLASparseSharedMemoryFP8(**PAIR, scale_block_size=32),
        MLASparseSharedMemoryQKVFP8(**PAIR),
        MLASparseSharedMemoryQKVFP8(num_q_heads=8, num_mbars=4, **ONE_CTA),
    ],
)
def test_fields_follow_each_other_aligned_and_apart(memory: Any) -> None:
    fields = memory._fields()
    ends = [memory.offsets[f.name] + f.count * f.size for f in fields]
    starts = [memory.offsets[f.name] for f in fields] + [memory.size_of]
    assert starts[0] == 0
    assert all(start % field.size == 0 for start, field in zip(starts, fields, strict=False))
    assert all(0 <= start - end < 8 for end, start in zip(ends, starts[1:], strict=True))
    assert all(a < b for a, b in pairwise(starts))
    assert len(memory.explain()) == len(fields) + 1


def test_offsets_read_by_name_and_say_which_names_exist() -> None:
    offsets = MLASparseSharedMemory(**PAIR).offsets
    assert offsets.scores == offsets["scores"] == 163840
    with pytest.raises(AttributeError, match="no field 'score'; fields: qkvo_union, scores"):
        _ = offsets.score


def test_scale_blocks_as_wide_as_a_row_or_absent_cost_the_same() -> None:
    sizes = [MLASparseSharedMemoryFP8(**PAIR, scale_block_size=b).size_of for b in (0, 576, 1024)]
    assert len(set(sizes)) == 1


def test_an_fp8_map_that_overflows_says_by_how_much() -> None:
    memory = MLASparseSharedMemoryFP8(
        **PAIR, q_smem_depth=320, q_tmem_depth=256, scale_block_size=32
    )
    assert not memory.supported()
    assert memory.why_unsupported() == "243480 bytes of shared memory, 11032 more than 232448"


def test_tensor_memory_regions_do_not_overlap() -> None:
    for kernel in (MLAPrefillSparse(**PAIR), MLAPrefillSparse(num_q_heads=16, **ONE_CTA)):
        o_end = kernel.O_TMEM_ADDR_ATOM2 + kernel.O_ATOM_PHYS_COLS
        assert o_end <= kernel.P_TMEM_ADDR
        assert kernel.P_TMEM_ADDR + kernel.score_cols <= kernel.Q_TMEM_ADDR
        assert kernel.Q_TMEM_ADDR + kernel.q_tmem_depth // 2 == 512


def test_fp8_compute_limits() -> None:
    assert MLAPrefillSparseQKVFP8(**PAIR).supported()
    assert MLAPrefillSparseQKVFP8(num_q_heads=64, num_mbars=4, **ONE_CTA).supported()
    deep = MLAPrefillSparseQKVFP8(**PAIR, num_mbars=4)
    assert "bytes of shared memory" in deep.why_unsupported()
    wide = MLAPrefillSparseQKVFP8(**PAIR, b_topk=256, num_mbars=1)
    assert "256 + 4 score tiles x 128 = 768 columns > 512" in wide.why_unsupported()
    odd = MLAPrefillSparseQKVFP8(**PAIR, b_topk=96)
    assert odd.why_unsupported() == "B_TOPK 96 is not whole products of 64 keys"


BAD = [
    ({"num_q_heads": -128}, "num_q_heads: expected an integer of at least 1, got -128"),
    ({"num_q_heads": 127}, "cta_group: expected a divisor of num_q_heads 127, got 2"),
    ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_q_heads 128, got 3"),
    ({"cta_group": 4}, "cta_group: expected 1 or 2 CTAs, got 4"),
    ({"b_topk": 100}, "b_topk: expected a multiple of 16 keys"),
    ({"b_topk": 0}, "b_topk"),
    ({"num_mbars": 0}, "num_mbars"),
    ({"indices_stride": 0}, "indices_stride"),
    ({"qk_depth": 512}, "qk_depth: expected more than the 512 latent columns of V, got 512"),
    ({"v_depth": -1}, "v_depth"),
    ({"q_smem_depth": 128}, "128 + 384 = 512"),
    ({"qkv_dtype": "float8_e4m3fn"}, "qkv_dtype: expected one of bfloat16, float16"),
    ({"qkv_dtype": "bf16"}, "qkv_dtype"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_arguments_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        MLASparseConfig(**PAIR | change)
    assert message in str(error.value)


def test_bad_scale_blocks_raise() -> None:
    with pytest.raises(InvalidArgument, match="scale_block_size"):
        MLASparseSharedMemoryFP8(**PAIR, scale_block_size=-1)


@pytest.mark.parametrize("name", ["prefill", "smem"])
def test_examples_in_the_docstrings(name: str) -> None:
    result = doctest.testmod(import_module(f"openmla.modular.blackwell.sparse.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
