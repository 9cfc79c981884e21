"""The latent kernel on a Hopper GPU: lists of rows, sequences over pages, FlashMLA's calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import openmla
from compat import flash_mla_cases as flash_mla
from gpu.on_device import (
    DEVICE,
    Change,
    attend,
    different,
    drawn_problems,
    normal,
    on,
    on_hopper,
    problems,
)
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory.poison import differences

pytestmark = on_hopper

LISTS = Case("sparse", 12, 512, 64, 512, q_lens=(40,), k_lens=(3000,), topk=200, scale=0.05)
PAGES = Case(
    "latent",
    20,
    512,
    64,
    512,
    q_lens=(70, 33, 5),
    k_lens=(70, 900, 2),
    scale=0.05,
    kv="bf16",
    page_size=64,
    spare=3,
)
NARROW: dict[str, dict[str, Any]] = {
    f"{latent}+{rope}": {"d_nope": latent, "d_rope": rope, "d_v": latent}
    for latent, rope in ((512, 0), (256, 64), (256, 32), (128, 32))
}
# What is compiled in; one kernel each.
OF_LISTS: dict[str, Case] = {
    "mixed": replace(LISTS, index_kind="mixed", spare=5),
    "lengths sink": replace(LISTS, topk_lengths="wild", sink="mixed", index_kind="duplicates"),
    "fp16 max logits": replace(LISTS, dtype="fp16", return_max_logits=True),
    "pages": replace(LISTS, kv="bf16", page_size=24, index_kind="mixed"),
    "nvfp4_352": replace(LISTS, kv="nvfp4_352", page_size=24, index_kind="mixed"),
    **{n: replace(LISTS, **d, index_kind="mixed", sink="normal") for n, d in NARROW.items()},
}
OF_PAGES: dict[str, Case] = {
    "causal": PAGES,
    "full sink": replace(PAGES, causal=False, sink="normal", page_size=16),
    **{kv: replace(PAGES, kv=kv) for kv in ("fp8_656", "fp8_block64", "fp8_token", "nvfp4_352")},
    **{name: replace(PAGES, **dims) for name, dims in NARROW.items()},
    "window": replace(PAGES, window=100),
    "window, pages of 16, sink": replace(PAGES, window=33, page_size=16, sink="mixed"),
    "window, fp8_656": replace(PAGES, window=65, kv="fp8_656"),
    "window, fp8_584": replace(PAGES, window=128, kv="fp8_584", page_size=2, d_rope=0, rope="none"),
    "window, 256+64": replace(PAGES, window=77, **NARROW["256+64"]),
}
# Any head count, list lengths at the edges of blocks, every kind of numbers.
LIST_BATCHES: tuple[dict[str, Any], ...] = (
    {"heads": 128, "topk": 128},
    {"heads": 1, "topk": 1, "q_lens": (300,), "values": "peaky"},
    {"heads": 20, "topk": 65, "values": "rising", "seed": 1},
    {"heads": 64, "topk": 1000, "q_lens": (1,), "values": "large"},
    {"heads": 12, "topk": 300, "q_lens": (140,), "seed": 2},
    {"heads": 96, "topk": 63, "values": "peaky", "seed": 3},
)
PAGE_BATCHES: tuple[dict[str, Any], ...] = (
    {"heads": 20},
    {"heads": 128, "q_lens": (3,), "k_lens": (303,), "values": "peaky"},
    {"heads": 1, "q_lens": (130, 0, 1), "k_lens": (130, 64, 301), "values": "rising"},
    {"heads": 16, "q_lens": (64, 64), "k_lens": (32, 65), "values": "large", "seed": 1},
    {"heads": 40, "q_lens": (1, 3, 64, 0), "k_lens": (2, 3, 129, 0), "seed": 2},
    {"heads": 96, "q_lens": (17,), "k_lens": (129,), "seed": 3},
)


def all_problems(
    case: Case, batches: tuple[dict[str, Any], ...], change: Change | None = None
) -> list[str]:
    return [p for batch in batches for p in problems(replace(case, **batch), "hopper", change)]


@pytest.mark.parametrize("name", OF_LISTS)
def test_lists_of_rows(name: str):
    assert all_problems(OF_LISTS[name], LIST_BATCHES, one_launch) == []


def one_launch(config: Any) -> Any:
    return replace(config, few=None)


FEW_LISTS = replace(LISTS, q_lens=(1,), heads=128, topk=1200, index_kind="mixed", sink="normal")


@pytest.mark.parametrize(
    "case",
    [
        FEW_LISTS,
        replace(FEW_LISTS, kv="fp8_656", page_size=64, q_lens=(3,), values="rising"),
        replace(FEW_LISTS, heads=20, topk_lengths="wild", q_lens=(5,), return_max_logits=True),
        replace(FEW_LISTS, kv="fp8_token", page_size=16, heads=64, values="peaky"),
        replace(FEW_LISTS, q_lens=(8,), values="peaky"),
        replace(FEW_LISTS, kv="fp8_656", page_size=64, q_lens=(8,)),
        replace(FEW_LISTS, q_lens=(12,)),
        replace(FEW_LISTS, kv="fp8_656", page_size=64, q_lens=(16,), values="rising"),
    ],
    ids=str,
)
def test_few_lists_are_right_and_have_the_bits_of_one_launch(case: Case):
    assert problems(case, "hopper") == []
    built = on(case)
    assert not differences(attend(built, "hopper", one_launch), attend(built, "hopper"))


def test_a_query_alone_has_the_bits_it_has_among_many():
    built = on(replace(FEW_LISTS, q_lens=(200,), k_lens=(4000,), topk=600))
    whole = built.run("hopper").out
    arguments = dict(built.arguments)
    q, indices = arguments.pop("q"), arguments.pop("indices")
    for rows in (slice(0, 1), slice(7, 9), slice(120, 130), slice(199, 200)):
        some = openmla.mla_prefill_sparse(
            q[rows], indices=indices[rows], backend="hopper", **arguments
        )
        assert torch.equal(some, whole[rows]), rows


@pytest.mark.parametrize("name", OF_PAGES)
def test_sequences_over_pages(name: str):
    assert all_problems(OF_PAGES[name], PAGE_BATCHES) == []


@pytest.mark.parametrize("form", ["sparse", "latent"])
def test_drawn_cases(form: str):
    plain = {"layout": "aligned", "q_scale": False, "k_scale": False, "out": "aligned"}
    v3 = {"d_nope": 512, "d_rope": 64, "d_v": 512, "dtype": "bf16"}
    assert drawn_problems(form, "hopper", 24, **v3, **plain) == []


@pytest.mark.parametrize("case", list(flash_mla.cases()), ids=str)
def test_flash_mla_conventions(case: flash_mla.FlashCase):
    assert flash_mla.problems(case, DEVICE) == []


# One query and a few, of requests that are split and that are not (see LatentSplit).
FEW = replace(
    PAGES,
    heads=16,
    q_lens=(1, 3, 1, 8, 1),
    k_lens=(9000, 5000, 100, 3000, 20000),
    spare=2,
    sink="mixed",
)
SPLIT_BATCHES: tuple[dict[str, Any], ...] = (
    {},
    {"heads": 128, "q_lens": (1, 1, 2), "k_lens": (17000, 15400, 4096), "values": "rising"},
    {"heads": 1, "q_lens": (1,) * 40, "k_lens": (5000, 5, 0, 6000) * 10, "causal": False},
    {"heads": 20, "q_lens": (10,), "k_lens": (26000,), "values": "peaky"},
)


@pytest.mark.parametrize("kv", ["bf16", "fp8_656"])
@pytest.mark.parametrize("batch", SPLIT_BATCHES, ids=str)
def test_split_requests(batch: dict[str, Any], kv: str):
    assert problems(replace(FEW, kv=kv, **batch), "hopper") == []


def test_a_request_alone_has_the_bits_it_has_among_others():
    case = replace(FEW, q_lens=(1, 2, 1) * 86, k_lens=(9000, 700, 4500) * 86)
    built = on(case)
    whole = built.run("hopper")
    assert whole.lse is not None
    arguments = dict(built.arguments)
    q, table = arguments.pop("q"), arguments.pop("block_table")
    lengths, offsets = arguments.pop("cache_lengths"), arguments.pop("cu_seqlens_q").tolist()
    arguments |= {"backend": "hopper", "return_lse": True}
    for number in (0, 1, 2, 100, 257):
        start, stop = offsets[number : number + 2]
        out, lse = openmla.mla_prefill_latent(
            q[start:stop],
            block_table=table[number : number + 1],
            cache_lengths=lengths[number : number + 1],
            cu_seqlens_q=torch.tensor([0, stop - start], device=DEVICE).int(),
            **arguments,
        )
        assert torch.equal(out, whole.out[start:stop]), number
        assert torch.equal(lse, whole.lse[start:stop]), number


def test_pages_of_every_size_give_the_same_bits():
    """Also with room between them; the same rows, split and not. What lies between is no number."""
    rows, q, found = normal(4608, 576), normal(3, 16, 576), []
    for page_size in (1, 16, 48, 64, 128):
        pages = 4608 // page_size
        for gap in (0, 8):
            pool = torch.full((pages, page_size + gap, 576), float("nan"), device=DEVICE).bfloat16()
            pool[:, :page_size] = rows.view(pages, page_size, 576)
            found.append(
                openmla.mla_prefill_latent(
                    q,
                    pool[:, :page_size],
                    torch.arange(pages, device=DEVICE).int().expand(2, -1),
                    torch.tensor([4555, 300], device=DEVICE).int(),
                    cu_seqlens_q=torch.tensor([0, 1, 3], device=DEVICE).int(),
                    scale=0.05,
                    backend="hopper",
                )
            )
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_lengths_change_between_replays_of_a_graph_over_a_wide_table():
    pages, batch = 1024, 4
    rows = normal(batch * pages, 64, 576)
    table = torch.randperm(batch * pages, device=DEVICE).int().view(batch, pages)
    lengths = torch.tensor([3000, 700, 513, 100], device=DEVICE).int()
    offsets = torch.tensor([0, 1, 3, 4, 7], device=DEVICE).int()
    q = normal(7, 16, 576)

    def call() -> Any:
        return openmla.mla_prefill_latent(
            q,
            rows,
            block_table=table,
            cache_lengths=lengths,
            cu_seqlens_q=offsets,
            scale=0.05,
            d_v=512,
            backend="hopper",
            return_lse=True,
        )

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for now in ((60000, 1, 0, 9000), (5, 5, 5, 5), (4472, 4473, 8192, 65536)):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured, call())), now


@pytest.mark.parametrize(
    "case",
    [
        FEW,
        replace(FEW, heads=128, q_lens=(1,) * 32, k_lens=(16384,) * 32),
        replace(LISTS, heads=128, q_lens=(300,), k_lens=(4096,), topk=512),
        replace(FEW_LISTS, kv="fp8_656", page_size=64),
        replace(LISTS, heads=20, q_lens=(1000,), k_lens=(2048,), topk=130),
        replace(PAGES, heads=16, q_lens=(200, 100), k_lens=(900, 3000)),
    ],
    ids=str,
)
def test_a_thousand_launches_give_the_same_bits(case: Case):
    built = on(case)
    assert different(lambda: built.run("hopper").out, 1000) == 0


def test_a_token_alone_has_the_bits_it_has_among_others():
    built = on(replace(LISTS, heads=96, q_lens=(50,), k_lens=(2000,), topk=300))
    whole = built.run("hopper").out
    arguments = dict(built.arguments)
    q, indices = arguments.pop("q"), arguments.pop("indices")
    for token in range(50):
        rows = slice(token, token + 1)
        alone = openmla.mla_prefill_sparse(
            q[rows], indices=indices[rows], backend="hopper", **arguments
        )
        assert torch.equal(alone, whole[rows]), token


@pytest.mark.parametrize(
    "case",
    [
        replace(PAGES, heads=128, q_lens=(512,), k_lens=(4096,)),
        replace(PAGES, heads=16, q_lens=(1024,), k_lens=(8192,)),
        replace(PAGES, heads=128, q_lens=(256,), k_lens=(4096,), kv="fp8_656"),
    ],
    ids=str,
)
def test_long_sequences_agree_with_the_portable_kernel(case: Case):
    """Too long for the float64 reference."""
    built = on(case)
    ours, other = (built.run(backend) for backend in ("hopper", "portable"))
    assert float((ours.out.float() - other.out.float()).norm() / other.out.float().norm()) < 0.01
    assert ours.lse is not None and other.lse is not None
    assert torch.allclose(ours.lse, other.lse, rtol=1e-4, atol=1e-3)


def test_more_than_2_to_the_31_elements_and_65535_tokens():
    tokens, heads, rows, topk = 70_000, 64, 2**22, 64
    kv, q = normal(rows, 576), normal(tokens, heads, 576)
    indices = torch.randint(0, rows, (tokens, topk), device=DEVICE, dtype=torch.int32)
    indices[:, 0] = rows - 1
    options: dict[str, Any] = {"scale": 0.04, "backend": "hopper"}
    out = openmla.mla_prefill_sparse(q, kv, indices, **options)
    assert isinstance(out, torch.Tensor)
    assert min(kv.numel(), q.numel(), out.numel()) > 2**31
    named = kv[indices[-64:].long().flatten()]
    own = torch.arange(64 * topk, device=DEVICE, dtype=torch.int32).view(64, topk)
    assert torch.equal(
        openmla.mla_prefill_sparse(q[-64:].clone(), named, own, **options), out[-64:]
    )
