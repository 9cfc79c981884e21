"""vLLM's slots for DeepGEMM: whose functions are in them on which chip, and what these answer.

Requests are those of a recorded step: their offsets, lengths and pages. What vLLM's builder makes
of them for the indexer, windows into gathered keys and lengths per query, is made here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from integrations.vllm import fake_vllm, replay
from openmla import IndexCache, Unsupported
from openmla.integrations.vllm import slots

HEADS, TOPK = 64, 8
FP32 = 2e-6  # relative; sums of 64 heads of 128 products
UNSERVED = [(8, 0), (8, 6), (8, 9)]
ELSEWHERE = [None, (7, 5), (8, 7), (9, 0), (10, 0), (10, 3), (12, 0)]


def filled(capability: tuple[int, int] | None) -> bool:
    return slots.fill(sys.modules[fake_vllm.DEEP_GEMM], fake_vllm.Platform(capability))


def there() -> dict[str, Any]:
    return {name: getattr(sys.modules[fake_vllm.DEEP_GEMM], name) for name in slots.SLOTS}


@pytest.mark.parametrize("capability", UNSERVED, ids=str)
def test_slots_are_filled_where_deep_gemm_does_not_serve(capability: tuple[int, int]):
    with fake_vllm.installed():
        assert filled(capability) and filled(capability)
        assert there() == slots.SLOTS
        assert sys.modules[fake_vllm.DEEP_GEMM]._fp8_gemm_nt_impl is None


@pytest.mark.parametrize("capability", ELSEWHERE, ids=str)
def test_slots_are_left_alone_elsewhere(capability: tuple[int, int] | None):
    with fake_vllm.installed():
        assert not filled(capability)
        assert set(there().values()) == {None}


@pytest.mark.parametrize("package", slots.DEEP_GEMM)
def test_deep_gemms_own_functions_give_way_another_plug_ins_stay(
    package: str, monkeypatch: pytest.MonkeyPatch
):
    """vLLM may have found DeepGEMM already; its functions fail on these chips when called."""
    with fake_vllm.installed():
        library, names = ModuleType(package), list(slots.SLOTS)
        monkeypatch.setitem(sys.modules, package, library)
        for name in names:
            function = replay.lengths.__get__(name)  # any callable of its own
            setattr(library, name.removeprefix("_").removesuffix("_impl"), function)
            setattr(sys.modules[fake_vllm.DEEP_GEMM], name, function)
        assert filled((8, 9)) and there() == slots.SLOTS
        setattr(sys.modules[fake_vllm.DEEP_GEMM], names[0], print)
        assert not filled((8, 9)) and there()[names[0]] is print


def test_a_vllm_without_the_slots_is_refused_by_name():
    with fake_vllm.installed():
        del sys.modules[fake_vllm.DEEP_GEMM]._fp8_fp4_mqa_logits_impl
        assert not filled((9, 0))
        with pytest.raises(Unsupported, match="has no _fp8_fp4_mqa_logits_impl"):
            filled((8, 0))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0)], ids=str)
def test_a_layer_of_the_sparse_backend_fills_them(capability: tuple[int, int]):
    with fake_vllm.installed() as vllm:
        vllm["vllm.platforms"]["current_platform"].capability = capability
        from openmla.integrations.vllm.sparse import OpenMLASparseImpl

        assert set(there().values()) == {None}
        OpenMLASparseImpl(kv_cache_dtype="auto", qk_rope_head_dim=64)
        assert set(there().values()) == set(
            slots.SLOTS.values() if capability == (8, 9) else [None]
        )


class Indexed:
    """Index keys of the recorded requests in vLLM's pages, other layers' pages between them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        step, _ = replay.recorded("context")
        self.new = replay.lengths(step["offsets"])
        self.table = step["block_table"][: len(self.new)].int()
        lengths = [c + n for c, n in zip(step["lengths"].tolist(), self.new, strict=True)]
        pages, self.size = int(self.table.max()) + 1, step["pages"].shape[1]
        capacity = self.table.shape[1] * self.size
        self.lengths = [min(n, capacity) for n in lengths]
        self.new = [min(n, m) for n, m in zip(self.new, self.lengths, strict=True)]
        both = torch.zeros(pages, 2, self.size, 132, dtype=torch.uint8)
        self.pages = both[:, 0]
        self.cache = IndexCache(self.pages.flatten(1), self.size)
        used = torch.arange(pages * self.size)
        self.cache.append(torch.randn(len(used), 128), used)

    def keys(self, request: int, count: int) -> tuple[Tensor, Tensor]:
        place = torch.arange(count)
        rows = self.table[request].long()[place // self.size] * self.size + place % self.size
        return self.cache.gather(rows)


def exact(q: Tensor, keys: tuple[Tensor, Tensor], weights: Tensor) -> Tensor:
    """One query's scores in float64."""
    dots = torch.relu(q.double() @ keys[0].double().T)
    return (dots * weights.double()[:, None]).sum(0) * keys[1].double()


def compare(got: Tensor, want: Tensor) -> None:
    assert ((got.double() - want).abs() <= FP32 * want.abs().max().clamp_min(1)).all()
    best = min(TOPK, len(want))
    assert set(got.topk(best).indices.tolist()) == set(want.topk(best).indices.tolist())


def queries(*shape: int) -> tuple[Tensor, Tensor]:
    q = torch.randn(*shape, HEADS, 128).to(torch.float8_e4m3fn)
    return q, torch.rand(int(torch.tensor(shape).prod()), HEADS)


@pytest.mark.parametrize("clean", [False, True])
def test_a_prefill_over_gathered_keys(clean: bool):
    """Windows as `build_prefill_chunk_metadata` makes them; the workspace is longer than filled."""
    index = Indexed()
    gathered = [index.keys(b, n) for b, n in enumerate(index.lengths)]
    spare = torch.full((40, 128), torch.nan).to(torch.float8_e4m3fn)
    values = torch.cat([*(keys[0] for keys in gathered), spare])
    scales = torch.cat([*(keys[1] for keys in gathered), torch.full((40,), torch.nan)])
    ks: list[int] = []
    ke: list[int] = []
    for b, (length, new) in enumerate(zip(index.lengths, index.new, strict=True)):
        start = sum(index.lengths[:b])
        ks += [start] * new
        ke += [start + length - new + i + 1 for i in range(new)]
    q, weights = queries(len(ks))
    windows = torch.tensor(ks).int(), torch.tensor(ke).int()
    with fake_vllm.installed() as vllm:
        filled((8, 0))
        logits = vllm[fake_vllm.DEEP_GEMM]["fp8_fp4_mqa_logits"](
            (q, None), (values, scales), weights, *windows, clean
        )
    assert logits.shape == (len(ks), len(values)) and logits.dtype == torch.float32
    for t, (start, end) in enumerate(zip(ks, ke, strict=True)):
        want = exact(q[t], (values[start:end], scales[start:end]), weights[t])
        compare(logits[t, start:end], want)
        outside = torch.cat([logits[t, :start], logits[t, end:]])
        assert not clean or (outside == -torch.inf).all()


@pytest.mark.parametrize(("next_n", "per_query"), [(1, True), (2, True), (2, False), (4, True)])
def test_a_decode_over_pages(next_n: int, per_query: bool):
    index, longest = Indexed(), 512
    requests = len(index.lengths)
    sees = torch.tensor(index.lengths)[:, None] - next_n + 1 + torch.arange(next_n)
    sees = sees.clamp_min(0).int()
    q, weights = queries(requests, next_n)
    with fake_vllm.installed() as vllm:
        filled((8, 6))
        wrappers = vllm[fake_vllm.DEEP_GEMM]
        lens = sees if per_query else sees[:, -1:]
        plan = wrappers["get_paged_mqa_logits_metadata"](lens, index.size, 108)
        assert plan.shape == (109, 2) and plan.dtype == torch.int32
        spare = index.table.new_full((3, index.table.shape[1]), -1)  # rows of a longer table
        logits = wrappers["fp8_fp4_paged_mqa_logits"](
            (q, None),
            index.pages.unsqueeze(-2),
            weights,
            lens,
            torch.cat([index.table, spare]),
            plan,
            longest,
            True,
        )
    assert logits.shape == (requests * next_n, longest)
    for b in range(requests):
        for i in range(next_n):
            count, row = int(sees[b, i]), b * next_n + i
            compare(logits[row, :count], exact(q[b, i], index.keys(b, count), weights[row]))
            assert (logits[row, count:] == -torch.inf).all()


@pytest.mark.parametrize("per_query", [True, False])
def test_a_decode_of_no_request(per_query: bool):
    index = Indexed()
    q, weights = queries(0, 1)
    lens = torch.empty(0, 1).int() if per_query else torch.empty(0).int()
    pages = index.pages.unsqueeze(-2)
    logits = slots.paged_mqa_logits((q, None), pages, weights, lens, index.table, None, 64)
    assert logits.shape == (0, 64)


def test_what_only_newer_chips_are_given_is_refused():
    index = Indexed()
    q, weights = queries(len(index.lengths), 1)
    lens = torch.tensor(index.lengths).int()[:, None]
    pages = index.pages.unsqueeze(-2)
    with pytest.raises(Unsupported, match="MXFP4"):
        slots.mqa_logits((q[:, 0], weights), index.keys(0, 4), weights, lens[:, 0], lens[:, 0])
    with pytest.raises(Unsupported, match="indices"):
        slots.paged_mqa_logits(
            (q, None), pages, weights, lens, index.table, None, 64, indices=lens[:, 0]
        )
