"""Batches recorded from SGLang's engine, run again through openmla's backend on any device.

`calls.pt` holds calls of one layer of a tiny DeepSeek-V3: decoding batches, and extending ones with
prefixes from the radix cache. It was made by `make record-sglang` with SGLang 0.5.23 on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import formula
from integrations.sglang import fake_sglang
from integrations.sglang.fake_sglang import Mode

CALLS = Path(__file__).with_name("calls.pt")


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call: a layer, a batch, what it answered."""

    mode: Mode
    q: Tensor
    pages: Tensor
    """[pages, page_size, latent + rope], the new tokens' rows written"""
    slots: Tensor
    """`req_to_token`; row 0 and slot 0 are nobody's, as in SGLang"""
    seq_lens: Tensor
    new_tokens: Tensor
    d_v: int
    scale: float
    out: Tensor

    @property
    def written(self) -> Tensor:
        """`out_cache_loc`: the slots of the new tokens."""
        pairs = zip(self.seq_lens.tolist(), self.new_tokens.tolist(), strict=True)
        mine = [self.slots[i + 1, n - new : n] for i, (n, new) in enumerate(pairs)]
        return torch.cat(mine)

    def batch(self) -> Any:
        """The ForwardBatch."""
        count = len(self.seq_lens)
        numbers = torch.arange(1, count + 1, device=self.slots.device)
        return SimpleNamespace(
            forward_mode=self.mode,
            batch_size=count,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens.cpu(),
            extend_seq_lens=None if self.mode is Mode.DECODE else self.new_tokens,
            req_pool_indices=numbers,
            out_cache_loc=self.written,
        )

    def backend(self, **changes: Any) -> Any:
        """An OpenMLABackend whose pool lacks the rows of the new tokens."""
        rows = self.pages.flatten(0, 1).unsqueeze(1).clone()
        rows[self.written] = torch.nan
        with fake_sglang.installed():
            from openmla.integrations.sglang.attention import OpenMLABackend

            made = fake_sglang.runner(rows, self.slots, self.pages.shape[1], **changes)
            return OpenMLABackend(made)

    def layer(self) -> Any:
        """The RadixAttention of the latent form."""
        return SimpleNamespace(
            tp_q_head_num=self.q.shape[1],
            head_dim=self.q.shape[2],
            v_head_dim=self.d_v,
            layer_id=0,
            scaling=self.scale,
            logit_cap=0.0,
        )

    def new_rows(self) -> Tensor:
        """k [tokens, 1, latent + rope] of the new tokens."""
        return self.pages.flatten(0, 1)[self.written].unsqueeze(1)

    def exact(self) -> Tensor:
        """The call in float64."""
        keys = []
        for i, length in enumerate(self.seq_lens.tolist()):
            keys.append(self.pages.flatten(0, 1)[self.slots[i + 1, :length]])
        k = torch.cat(keys).unsqueeze(1).expand(-1, self.q.shape[1], -1)
        lengths = self.new_tokens.tolist(), self.seq_lens.tolist()
        return formula.ragged(self.q, k, k[..., : self.d_v], *lengths, self.scale).out


def recorded(device: str = "cpu") -> list[Recorded]:
    """All calls."""
    return [
        Recorded(
            mode=Mode[call["mode"]],
            q=call["q"],
            pages=call["rows"],
            slots=call["slots"],
            seq_lens=call["seq_lens"],
            new_tokens=torch.ones_like(call["seq_lens"])
            if call["extend_seq_lens"] is None
            else call["extend_seq_lens"],
            d_v=call["d_v"],
            scale=call["scale"],
            out=call["out"],
        )
        for call in torch.load(CALLS, weights_only=True, map_location=device)
    ]
