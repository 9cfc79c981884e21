"""K and V of fewer heads than q: query head h reads head h // (H / H_kv) of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import calls
import formula
import openmla
from openmla import InvalidArgument, Problem, Unsupported, plan
from openmla.planning.registry import FAMILIES

BACKENDS = ("cpu", "reference")
Q_LENS, K_LENS = [3, 0, 140, 5], [60, 4, 140, 2]
HEADS = 12
DENSE = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=512, total_k=512, group=4
)


def grouped(group: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A dense call whose K and V have HEADS / group heads."""
    call = calls.dense(Q_LENS, K_LENS, heads=HEADS, dtype=dtype)
    return call | {name: call[name][:, : HEADS // group] for name in ("k_nope", "v")}


def spread(call: dict[str, Any], group: int) -> dict[str, Any]:
    """The same call with a head of K and V for every head of q."""
    rows = {name: call[name] for name in ("k_nope", "v")}
    if call["k_rope"].dim() == 3 and call["k_rope"].shape[1] > 1:
        rows["k_rope"] = call["k_rope"]
    return call | {name: x.repeat_interleave(group, dim=1) for name, x in rows.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("group", [1, 2, 3, 12])
@pytest.mark.parametrize("rope", ["shared", "of each head"])
def test_it_is_the_formula(backend: str, group: int, rope: str) -> None:
    call = grouped(group)
    if rope == "of each head":
        call["k_rope"] = calls.numbers(sum(K_LENS), HEADS // group, calls.D_ROPE, seed=9)
    out, lse = openmla.mla_prefill(**call, scale=0.3, return_lse=True, backend=backend)
    wide = spread(call, group)
    rope_rows = wide["k_rope"] if wide["k_rope"].dim() == 3 else wide["k_rope"][:, None]
    k = torch.cat([wide["k_nope"], rope_rows.expand(-1, HEADS, -1)], -1)
    want = formula.ragged(call["q"], k, wide["v"], Q_LENS, K_LENS, 0.3)
    formula.assert_close(out, want.out)
    formula.assert_close(lse, want.lse)


@pytest.mark.parametrize("group", [2, 3, 12])
def test_bits_are_those_of_heads_that_were_copied(group: int) -> None:
    call = grouped(group, torch.bfloat16)
    assert formula.same_bits(
        openmla.mla_prefill(**call), openmla.mla_prefill(**spread(call, group))
    )


def test_fp8_and_scales_and_windows_and_masks() -> None:
    e4m3 = torch.float8_e4m3fn
    call = {
        n: x.to(e4m3) if n in ("q", "k_nope", "v", "k_rope") else x for n, x in grouped(3).items()
    }
    call |= {"q_scale": torch.rand(sum(Q_LENS)), "k_scale": torch.rand(sum(K_LENS)), "window": 17}
    call["key_mask"] = torch.full((sum(Q_LENS), 5), 0x5A5A7777, dtype=torch.int32)
    call["sink"] = torch.randn(HEADS)
    wide = {
        name: call[name].float().repeat_interleave(3, dim=1).to(e4m3) for name in ("k_nope", "v")
    }
    assert formula.same_bits(openmla.mla_prefill(**call), openmla.mla_prefill(**call | wide))


def test_gradients_are_refused_before_the_forward_pass() -> None:
    call = grouped(4)
    call["q"].requires_grad_()
    with pytest.raises(Unsupported, match="group 4: not served"):
        openmla.mla_prefill(**call)


def test_it_compiles_as_one_graph() -> None:
    call = grouped(4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: torch.Tensor) -> Any:
        return openmla.mla_prefill(**{**call, "q": q})

    assert formula.same_bits(attend(call["q"]), openmla.mla_prefill(**call))


def test_who_serves_it() -> None:
    serving = {f.name for f in FAMILIES for k in f.of_form("dense") if k.serves.mentions("group")}
    assert serving == {"reference", "cpu", "portable", "cdna4", "blackwell"}
    for target, backend in (("h200", "portable"), ("b200", "blackwell"), ("mi355x", "cdna4")):
        chosen = plan(DENSE, target=target)
        assert chosen.backend == backend and "16 heads over 4 of K and V" in chosen.explain()
    assert plan(DENSE, target="mi355x").config.config.num_kv_heads == 4
    with pytest.raises(Unsupported, match="group 4: not served"):
        plan(DENSE, target="h200", backend="hopper")


@pytest.mark.parametrize("changed", [{"group": 3}, {"group": 0}, {"form": "latent"}], ids=str)
def test_other_problems_have_no_groups(changed: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^group: expected"):
        replace(DENSE, **changed)
