"""`OPENMLA` with VLLM_BATCH_INVARIANT=1: how a request is served does not reach its bits.

Prefilled in one piece, in chunks, after a cached prefix, token by token as vLLM decodes, alone and
beside others. The first request passes row 2048, where latent calls split keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm, replay
from integrations.vllm.replay import HEADS, LATENT, NOPE, ROPE, V
from openmla import Unsupported
from openmla.integrations.vllm.forward import UpProjection

PAGE, SCALE = 64, 192**-0.5
ROWS, NEW = (2060, 30, 1), (20, 30, 1)
K_SCALE = torch.tensor([0.021])


class OneByOne(UpProjection):
    """Products whose bits do not depend on the number of tokens, as vLLM's are in this mode."""

    def absorb(self, q: Tensor) -> Tensor:
        return torch.cat([UpProjection.absorb(self, token) for token in q.split(1)])

    def release(self, latent: Tensor) -> Tensor:
        return torch.cat([UpProjection.release(self, token) for token in latent.split(1)])


class Served:
    """One layer, and requests whose rows are in its pages."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        _, weight = replay.recorded("fresh")
        self.layer = replay.layer(weight, SCALE, name)
        whole = self.layer._projection
        self.layer._projection = OneByOne(whole.keys, whole.values)
        per = [-(-n // PAGE) for n in ROWS]
        numbers = torch.randperm(sum(per) + 2).int()
        self.table = torch.full((len(ROWS), max(per)), -1, dtype=torch.int32)
        for request, line in enumerate(numbers[: sum(per)].split(per)):
            self.table[request, : len(line)] = line
        self.values = torch.randn(sum(per) + 2, PAGE, LATENT + ROPE).bfloat16()
        self.pages = self.values
        if name == "fp8":
            self.pages = (self.values.float() / K_SCALE).to(torch.float8_e4m3fn)
            self.values = (self.pages.float() * K_SCALE).bfloat16()
        self.q = [torch.randn(n, HEADS, NOPE + ROPE).bfloat16() for n in NEW]

    def prefill(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """A batch of (request, first, last) of new tokens: out of each."""
        q = torch.cat([self.q[r][a:b] for r, a, b in parts])
        context = torch.tensor([ROWS[r] - NEW[r] + a for r, a, b in parts]).int()
        lengths = [b - a for _, a, b in parts]
        metadata = SimpleNamespace(
            prefill=SimpleNamespace(
                query_start_loc=formula.cu_seqlens(lengths),
                max_query_len=max(lengths),
                chunked_context=SimpleNamespace(context_lens=context) if context.any() else None,
                block_table=self.table[[r for r, _, _ in parts]],
            )
        )
        output = torch.full((len(q), HEADS * V), torch.nan).bfloat16()
        self.layer.forward_mha(q, None, None, self.pages, metadata, K_SCALE, output)
        return list(output.view(-1, HEADS, V).split(lengths))

    def decode(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """The same, of as many tokens each, as vLLM decodes them: queries come absorbed."""
        q = torch.cat([self.q[r][a:b] for r, a, b in parts])
        absorbed = self.layer._projection.absorb(q)
        metadata = SimpleNamespace(
            decode=SimpleNamespace(
                seq_lens=torch.tensor([ROWS[r] - NEW[r] + b for r, _, b in parts]).int(),
                block_table=self.table[[r for r, _, _ in parts]],
            )
        )
        halves = absorbed[..., :LATENT], absorbed[..., LATENT:]
        layer = SimpleNamespace(_k_scale=K_SCALE)
        latent, lse = self.layer.forward_mqa(halves, self.pages, metadata, layer)
        assert lse.shape == q.shape[:2]
        return list(self.layer._projection.release(latent).split(parts[0][2] - parts[0][1]))

    def exact(self, request: int) -> Tensor:
        """In float64, from the latent rows on."""
        rows = self.values[self.table[request].clamp_min(0).long()].flatten(0, 1)[: ROWS[request]]
        projection = self.layer._projection
        keys = torch.einsum("sl,hpl->shp", rows[:, :LATENT].double(), projection.keys.double())
        rope = rows[:, None, LATENT:].double().expand(-1, HEADS, -1)
        values = torch.einsum("sl,hlv->shv", rows[:, :LATENT].double(), projection.values.double())
        lengths = [NEW[request]], [ROWS[request]]
        keys = torch.cat([keys, rope], dim=-1)
        return formula.ragged(self.q[request], keys, values, *lengths, SCALE).out


@pytest.fixture(autouse=True)
def _invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        usual = fake_vllm.modules
        switch = {"vllm.envs": {"VLLM_BATCH_INVARIANT": True}}
        patch.setattr(fake_vllm, "modules", lambda: {**usual(), **switch})
        yield


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_how_a_request_is_served_does_not_reach_its_bits(name: str):
    served = Served(name)
    together = served.prefill((0, 0, 20), (1, 0, 30), (2, 0, 1))
    for request, out in enumerate(together):
        assert replay.error(out, served.exact(request)) <= 2 * 2.0**-8
        [alone] = served.prefill((request, 0, NEW[request]))
        assert formula.same_bits(alone, out)
    chunks = [*served.prefill((1, 0, 7), (0, 0, 9)), *served.prefill((0, 9, 20), (1, 7, 30))]
    assert formula.same_bits(torch.cat([chunks[1], chunks[2]]), together[0])
    assert formula.same_bits(torch.cat([chunks[0], chunks[3]]), together[1])
    # Decoded token by token, and several at once where tokens are speculated.
    for request, step in ((0, 1), (0, 4), (1, 1), (2, 1)):
        out = together[request]
        some = range(0, len(out), step) if step > 1 else (0, len(out) // 2, len(out) - 1)
        for first in some:
            got, *_ = served.decode((request, first, first + step), (0, 3, 3 + step))
            assert formula.same_bits(got, out[first : first + step])


def test_without_the_switch_decoding_is_vllms(monkeypatch: pytest.MonkeyPatch):
    served = Served("auto")
    envs = served.layer.forward_mqa.__globals__["envs"]
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", False)
    assert served.layer.forward_mqa(None, None, None, None) == (None, None)
    assert served.layer.went_vllms_way == "forward_mqa"


def test_output_that_another_backend_would_quantize_is_refused():
    served = Served("auto")
    with pytest.raises(Unsupported, match="quantizes its output"):
        served.layer.forward_mha(served.q[2], None, None, served.pages, None, None, None, 1.0)


@pytest.mark.parametrize(("invariant", "base"), [(True, "TritonMLA"), (False, "FlashMLA")])
def test_the_decoding_backend_on_hopper(invariant: bool, base: str):
    """Its layout and its metadata are used in both cases; FlashMLA's are not invariant."""
    with fake_vllm.installed() as vllm:
        vllm["vllm.platforms"]["current_platform"].capability = (9, 0)
        sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = invariant  # type: ignore[attr-defined]
        from openmla.integrations.vllm.attention import OpenMLABackend
    assert OpenMLABackend.__base__.__name__ == base
