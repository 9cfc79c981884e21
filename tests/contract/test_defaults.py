"""Point 13 of the contract on the CPU: results depend on nothing but the arguments.

Model loaders change torch's defaults: `torch.set_default_dtype(torch.bfloat16)` while weights are
made, `torch.set_default_device("meta")` to make none. A tensor that openmla makes for itself
without naming its dtype and its device would follow them; on the meta device it holds no numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import calls
import formula
import openmla
from indexer import cases
from kernels.cached_calls import CALLS as CACHED_CALLS
from kernels.noted import note_launches
from openmla import LatentCache
from openmla.aot.operands import operands_of
from openmla.compat.flash_attn import flash_attn_varlen_func
from openmla.compat.flash_mla import flash_mla_sparse_fwd
from openmla.lab.testing.cases import random_case
from openmla.lab.testing.checker import Checker
from openmla.problem import CACHE_FORMATS, Problem

DEFAULTS: dict[str, tuple[torch.dtype, str | None]] = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "float64": (torch.float64, None),
    "meta": (torch.float32, "meta"),
    "bf16 and meta": (torch.bfloat16, "meta"),
}
every_default = pytest.mark.parametrize("default", DEFAULTS)
LONG = {"q_lens": [3, 2], "k_lens": [600, 6]}  # the CPU kernels cut keys at 512
MORE: dict[str, Any] = {"sink": torch.tensor([0.3, -torch.inf]), "return_lse": True}
SCALES = {"q_scale": torch.full((5,), 0.7), "k_scale": torch.full((606,), 1.2)}
INDEX = cases.paged([5, 9], [60, 200])
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "dense": (openmla.mla_prefill, {**calls.dense(**LONG), **MORE, **SCALES}),
    "dense, bf16": (openmla.mla_prefill, {**calls.dense(**LONG, dtype=torch.bfloat16), **MORE}),
    "latent": (openmla.mla_prefill_latent, {**calls.latent(**LONG), **MORE}),
    "sparse": (
        openmla.mla_prefill_sparse,
        {**calls.sparse(rows=700, topk=600), **MORE, "return_max_logits": True},
    ),
    "merge_states": (openmla.merge_states, calls.merge()),
    "index_topk": (
        partial(openmla.index_topk, INDEX.q, INDEX.keys, INDEX.weights, 30),
        {**INDEX.options, "return_counts": True, "return_mask": True},
    ),
    "flash_mla": (flash_mla_sparse_fwd, calls.flash_mla()),
    "flash_attn": (flash_attn_varlen_func, calls.flash_attn()),
}


@contextmanager
def defaults(name: str) -> Iterator[None]:
    """torch with other defaults."""
    dtype, device = DEFAULTS[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


def tensors(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, tuple) else [returned]


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(tensors(got), tensors(want), strict=True):
        assert (a.device, a.dtype) == (b.device, b.dtype)
        assert formula.same_bits(a, b)


@every_default
@pytest.mark.parametrize("name", CALLS)
def test_13_calls(name: str, default: str):
    function, arguments = CALLS[name]
    want = function(**arguments)
    with defaults(default):
        got = function(**arguments)
    assert_same(got, want)


@every_default
@pytest.mark.parametrize("name", ["dense", "latent", "sparse"])
def test_13_the_reference(name: str, default: str):
    function, arguments = CALLS[name]
    want = function(**arguments, backend="reference")
    with defaults(default):
        got = function(**arguments, backend="reference")
    assert_same(got, want)


@every_default
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_13_caches(format: str, default: str):
    widths, slots = calls.widths_of(format), torch.tensor([5, 0, 2])
    latent, rope = (calls.numbers(3, width) for width in widths)

    def filled() -> LatentCache:
        cache = LatentCache.allocate(
            num_pages=2, page_size=4, latent=widths[0], rope=widths[1], format=format
        )
        cache.append(latent, rope, slots)
        return cache

    want = filled()
    with defaults(default):
        got = filled()
        rows = got.gather(slots)
    assert_same(rows, want.gather(slots))
    assert_same(got.data.view(torch.uint8), want.data.view(torch.uint8))
    if want.scales is not None:
        assert_same(got.scales, want.scales)


@every_default
@pytest.mark.parametrize("name", ["dense", "latent", "sparse, everything"])
def test_13_outputs_of_a_cached_launch(name: str, default: str, monkeypatch):
    """What it is given to write into; the launch itself needs the GPU. Another default device is a
    mode of torch, which sees the operator."""
    noted = note_launches(monkeypatch)
    make, options, _ = CACHED_CALLS[name]
    call = make(**options)
    wanted, _ = noted.take(call)
    with defaults(default):
        got, _ = noted.take(call)
    assert [(x.dtype, x.device.type) for x in got] == [(x.dtype, "cpu") for x in wanted]
    assert [x.dtype for x in got[1:]] == [torch.float32] * (len(got) - 1)
    assert bool(noted.cached)


@every_default
def test_13_warm_up_compiles_for_the_types_of_a_call(default: str):
    """A lse of another dtype would compile another kernel than the one that serves."""
    problem = Problem(
        form="dense",
        heads=2,
        d_nope=8,
        d_rope=4,
        d_v=8,
        total_q=3,
        total_k=3,
        wants_lse=True,
        has_sink=True,
    )
    with defaults(default):
        operands, results = operands_of(problem, "cpu")
    for rows in (results.lse, operands.weights.sink):
        assert rows is not None
        assert (rows.dtype, rows.device.type) == (torch.float32, "cpu")


@every_default
@pytest.mark.parametrize("seed", [10, 20, 30, 50])
def test_13_the_checks_themselves(seed: int, default: str):
    """Cases are built, judged and poisoned alike, so that a failure can be replayed anywhere."""
    want = Checker().result(random_case(seed), deep=True)
    with defaults(default):
        assert Checker().result(random_case(seed), deep=True) == want
    assert want.status == "right"
