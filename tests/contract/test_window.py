"""window=: a query at position p sees keys p - window + 1 … p, and no other key matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import calls
import formula
import openmla
from kernels.chunks import Prompt, new_results, other_bits
from openmla import InvalidArgument, Problem, Unsupported, plan
from openmla.kernels.cpu import dense as cpu_dense
from openmla.kernels.cpu import latent as cpu_latent
from openmla.kernels.cpu import latent_invariant
from openmla.kernels.cpu.launch import KERNELS
from openmla.kernels.cpu.plan import plan_cpu
from openmla.planning.registry import FAMILIES

BACKENDS = ("cpu", "reference")
Q_LENS, K_LENS = [3, 0, 270, 5], [290, 4, 270, 2]
WINDOWS = (1, 2, 127, 128, 129, 289, 290, 291, 2**31 - 1)
"""At the edges of blocks, and of the longest request."""
DENSE = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512, total_k=4096, window=128
)
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64)


def wide(call: dict[str, Any]) -> torch.Tensor:
    """K of a dense call, with rope in every head."""
    rope = call["k_rope"][:, None].expand(-1, calls.HEADS, -1)
    return torch.cat([call["k_nope"], rope], -1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", WINDOWS)
def test_dense_is_the_formula(backend: str, window: int) -> None:
    call, sink = calls.dense(Q_LENS, K_LENS), torch.tensor([0.5, -1.0])
    out, lse = openmla.mla_prefill(
        **call, scale=0.3, window=window, sink=sink, return_lse=True, backend=backend
    )
    lens = Q_LENS, K_LENS, 0.3
    want = formula.ragged(call["q"], wide(call), call["v"], *lens, sink=sink, window=window)
    formula.assert_close(out, want.out)
    formula.assert_close(lse, want.lse)
    assert not out[273:276].any() and (lse[273:276] == -torch.inf).all()  # 5 queries on 2 keys


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 128, 290])
@pytest.mark.parametrize("invariant", [False, True])
def test_latent_is_the_formula(backend: str, window: int, invariant: bool) -> None:
    call = calls.latent(Q_LENS, K_LENS, page_size=16)
    call = {"scale": 0.3, **call, "window": window, "invariant": invariant}
    out, lse = openmla.mla_prefill_latent(**call, return_lse=True, backend=backend)
    cache, table, lists = call["cache"], call["block_table"].long(), []
    for b, (q_len, k_len) in enumerate(zip(Q_LENS, K_LENS, strict=True)):
        for seen in formula.last_keys(q_len, k_len, window):
            key = seen.nonzero()[:, 0]
            lists.append((table[b, key // 16] * 16 + key % 16).tolist())
    rows = cache.data.flatten(0, 1).float()
    want = formula.listed(call["q"], rows, lists, calls.LATENT, call["scale"])
    formula.assert_close(out, want.out)
    formula.assert_close(lse, want.lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_and_window_both_decide(backend: str) -> None:
    call = calls.dense([5], [40])
    mask = torch.randint(-(2**31), 2**31 - 1, (5, 2), generator=torch.Generator().manual_seed(1))
    flags = ((mask[:, :, None] >> torch.arange(32)) & 1).flatten(1).bool()[:, :40]
    visible = flags & formula.last_keys(5, 40, 17)
    got = openmla.mla_prefill(**call, scale=0.3, window=17, key_mask=mask.int(), backend=backend)
    want = formula.attend(call["q"], wide(call), call["v"], 0.3, visible)
    formula.assert_close(got, want.out)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_may_be_shared(backend: str) -> None:
    """Two parts of one prompt of 60 tokens, both with the keys from its first on."""
    whole, window = calls.dense([60]), {"window": 9, "backend": backend}
    parts = {**whole, "q": whole["q"][20:]}
    parts["cu_seqlens_q"] = torch.tensor([0, 10, 40], dtype=torch.int32)
    parts["cu_seqlens_k"] = torch.tensor([0, 30, 90], dtype=torch.int32)
    got = openmla.mla_prefill(**parts, k_start=torch.zeros(2, dtype=torch.int32), **window)
    want = openmla.mla_prefill(**whole, **window)
    assert torch.allclose(got, want[20:], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_all_keys_is_none(backend: str) -> None:
    call = calls.dense(Q_LENS, K_LENS)
    got = openmla.mla_prefill(**call, window=290, return_lse=True, backend=backend)
    want = openmla.mla_prefill(**call, return_lse=True, backend=backend)
    assert all(formula.same_bits(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("form", ["dense", "latent"])
def test_bits_of_a_request_are_its_own(form: str) -> None:
    make: Callable[..., Any] = getattr(calls, form)
    call: dict[str, Any] = make([7, 300, 2], [200, 310, 290])
    call = {"scale": 0.3, **call, "window": 100}
    run: Callable[..., Any] = openmla.mla_prefill
    first = {name: call[name][:7] for name in ("q",)}
    first["cu_seqlens_q"] = call["cu_seqlens_q"][:2]
    if form == "dense":
        first["cu_seqlens_k"] = call["cu_seqlens_k"][:2]
        first |= {name: call[name][:200] for name in ("k_nope", "k_rope", "v")}
    else:
        run = openmla.mla_prefill_latent
        first |= {name: call[name][:1] for name in ("block_table", "cache_lengths")}
    assert formula.same_bits(run(**{**call, **first}), run(**call)[:7])


def test_invariant_bits_do_not_depend_on_chunks() -> None:
    prompt = Prompt.of(tokens=1200, heads=2, d_v=32, rope=16)

    def run(*parts: tuple[int, int]) -> Any:
        op = replace(prompt.call(*parts), window=600)
        results = new_results(op)
        KERNELS["latent"](plan_cpu(op.problem(results)), op, results)
        return results

    whole = run((0, 1200))
    for parts in (((0, 500), (500, 1111)), ((1199, 1200), (599, 600), (600, 602), (0, 1))):
        assert not other_bits(whole, run(*parts), parts)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("invariant", [False, True])
def test_what_lies_before_every_window_is_not_read(backend: str, invariant: bool) -> None:
    """Pages that a server has given to somebody else, and entries that name none."""
    call = {"scale": 0.3, **calls.latent([3], [100], page_size=8)}
    call |= {"window": 20, "invariant": invariant, "backend": backend}
    want = openmla.mla_prefill_latent(**call)
    given_away = call["block_table"][0, : (100 - 3 + 1 - 20) // 8].clone()
    call["cache"].data[given_away.long()] = torch.nan
    assert formula.same_bits(openmla.mla_prefill_latent(**call), want)
    call["block_table"][0, : len(given_away)] = -1
    assert formula.same_bits(openmla.mla_prefill_latent(**call), want)
    call["block_table"][0, len(given_away)] = -1
    with pytest.raises(InvalidArgument, match=r"page -1 for sequence 0, entry 9"):
        openmla.mla_prefill_latent(**call)


def test_time_on_the_cpu_follows_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: how many keys are fetched for one query of 5000 keys."""
    fetched: list[int] = []
    for module in (cpu_dense, cpu_latent, latent_invariant):
        page_rows = module.page_rows

        def noted(pages: Any, size: int, start: int, stop: int, of: Any = page_rows) -> Any:
            fetched.append(stop - start)
            return of(pages, size, start, stop)

        monkeypatch.setattr(module, "page_rows", noted)
    call = {"scale": 0.3, **calls.latent([1], [5000], page_size=64)}
    for window, invariant, most in ((None, False, 5000), (128, False, 128), (128, True, 1024)):
        fetched.clear()
        openmla.mla_prefill_latent(**call, window=window, invariant=invariant, backend="cpu")
        assert 0 < sum(fetched) <= most
    assert sum(fetched) < 5000


def test_gradients_are_those_of_the_formula() -> None:
    call = calls.dense([6, 3], [9, 2])
    names = ("q", "k_nope", "k_rope", "v")
    given = [call[name].requires_grad_() for name in names]
    out, lse = openmla.mla_prefill(**call, scale=0.3, window=3, return_lse=True)
    seen = lse.isfinite()
    got = torch.autograd.grad(out.square().sum() + lse[seen].sum(), given)
    doubles = {n: call[n].detach().double().requires_grad_() for n in names}
    lens = [6, 3], [9, 2], 0.3
    want = formula.ragged(doubles["q"], wide(doubles), doubles["v"], *lens, window=3)
    loss = want.out.square().sum() + want.lse[seen].sum()
    for x, y in zip(got, torch.autograd.grad(loss, list(doubles.values())), strict=True):
        assert torch.allclose(x.double(), y.nan_to_num(0.0), rtol=1e-4, atol=1e-5)
    assert not got[1][0].any() and bool(got[1][1].any())  # key 0 is before every window


def test_it_compiles_as_one_graph() -> None:
    call = calls.dense([5], [9])

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor) -> Any:
        return openmla.mla_prefill(**{**call, "q": q}, window=3)

    assert formula.same_bits(attend(call["q"]), openmla.mla_prefill(**call, window=3))


OWN_KERNELS = {
    "dense": {"hopper", "blackwell", "cdna4"},
    "latent": {"hopper", "blackwell", "cdna4"},
}
"""Families that serve a window beside the portable kernels and the CPU's."""
CHIPS = {"h200": "hopper", "b200": "blackwell", "mi355x": "cdna4", "a100": "portable"}


@pytest.mark.parametrize("problem", [DENSE, LATENT], ids=["dense", "latent"])
def test_own_kernels_take_it_and_elsewhere_auto_is_the_portable_one(
    problem: Problem,
) -> None:
    own = OWN_KERNELS[problem.form]
    for target, backend in CHIPS.items():
        chosen = plan(problem, target=target)
        assert chosen.backend == (backend if backend in own else "portable")
        assert "window of 128" in chosen.explain()
        if backend not in own | {"portable"}:
            with pytest.raises(Unsupported, match="window 128: not served"):
                plan(problem, target=target, backend=backend)
    serving = {
        f.name for f in FAMILIES for k in f.of_form(problem.form) if k.serves.mentions("window")
    }
    assert serving == {"reference", "cpu", "portable"} | own


def test_a_form_that_never_ran_on_a_chip_is_simulated_there() -> None:
    """Beside one that did, of the same kernel. Windows did, over bf16 rows."""
    narrow = {"d_rope": 0, "rope": "none"}
    unpacked = plan(replace(LATENT, **narrow, kv_dtype="fp8_584"), target="h200")
    assert unpacked.word == "simulated" and unpacked.runs_today
    assert "never on the chip itself" in unpacked.meaning
    assert plan(replace(LATENT, **narrow), target="h200").word == "measured"
    assert plan(DENSE, target="h200").word == "measured"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"has_key_mask": True}, "window beside key_mask"),
        ({"rope": "cache", "page_size": 64}, "window beside rope from pages"),
    ],
    ids=str,
)
def test_what_hopper_leaves_to_the_portable_kernel(more: dict[str, Any], says: str) -> None:
    """Values begin with the window, where a copy of bits or of a page may not."""
    chosen = plan(replace(DENSE, **more), target="h200")
    assert chosen.backend == "portable" and says in " ".join(chosen.passed_over)


def test_what_cdna4_leaves_to_the_portable_kernel() -> None:
    """Windows of which few queries should be split, and bits beside FP8 keys."""
    long = replace(LATENT, total_q=1, table_keys=1 << 20, window=4096)
    assert plan(long, target="mi355x").backend == "cdna4"
    assert plan(replace(long, window=4097), target="mi355x").backend == "portable"
    assert plan(replace(long, window=4097, table_keys=4096), target="mi355x").backend == "cdna4"
    e4m3 = dict.fromkeys(("q_dtype", "kv_dtype", "v_dtype", "rope_dtype"), "e4m3")
    for masked, backend in ((False, "cdna4"), (True, "portable")):
        for narrow in ({}, {"d_rope": 0, "rope": "none"}):
            problem = replace(DENSE, **e4m3, **narrow, has_key_mask=masked)
            assert plan(problem, target="mi355x").backend == backend
    assert plan(replace(DENSE, has_key_mask=True), target="mi355x").backend == "cdna4"


def test_long_windows_of_rows_are_split_and_fp8_rows_have_no_pair() -> None:
    for window, backend in ((4096, "blackwell"), (4097, "portable")):
        long = replace(LATENT, table_keys=1 << 20, total_k=1 << 20, window=window)
        assert plan(long, target="b200").backend == backend
    fp8 = dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), "fp8_656")
    wide = replace(LATENT, heads=128, table_keys=1 << 20)
    assert plan(wide, target="b200").kernel_name == "latent_pair"
    assert plan(replace(wide, **fp8), target="b200").kernel_name == "latent_fp8_rows"


def test_blackwell_takes_no_window_beside_pages_or_a_mask() -> None:
    for more in ({"has_key_mask": True}, {"rope": "cache", "page_size": 64}):
        with pytest.raises(Unsupported, match="a window beside pages or a key mask"):
            plan(replace(DENSE, **more), target="b200", backend="blackwell")


def test_splits_follow_the_keys_that_are_seen() -> None:
    """A short window over a long context leaves nothing to split, and needs no workspace."""
    few = replace(LATENT, total_q=1, total_k=1 << 20, window=0, table_keys=1 << 20)
    assert plan(few, target="a100").variant.split is not None
    assert plan(replace(few, window=128), target="a100").variant.split is None
    long = plan(replace(few, window=100_000), target="a100").variant.split
    assert long is not None and long.slots < plan(few, target="a100").variant.split.slots
    assert "1 ranges" not in plan(replace(few, window=128), target="a100").explain()
    assert replace(DENSE, window=8).flops * 512 == replace(DENSE, window=0).flops


@pytest.mark.parametrize(
    "changed", [{"form": "sparse"}, {"causal": False}, {"window": -1}, {"window": True}], ids=str
)
def test_other_problems_have_no_window(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^window: expected"):
        replace(DENSE, **changed)
