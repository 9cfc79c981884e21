"""A layer that serves and trains with the same bits of attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import openmla
from openmla import LatentCache, Unsupported
from openmla.backward.given import with_expanded_gradients
from openmla.backward.reference import Saved
from openmla.distributed.shard import split
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare_gradients import judge_gradients
from openmla.lab.testing.gradients import GradientCase, build_gradients
from openmla.nn import Batch, MLAAttention, MLAConfig
from openmla.nn.rope import Rope, Yarn
from openmla.planning.form import LayerDims

CONFIG = MLAConfig(
    hidden=48,
    heads=3,
    dims=LayerDims(latent=32, nope=16, rope=8, v=16),
    q_lora=0,
    rope=Rope(width=8, theta=10000.0),
    scale=24**-0.5,
    invariant=True,
)


def layer_of(config: MLAConfig = CONFIG, dtype: torch.dtype = torch.bfloat16) -> MLAAttention:
    torch.manual_seed(0)
    return MLAAttention(config).to(dtype)


class Seen:
    """What attention was asked and what it answered, call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []
        attend = openmla.mla_prefill_latent

        def watched(q: Tensor, *args: Any, **options: Any) -> Any:
            out, lse = attend(q, *args, **options)
            assert options["invariant"]
            self.calls.append((q.detach().clone(), out, lse))
            return out, lse

        monkeypatch.setattr(openmla, "mla_prefill_latent", watched)


def test_ranges_have_the_length_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """In invariant layers and in others, whose decoding then has the bits of chunks."""
    asked: list[int | None] = []
    attend = openmla.mla_prefill_latent

    def watched(*args: Any, **options: Any) -> Any:
        asked.append(options["range_keys"])
        return attend(*args, **options)

    monkeypatch.setattr(openmla, "mla_prefill_latent", watched)
    x = torch.randn(3, 48).bfloat16()
    for invariant, keys in ((False, None), (False, 256), (True, 512)):
        layer = layer_of(replace(CONFIG, invariant=invariant, range_keys=keys))
        cache = LatentCache.allocate(num_pages=8, page_size=16, latent=32, rope=8)
        cache.data.normal_()
        table = torch.arange(8).view(1, 8).int()
        batch = Batch.of([3], [100], block_table=table)
        assert layer.choose(batch).form == "latent"
        with torch.no_grad():
            layer(x, batch.positions, cache, batch)
        assert asked.pop() == keys and not asked


def test_trainer_and_server_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, trained whole; served in chunks and token by token, in pages of 16.

    Projections are computed once: torch's own products have other bits for other batches, and are
    not openmla's.
    """
    layer, new = layer_of(), [70, 9]
    x, batch = torch.randn(79, 48).bfloat16(), Batch.of(new)
    q, latent, rope = (t.detach() for t in layer.project(x, batch.positions))
    absorbed = layer.absorb(q).detach()
    seen = Seen(monkeypatch)
    monkeypatch.setattr(layer, "project", lambda x, positions, compressed=None: (q, latent, rope))
    layer(x.requires_grad_(), batch.positions, batch=batch)
    asked, out, lse = seen.calls.pop()
    assert torch.equal(asked, absorbed)
    cache = LatentCache.allocate(num_pages=12, page_size=16, latent=32, rope=8)
    table, context = torch.randperm(12).view(2, 6).int(), [0, 0]
    for chunk in ([30, 0], [1, 4], [38, 4], [1, 1]):
        here = Batch.of(chunk, context, table)
        rows = torch.cat([torch.arange(a, b) for a, b in zip(context, here.keys, strict=True)])
        rows[chunk[0] :] += new[0]
        cache.append(latent[rows], rope[rows], here.slots(16))
        monkeypatch.setattr(layer, "absorb", lambda q, kept=absorbed[rows]: kept)
        layer.attend_invariantly(q[rows], cache, here)
        _, served, served_lse = seen.calls.pop()
        assert torch.equal(served, out[rows]) and torch.equal(served_lse, lse[rows])
        context = list(here.keys)


def test_it_serves_in_latent_form_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = layer_of(), Seen(monkeypatch)
    cache = LatentCache.allocate(num_pages=12, page_size=16, latent=32, rope=8)
    batch = Batch.of([90], block_table=torch.arange(12).view(1, 12).int())
    with torch.no_grad():
        x = torch.randn(90, 48).bfloat16()
        paged = layer(x, batch.positions, cache, batch)
        fresh = layer(x, batch.positions)
    assert len(seen.calls) == 2 and torch.equal(seen.calls[0][1], seen.calls[1][1])
    assert torch.equal(paged, fresh)


def test_it_trains() -> None:
    """Gradients of every weight are as near those in float64 as the expanded form's are."""
    batch = Batch.of([30, 9])
    x = torch.randn(39, 48).bfloat16()
    found = {}
    for name, config, dtype in (
        ("exact", replace(CONFIG, invariant=False), torch.float32),
        ("expanded", replace(CONFIG, invariant=False), torch.bfloat16),
        ("invariant", CONFIG, torch.bfloat16),
    ):
        layer = layer_of(config).to(dtype)  # of the same weights, rounded
        here = x.to(dtype).requires_grad_()
        layer(here, batch.positions, batch=batch).float().square().sum().backward()
        found[name] = [here.grad, *(p.grad for p in layer.parameters())]

    def error(name: str, i: int) -> float:
        exact = found["exact"][i].float()
        return float((found[name][i].float() - exact).norm() / exact.norm())

    for i in range(len(found["exact"])):
        assert 0 < error("invariant", i) <= 2 * error("expanded", i) + 4e-3


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_a_given_output_are_accepted(seed: int) -> None:
    """By the rule, with out and lse taken as they are: those of the latent form."""
    case = Case("dense", 3, 16, 8, 16, q_lens=(9, 5), k_lens=(11, 5), seed=seed, sink="normal")
    built = build_gradients(GradientCase(case, d_lse=seed % 2 > 0))
    op = built.operands
    assert op.k_rope is not None and op.weights.sink is not None
    generator = torch.Generator().manual_seed(seed)
    # Keys and values that are linear in rows of 24 + 8 columns, as those of a layer are.
    weights = 0.4 * torch.randn(3, 32, 24, generator=generator)
    rows = torch.randn(op.k_nope.shape[0], 24, generator=generator).bfloat16()
    kv = torch.einsum("tl,hnl->thn", rows.float(), weights)
    op.k_nope.copy_(kv[..., :16]), op.v.copy_(kv[..., 16:])
    absorbed = torch.einsum("thn,hnl->thl", op.q[..., :16].float(), weights[:, :16])
    q = torch.cat([absorbed.bfloat16(), op.q[..., 16:]], -1)
    pages = torch.cat([rows, op.k_rope], -1)[:, None]
    table = torch.tensor([[*range(11)], [*range(11, 16), *[0] * 6]]).int()
    sums, lse = openmla.mla_prefill_latent(
        *(q, pages, table, torch.tensor([11, 5]).int()),
        cu_seqlens_q=op.cu_seqlens_q,
        scale=op.weights.scale,
        sink=op.weights.sink,
        d_v=24,
        invariant=True,
        return_lse=True,
    )
    out = torch.einsum("thl,hvl->thv", sums.float(), weights[:, 16:]).bfloat16()
    leaves = {
        name: getattr(op, name).detach().requires_grad_() for name in ("q", "k_nope", "k_rope", "v")
    }
    leaves["sink"] = op.weights.sink.detach().requires_grad_()
    given = with_expanded_gradients(
        *(out, lse, *(leaves[name] for name in ("q", "k_nope", "k_rope", "v"))),
        cu_seqlens_q=op.cu_seqlens_q,
        cu_seqlens_k=op.cu_seqlens_k,
        scale=op.weights.scale,
        sink=leaves["sink"],
    )
    roots, incoming = list(given), [built.d_out, torch.zeros_like(lse)]
    if built.d_lse is not None:
        incoming[1] = built.d_lse
    grads = dict(
        zip(leaves, torch.autograd.grad(roots, list(leaves.values()), incoming), strict=True)
    )
    verdict = judge_gradients(built, grads, Saved(out, lse))
    assert verdict.ok, verdict.report()


def test_the_operator_is_well_formed() -> None:
    cu = torch.tensor([0, 3]).int()
    q, k = torch.randn(3, 2, 24, requires_grad=True), torch.randn(3, 2, 24, requires_grad=True)
    v = torch.randn(3, 2, 16, requires_grad=True)
    out, lse = torch.randn(3, 2, 16), torch.randn(3, 2)
    arguments = (out, lse, q, k, None, v, cu, cu, None, None, 0.3, True, 0, "auto", True)
    found = torch.library.opcheck(torch.ops.openmla.dense_given.default, arguments)
    assert set(found.values()) == {"SUCCESS"}


def test_what_is_refused() -> None:
    batch = Batch.of([4])
    x = torch.randn(4, 48)
    with pytest.raises(Unsupported, match="rows are kept in bfloat16"):
        layer_of(dtype=torch.float32)(x, batch.positions, batch=batch)
    with pytest.raises(Unsupported, match="selects keys"):
        layer_of(replace(CONFIG, topk=2))(x.bfloat16(), batch.positions, batch=batch)
    shard = split([8], world=2, rank=0)
    with pytest.raises(Unsupported, match="several ranks"):
        layer_of()(x.bfloat16(), batch.positions, batch=batch, shard=shard)
    cache = LatentCache.allocate(num_pages=2, page_size=16, latent=32, rope=8)
    paged = Batch.of([4], block_table=torch.tensor([[0, 1]]).int())
    with pytest.raises(Unsupported, match="does not carry one"):
        layer_of()(x.bfloat16(), batch.positions, cache, paged)
    cu, q = torch.tensor([0, 4]).int(), torch.randn(4, 1, 8, requires_grad=True)
    with pytest.raises(openmla.InvalidArgument, match="lse"):
        with_expanded_gradients(
            *(q.detach(), torch.randn(4), q, q, None, q), cu_seqlens_q=cu, scale=1.0
        )
    with pytest.raises(Unsupported, match="out"):
        with_expanded_gradients(*(q, torch.randn(4, 1), q, q, None, q), cu_seqlens_q=cu, scale=1.0)


class Adapted(torch.nn.Linear):
    """A projection with something beside its weight, as adapters and quantized ones have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1.0


def test_an_adapter_that_the_weight_does_not_show_is_refused() -> None:
    """Latent forms multiply by the weight: an adapter would be left out in silence."""
    layer, plain = layer_of(), layer_of()
    own = layer.kv_b_proj
    layer.kv_b_proj = Adapted(own.in_features, own.out_features, bias=False).to(torch.bfloat16)
    x = torch.randn(5, 48).bfloat16()
    with pytest.raises(Unsupported, match="kv_b_proj is a Adapted, not a plain"):
        layer(x, torch.arange(5), batch=Batch.of([5]))
    assert plain(x, torch.arange(5), batch=Batch.of([5])).shape == x.shape


def test_gradients_do_not_depend_on_how_out_lies() -> None:
    """Kernels read rows of out whose columns lie side by side."""
    built = build_gradients(GradientCase(Case("dense", 2, 16, 8, 16, q_lens=(5,), k_lens=(5,))))
    arguments: dict[str, Any] = dict(built.built.arguments)
    out, lse = openmla.mla_prefill(**arguments, return_lse=True)
    odd = out.transpose(1, 2).contiguous().transpose(1, 2)
    assert not odd.is_contiguous() and torch.equal(odd, out)
    arguments["q"] = arguments["q"].detach().requires_grad_()
    names = ("q", "k_nope", "k_rope", "v")
    kept, _ = with_expanded_gradients(
        *(odd, lse, *(arguments[name] for name in names)),
        cu_seqlens_q=arguments["cu_seqlens_q"],
        scale=24**-0.5,
    )
    assert kept.is_contiguous() and torch.equal(kept, out)


def test_weights_in_float32_train_under_autocast() -> None:
    """As mixed precision keeps them: projections are in bf16, and so are the rows."""
    layer, batch = layer_of(dtype=torch.float32), Batch.of([30, 9])
    x = torch.randn(39, 48, requires_grad=True)
    cache = LatentCache.allocate(num_pages=5, page_size=16, latent=32, rope=8)
    paged = Batch.of(batch.new, block_table=torch.tensor([[0, 1], [2, 3]]).int())
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, batch.positions, batch=batch)
        with torch.no_grad():
            served = layer(x, batch.positions, cache, paged)
    assert out.dtype == torch.bfloat16 and torch.equal(out, served)
    out.float().square().sum().backward()
    assert x.grad is not None and bool(x.grad.any())
    assert all(p.grad is not None and bool(p.grad.any()) for p in layer.parameters())


def test_torchs_default_device_changes_nothing() -> None:
    """A model loader that makes no weights has "meta" as default device."""
    stretched = Rope(width=8, theta=10000.0, yarn=Yarn(factor=4.0, trained=128))
    layer = layer_of(replace(CONFIG, rope=stretched)).requires_grad_(False)
    x, batch = torch.randn(7, CONFIG.hidden, dtype=torch.bfloat16), Batch.of([4, 3])
    want = layer(x, batch.positions, batch=batch)
    torch.set_default_device("meta")
    try:
        got = layer(x, batch.positions, batch=batch)
    finally:
        torch.set_default_device(None)
    assert torch.equal(got, want)
