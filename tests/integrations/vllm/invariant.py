"""Requests of `OPENMLA` in vLLM's batch-invariant mode, served in whichever way.

Prefilled in one piece, in chunks, after a cached prefix, token by token as vLLM decodes, alone and
beside others. The first request passes row 2048, where latent calls split keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import formula
from integrations.vllm import fake_vllm, replay
from integrations.vllm.replay import HEADS, LATENT, NOPE, ROPE, V
from openmla.integrations.vllm.forward import UpProjection

PAGE, SCALE = 64, 192**-0.5
ROWS, NEW = (2060, 30, 1), (20, 30, 1)
K_SCALE = 0.021


@contextmanager
def switched_on() -> Iterator[None]:
    """VLLM_BATCH_INVARIANT=1 in every stand-in for vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        usual = fake_vllm.modules
        switch = {"vllm.envs": {"VLLM_BATCH_INVARIANT": True}}
        patch.setattr(fake_vllm, "modules", lambda *chip: {**usual(*chip), **switch})
        yield


class OneByOne(UpProjection):
    """Products whose bits do not depend on the number of tokens, as vLLM's are in this mode."""

    def absorb(self, q: Tensor) -> Tensor:
        return torch.cat([UpProjection.absorb(self, token) for token in q.split(1)])

    def release(self, latent: Tensor) -> Tensor:
        return torch.cat([UpProjection.release(self, token) for token in latent.split(1)])


class Served:
    """One layer, and requests whose rows are in its pages."""

    def __init__(self, name: str, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = device
        _, weight = replay.recorded("fresh", device)
        self.layer = replay.layer(weight, SCALE, name)
        whole = self.layer._projection
        self.layer._projection = OneByOne(whole.keys, whole.values)
        per = [-(-n // PAGE) for n in ROWS]
        numbers = torch.randperm(sum(per) + 2).int()
        self.table = torch.full((len(ROWS), max(per)), -1, dtype=torch.int32)
        for request, line in enumerate(numbers[: sum(per)].split(per)):
            self.table[request, : len(line)] = line
        self.table = self.table.to(device)
        self.k_scale = torch.tensor([K_SCALE], device=device)
        self.values = torch.randn(sum(per) + 2, PAGE, LATENT + ROPE).bfloat16().to(device)
        self.pages = self.values
        if name == "fp8":
            self.pages = (self.values.float() / self.k_scale).to(torch.float8_e4m3fn)
            self.values = (self.pages.float() * self.k_scale).bfloat16()
        self.q = [torch.randn(n, HEADS, NOPE + ROPE).bfloat16().to(device) for n in NEW]

    def prefill(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """A batch of (request, first, last) of new tokens: out of each."""
        q = torch.cat([self.q[r][a:b] for r, a, b in parts])
        context = self._int(ROWS[r] - NEW[r] + a for r, a, b in parts)
        lengths = [b - a for _, a, b in parts]
        metadata = SimpleNamespace(
            prefill=SimpleNamespace(
                query_start_loc=formula.cu_seqlens(lengths).to(self.device),
                max_query_len=max(lengths),
                chunked_context=SimpleNamespace(context_lens=context) if context.any() else None,
                block_table=self.table[[r for r, _, _ in parts]],
            )
        )
        output = torch.full((len(q), HEADS * V), torch.nan).to(q)
        self.layer.forward_mha(q, None, None, self.pages, metadata, self.k_scale, output)
        return list(output.view(-1, HEADS, V).split(lengths))

    def decode(self, *parts: tuple[int, int, int]) -> list[Tensor]:
        """The same, of as many tokens each, as vLLM decodes them: queries come absorbed."""
        q = torch.cat([self.q[r][a:b] for r, a, b in parts])
        absorbed = self.layer._projection.absorb(q)
        metadata = SimpleNamespace(
            decode=SimpleNamespace(
                seq_lens=self._int(ROWS[r] - NEW[r] + b for r, _, b in parts),
                block_table=self.table[[r for r, _, _ in parts]],
            )
        )
        halves = absorbed[..., :LATENT], absorbed[..., LATENT:]
        layer = SimpleNamespace(_k_scale=self.k_scale)
        latent, lse = self.layer.forward_mqa(halves, self.pages, metadata, layer)
        assert lse.shape == q.shape[:2]
        return list(self.layer._projection.release(latent).split(parts[0][2] - parts[0][1]))

    def _int(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)

    def exact(self, request: int) -> Tensor:
        """In float64 on the CPU, from the latent rows on."""
        rows = self.values[self.table[request].clamp_min(0).long()].flatten(0, 1)
        rows, whole = rows[: ROWS[request]].cpu(), self.layer._projection
        projection = UpProjection(whole.keys.cpu(), whole.values.cpu())
        keys = torch.einsum("sl,hpl->shp", rows[:, :LATENT].double(), projection.keys.double())
        rope = rows[:, None, LATENT:].double().expand(-1, HEADS, -1)
        values = torch.einsum("sl,hlv->shv", rows[:, :LATENT].double(), projection.values.double())
        lengths = [NEW[request]], [ROWS[request]]
        keys = torch.cat([keys, rope], dim=-1)
        return formula.ragged(self.q[request].cpu(), keys, values, *lengths, SCALE).out


def check(served: Served) -> None:
    """All of the above; whatever differs by a bit fails."""
    together = served.prefill((0, 0, 20), (1, 0, 30), (2, 0, 1))
    for request, out in enumerate(together):
        assert replay.error(out.cpu(), served.exact(request)) <= 2 * 2.0**-8
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
