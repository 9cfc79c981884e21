"""The Hopper plans: what the compiler reported, the limits, and batch invariance."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace

import pytest

from openmla.errors import InvalidArgument
from openmla.kernels.hopper import chip
from openmla.kernels.hopper.dense import plan as hopper_dense
from openmla.kernels.hopper.dense.plan import HopperDenseConfig, select_hopper_dense_config
from openmla.kernels.hopper.latent import plan as hopper_latent
from openmla.kernels.hopper.latent.plan import HopperLatentConfig, select_hopper_latent_config
from openmla.planning import dequantize, memory, plan, split
from openmla.planning.dequantize import DEQUANTIZED_CAP, paged_cache_read, sparse_cache_read
from openmla.planning.memory import MemoryMap
from openmla.problem import Problem
from planning.fuzz import DENSE_DIMS, LATENT_DIMS

HEADS = [1, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128]


def dense(dims: tuple[int, int, int], heads: int = 128, page_size: int = 0) -> HopperDenseConfig:
    nope, rope, v = dims
    return select_hopper_dense_config(
        heads=heads, d_nope=nope, d_rope=rope, d_v=v, page_size=page_size
    )


def latent(dims: tuple[int, int], heads: int = 128, gather: str = "indices") -> HopperLatentConfig:
    return select_hopper_latent_config(
        heads=heads,
        latent=dims[0],
        rope=dims[1],
        gather=gather,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("module", [memory, chip, split, dequantize, hopper_dense, hopper_latent])
def test_examples(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_shared_memory_is_what_the_compiler_reports() -> None:
    """metadata.shared of the first dense and sparse kernels, compiled by triton 3.6.0 for sm_90.

    The dense one kept 64 bytes of tile info where the plan has TILE_INFO_BYTES.
    """
    rest = 221392 - 64
    assert dense((128, 64, 128)).smem_used == rest + hopper_dense.TILE_INFO_BYTES
    assert latent((512, 64)).smem_used == 227304


@pytest.mark.parametrize(
    ("dims", "BN", "stages"),
    [
        ((128, 64, 128), 128, 2),
        ((192, 64, 256), 64, 2),
        ((64, 64, 128), 128, 2),
        ((128, 0, 128), 128, 2),
        ((256, 0, 256), 64, 2),
        ((64, 32, 64), 128, 4),
        ((256, 64, 256), 32, 3),
        ((16, 0, 16), 128, 4),  # 27 would fit
    ],
)
def test_dense_tiles(dims: tuple[int, int, int], BN: int, stages: int) -> None:
    config = dense(dims)
    assert (config.BM, config.BN, config.num_kv_stages) == (128, BN, stages)
    assert config.supported() and config.why_unsupported() == ""
    assert config.num_threads == 384


@pytest.mark.parametrize(("dims", "keys"), [((128, 64, 128), 128), ((192, 64, 256), 64)])
def test_one_request_whose_keys_fit_a_block_has_a_kernel_of_its_own(
    dims: tuple[int, int, int], keys: int
) -> None:
    config = dense(dims)
    assert config.one_block(1, keys) and not config.one_block(1, keys + 1)
    assert not config.one_block(2, keys)


def check_map(smem: MemoryMap, used: int) -> None:
    end = 0
    for region in smem.regions:
        assert region.size > 0 and region.offset >= end, region
        end = region.offset + region.size
    assert end == smem.used == used <= smem.limit == 232448


@pytest.mark.parametrize("num_qo", [1, 2])
@pytest.mark.parametrize("dims", DENSE_DIMS)
def test_dense_budget(dims: tuple[int, int, int], num_qo: int) -> None:
    config = dense(dims).with_num_qo(num_qo)
    check_map(config.smem_map, config.smem_used)
    assert config.registers.total <= 65536
    assert config.registers.threads * config.registers.at_launch <= 65536
    assert config.accumulators + 40 <= config.registers.consumer
    assert config.smem_used + config.stage_bytes > 232448 or config.num_kv_stages == 4


@pytest.mark.parametrize("gather", ["indices", "pages"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dims", LATENT_DIMS)
def test_sparse_budget(dims: tuple[int, int], heads: int, gather: str) -> None:
    config = latent(dims, heads, gather)
    assert config.supported(), config.why_unsupported()
    check_map(config.smem_map, config.smem_used)
    assert config.registers.total <= 65536
    assert config.tiles(64) == (heads if gather == "pages" else 64 * -(-heads // 64))
    assert config.accumulators + 40 <= config.registers.consumer


def test_heads_are_packed_over_pages_and_padded_over_lists() -> None:
    assert latent((512, 64), 20, "pages").tiles(16) == 5
    assert latent((512, 64), 20, "indices").tiles(16) == 16
    assert "96 of 128 rows in 2 block(s)" in "\n".join(latent((512, 64), 96).explain())
    assert "20 heads of consecutive tokens" in "\n".join(latent((512, 64), 20, "pages").explain())


def test_p_overlays_rope_only_where_it_fits() -> None:
    def p_regions(dims: tuple[int, int]) -> list[int]:
        return [r.size for r in latent(dims).smem_map.regions if r.kind == "p"]

    assert p_regions((512, 64)) == []
    assert p_regions((256, 32)) == [8192] * 4
    assert p_regions((512, 0)) == [8192, 8192]


def test_three_query_tiles_fit_too() -> None:
    config = replace(dense((128, 64, 128)), num_qo=3, BN=64, num_kv_stages=3)
    assert config.supported(), config.why_unsupported()
    assert (config.BM, config.registers.at_launch, config.registers.total) == (192, 128, 65536)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"BN": 256}, "1 K/V stages < 2"),
        ({"BN": 96}, "BN 96 is not a power of two"),
        ({"d_v": 512}, "d_v 512 is not a power of two from 16 to 256"),
        ({"d_nope": 136}, "d_nope 136 % 16 = 8"),
        ({"d_rope": 48}, "d_rope 48 is not a power of two"),
        ({"num_kv_stages": 3}, "bytes of shared memory, 70992 more than 232448"),
        (
            {"d_v": 256, "num_kv_stages": 2},
            "O 128 + S 64 + packed P 32 = 224 per thread > 240 - 40",
        ),
        ({"page_size": 20}, "20 % 8 = 4"),
        ({"page_size": 64, "d_rope": 128}, "d_rope 128 from pages: 64 columns at most"),
    ],
)
def test_broken_limits_show_their_arithmetic(change: dict[str, int], reason: str) -> None:
    config = replace(dense((128, 64, 128)), **change)  # type: ignore[arg-type]
    if "BN" in change:
        config = hopper_dense.deepest_ring(config)
    assert not config.supported()
    assert reason in " ".join(config._broken_limits())
    assert config.explain()[-1] == f"not supported: {config.why_unsupported()}"


@pytest.mark.parametrize(
    ("name", "value"), [("heads", 0), ("d_nope", -1), ("d_rope", -1), ("num_qo", 4), ("BN", 1.5)]
)
def test_bad_arguments(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=name):
        replace(dense((128, 64, 128)), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "total_q", "batch", "one"),
    [(128, 64, 1, True), (128, 65, 1, False), (16, 512, 1, True), (16, 1024, 1, False)],
)
def test_prefer_1q(heads: int, total_q: int, batch: int, one: bool) -> None:
    assert dense((128, 64, 128), heads).prefer_1q(total_q, batch) is one


@pytest.mark.parametrize("dims", DENSE_DIMS)
def test_1q_keeps_the_key_tile(dims: tuple[int, int, int]) -> None:
    """The number of query tiles follows the batch, so it must not change a request's bits."""
    two = dense(dims, heads=16)
    one = two.with_num_qo(1)
    assert (one.BM, one.BN) == (64, two.BN) and one.supported()
    assert one.split == two.split


def test_split_fills_the_chip() -> None:
    rule = dense((128, 64, 128), heads=16).split
    for q_len in (1, 64, 256):
        tiles = rule.tiles(q_len) * rule.splits(q_len, 131072)
        assert 132 <= tiles <= 264
    assert rule.splits(512, 131072) == 1
    half = dense((128, 64, 128), heads=66).split  # of 132 SMs
    assert half.splits(64, 131072) == 4 and half.splits(65, 131072) == 1
    assert dense((128, 64, 128), heads=128).split.longest_split_chunk == 0


@pytest.mark.parametrize("heads", HEADS)
def test_split_covers_every_key_once(heads: int) -> None:
    rule = dense((128, 64, 128), heads).split
    for q_len in (0, 1, 64, 200):
        for k_len in (0, 1, 2047, 2048, 4097, 131072, 2**33):
            count, keys = rule.splits(q_len, k_len), rule.keys_per_split(q_len, k_len)
            assert count * keys >= k_len and keys % 128 == 0
            assert count == 1 or k_len // count >= rule.min_keys
            assert rule.tiles(q_len) * (count - 1) < 264


def test_split_workspace_is_bounded() -> None:
    rule = dense((128, 64, 128), heads=16).split
    assert rule.workspace_bytes(1) == 264 * 64 * 129 * 4
    assert rule.workspace_bytes(10**6) == split.PARTIAL_CAP


def test_fp8_cache_choice() -> None:
    many = sparse_cache_read(4096, 2048, 131072, row_blocks=2, width=576)
    assert (many.mode, many.workspace_bytes) == ("workspace", 131072 * 1152)
    assert "at least 4 each" in many.explain()
    few = sparse_cache_read(1, 2048, 131072, row_blocks=2, width=576)
    assert (few.mode, few.workspace_bytes) == ("in_kernel", 0)
    assert "fewer than 4 each" in few.explain()
    huge = sparse_cache_read(2**20, 2048, 2**22, row_blocks=2, width=576)
    assert huge.mode == "in_kernel" and str(DEQUANTIZED_CAP) in huge.explain()
    assert paged_cache_read(tiles_per_request=4, rows=64, width=576).mode == "workspace"
    assert paged_cache_read(tiles_per_request=3, rows=64, width=576).mode == "in_kernel"


@pytest.mark.parametrize("config", [dense((192, 64, 256)), latent((256, 32), 20, "pages")])
def test_explanations_name_their_numbers(config: HopperDenseConfig | HopperLatentConfig) -> None:
    text = "\n".join(config.explain())
    assert f"= {config.smem_used} of 232448" in text
    assert f"setmaxnreg {config.registers.consumer}/{config.registers.producer}" in text
    assert f"2^{config.rescale_threshold:g}" in text


@pytest.mark.parametrize(
    "config",
    [dense((192, 64, 256)), latent((512, 64)), latent((512, 0)), latent((256, 32), 20, "pages")],
)
def test_sums_in_explanations_add_up(config: HopperDenseConfig | HopperLatentConfig) -> None:
    lines = {line.split(":")[0]: line for line in config.explain()}
    terms, used = lines["registers"].split(" of 2")[0].rsplit(" = ", 1)
    assert sum(int(term.split()[-1]) for term in terms.split(" + ")) == int(used)
    for name in ("Q", "P"):
        planned = sum(r.size for r in config.smem_map.regions if r.kind == name.lower())
        told = re.search(rf"\b{name} (\d+) \+", lines["shared memory"])
        assert (int(told[1]) if told else 0) == planned


def test_explanation_says_what_bound_the_key_tile() -> None:
    bn = next(line for line in dense((192, 64, 256)).explain() if line.startswith("BN"))
    assert "BN = 64: 128 keys are too many (1 K/V stages < 2: Q 65536 + 1 x (128 keys" in bn


def test_explanation_says_what_bound_the_ring() -> None:
    config = dense((192, 64, 256))
    told = re.search(
        r"one stage more would take at least (\d+) > (\d+)", "\n".join(config.explain())
    )
    assert told and int(told[1]) == config.smem_used + config.stage_bytes > int(told[2])


@pytest.mark.parametrize("dims", [(192, 64, 256), (256, 0, 256)])
def test_bits_of_less_than_128_keys_are_no_bulk_copy(dims: tuple[int, int, int]) -> None:
    """Loads from columns between multiples of 16 bytes are illegal on an H200."""
    d_nope, d_rope, d_v = dims
    rope = "shared" if d_rope else "none"
    problem = Problem(
        form="dense", heads=16, d_nope=d_nope, d_rope=d_rope, d_v=d_v, rope=rope, has_key_mask=True
    )
    assert plan(problem, "h200").backend == "portable"
    assert plan(replace(problem, has_key_mask=False), "h200").backend == "hopper"
    narrow = HopperDenseConfig(heads=16, d_nope=64, d_rope=64, d_v=64, BN=64, key_mask=True)
    assert "multiples of 16 bytes" in narrow.why_unsupported()
