"""The public calls on the CPU, against the formula: values for every option."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from openmla import LatentCache

Q_LENS, K_LENS = [3, 0, 4, 2, 1], [5, 2, 4, 0, 1]
BACKENDS = ["auto", "cpu", "reference"]


def with_rope(call: dict[str, Tensor]) -> Tensor:
    heads = call["k_nope"].shape[1]
    rope = call["k_rope"] if call["k_rope"].dim() == 3 else call["k_rope"][:, None]
    return torch.cat([call["k_nope"], rope.expand(-1, heads, -1)], dim=-1)


def assert_results(got: tuple[Tensor, ...], want: formula.Expected, bound: float = 2e-5) -> None:
    formula.assert_close(got[0], want.out, bound)
    formula.assert_close(got[1], want.lse)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_dense(backend: str, causal: bool):
    call = calls.dense(Q_LENS, K_LENS)
    got = openmla.mla_prefill(**call, causal=causal, return_lse=True, backend=backend)
    want = formula.ragged(call["q"], with_rope(call), call["v"], Q_LENS, K_LENS, 12**-0.5, causal)
    assert_results(got, want)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=["bf16", "fp16"]
)
def test_dense_in_half_precision_is_one_rounding_from_exact(dtype: torch.dtype, bound: float):
    call = calls.dense([70], [130], heads=3, dtype=dtype)
    got = openmla.mla_prefill(**call, return_lse=True)
    assert got[0].dtype == dtype
    want = formula.ragged(call["q"], with_rope(call), call["v"], [70], [130], 12**-0.5)
    assert_results(got, want, bound)


@pytest.mark.parametrize("rope", ["one-head", "per-head", "none"])
def test_dense_rope_shapes(rope: str):
    call = calls.dense(Q_LENS, K_LENS)
    if rope == "one-head":
        call["k_rope"] = call["k_rope"][:, None]
    elif rope == "per-head":
        call["k_rope"] = calls.numbers(sum(K_LENS), calls.HEADS, calls.D_ROPE, seed=7)
    keys = with_rope(call)
    if rope == "none":
        call.update(k_nope=keys, k_rope=None)
    got = openmla.mla_prefill(**call, return_lse=True)
    assert_results(got, formula.ragged(call["q"], keys, call["v"], Q_LENS, K_LENS, 12**-0.5))


def test_dense_reads_rope_from_a_cache():
    call = calls.dense(Q_LENS, K_LENS)
    rows = torch.cat([torch.full((12, calls.LATENT), torch.nan), call["k_rope"]], dim=1)
    cache, table = calls.paged(rows, K_LENS, page_size=2)
    call["k_rope"] = call["k_rope"].to(torch.bfloat16).float()
    want = formula.ragged(call["q"], with_rope(call), call["v"], Q_LENS, K_LENS, 12**-0.5)
    call["k_rope"] = cache
    lengths = torch.tensor(K_LENS, dtype=torch.int32)
    got = openmla.mla_prefill(**call, block_table=table, cache_lengths=lengths, return_lse=True)
    assert_results(got, want)


def test_dense_keys_default_to_the_offsets_of_the_queries():
    call = calls.dense()
    explicit = openmla.mla_prefill(**call)
    del call["cu_seqlens_k"]
    assert formula.same_bits(openmla.mla_prefill(**call), explicit)


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_scales_per_token(form: str):
    call = getattr(calls, form)()
    function = {"dense": openmla.mla_prefill, "latent": openmla.mla_prefill_latent}.get(
        form, openmla.mla_prefill_sparse
    )
    keys = {"dense": 5, "latent": 16, "sparse": 7}[form]
    q_scale, k_scale = calls.numbers(5, seed=5), calls.numbers(keys, seed=6)
    got = function(**call, q_scale=q_scale, k_scale=k_scale[:, None], return_lse=True)
    want = function(**call, q_scale=q_scale, k_scale=k_scale, return_lse=True, backend="reference")
    formula.assert_close(got[0], want[0].double())
    scaled = {**call, "q": call["q"] * q_scale[:, None, None]}
    again = function(**scaled, k_scale=k_scale, return_lse=True)
    formula.assert_close(got[1], again[1].double())
    assert not torch.allclose(got[1], function(**call, return_lse=True)[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("page_size", [1, 3, 64], ids="page={}".format)
def test_latent(backend: str, page_size: int):
    call = calls.latent(Q_LENS, K_LENS, page_size=page_size)
    got = openmla.mla_prefill_latent(**call, return_lse=True, backend=backend)
    keys = calls.numbers(12, 12, seed=1).to(torch.bfloat16)[:, None].expand(-1, 2, -1)
    want = formula.ragged(call["q"], keys, keys[..., :8], Q_LENS, K_LENS, 0.3)
    assert_results(got, want)


def test_latent_takes_plain_pages_and_a_narrower_v():
    call = calls.latent()
    whole = openmla.mla_prefill_latent(**call)
    call["cache"] = call["cache"].data
    got = openmla.mla_prefill_latent(**call, d_v=5)
    formula.assert_close(got, whole[..., :5].double())


@pytest.mark.parametrize("format", ["fp8_block32", "fp8_token"])
def test_latent_reads_quantized_rows_as_gather_does(format: str):
    call = calls.latent()
    rows = call["cache"].gather(torch.arange(16))
    fp8 = LatentCache.allocate(num_pages=4, page_size=4, latent=8, rope=4, format=format)
    fp8.append(rows[:, :8], rows[:, 8:], torch.arange(16))
    call["cache"] = fp8
    got = openmla.mla_prefill_latent(**call)
    plain = fp8.gather(torch.arange(16)).view(4, 4, 12)
    want = openmla.mla_prefill_latent(**{**call, "cache": plain}, d_v=8)
    assert formula.same_bits(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sparse_with_everything_returned(backend: str):
    call = calls.sparse(queries=6, rows=9, topk=4)
    got = openmla.mla_prefill_sparse(
        **call, return_lse=True, return_max_logits=True, backend=backend
    )
    want = formula.listed(call["q"], call["kv"], call["indices"].tolist(), 8, 0.3)
    assert_results(got, want)
    formula.assert_close(got[2], want.max_logits)


def test_sparse_reads_a_cache_by_physical_row():
    call = calls.sparse(queries=6, rows=8, topk=4)
    cache = LatentCache(call["kv"].to(torch.bfloat16).view(2, 4, 12), None, 8, 4, "bf16")
    got = openmla.mla_prefill_sparse(**{**call, "kv": cache, "d_v": None}, return_lse=True)
    rows = call["kv"].to(torch.bfloat16)
    assert_results(got, formula.listed(call["q"], rows, call["indices"].tolist(), 8, 0.3))


def test_sparse_more_keys_than_a_block():
    call = calls.sparse(queries=2, rows=3000, topk=1500, heads=3)
    got = openmla.mla_prefill_sparse(**call, return_lse=True)
    assert_results(got, formula.listed(call["q"], call["kv"], call["indices"].tolist(), 8, 0.3))


def test_fp8_queries_give_bf16_results():
    call = calls.dense(Q_LENS, K_LENS)
    e4m3 = {n: t.to(torch.float8_e4m3fn) if t.is_floating_point() else t for n, t in call.items()}
    got = openmla.mla_prefill(**e4m3, return_lse=True)
    assert got[0].dtype == torch.bfloat16
    wide = {n: t.float() if t.is_floating_point() else t for n, t in e4m3.items()}
    want = formula.ragged(wide["q"], with_rope(wide), wide["v"], Q_LENS, K_LENS, 12**-0.5)
    assert_results(got, want, bound=2**-8)


@pytest.mark.parametrize("form", ["dense", "latent", "sparse"])
def test_out_is_written_in_place_with_any_row_stride(form: str):
    function = getattr(openmla, {"dense": "mla_prefill"}.get(form, f"mla_prefill_{form}"))
    call = getattr(calls, form)()
    fresh = function(**call)
    wide = torch.full((5, 3, 11), torch.nan)
    out = wide[:, :2, : fresh.shape[2]]
    assert function(**call, out=out).data_ptr() == wide.data_ptr()
    assert formula.same_bits(out, fresh)
    assert wide[:, 2].isnan().all() and wide[:, :, fresh.shape[2] :].isnan().all()


def test_the_package_offers_what_it_lists():
    for name in openmla.__all__:
        assert getattr(openmla, name) is not None
