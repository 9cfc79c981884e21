"""Continuous batching on any device: every layer's attention against float64, and who waits.

Rows are taken from the engine's pages, keys and values from `kv_b_proj` in float64, request by
request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import formula
from openmla.integrations.transformers import attention, paged, scheduled

PROMPTS = (21, 70, 3, 150)
"""Lengths: more than a batch holds, so that prompts come in chunks beside requests that decode."""
BATCH_TOKENS, NEW, PAGE, BLOCKS = 96, 4, 64, 12
SIZE = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
ULPS = 3 * 2.0**-8
"""Steps of bf16 in a layer's largest output: keys, weights, results are rounded once each."""


class Checked:
    """What was compared so far."""

    def __init__(self, may_wait: bool) -> None:
        self.may_wait = may_wait
        self.calls: Counter[str] = Counter()
        self.off = 0.0
        """Largest error, as a share of the largest output of its request."""

    def around(self, attend: Any) -> Any:
        """`paged.attend`, then what it should have found."""

        def checked(module: Any, query: Tensor, *args: Any) -> Tensor:
            with _no_waiting(query.device) if not self.may_wait else nullcontext():
                out: Tensor = attend(module, query, *args)
            *_, scale, options = args
            self._compare(module, query, out, scale, options["cache"])
            return out

        return checked

    def _compare(self, module: Any, query: Tensor, out: Tensor, scale: Any, cache: Any) -> None:
        pages, now = paged.Pages.of(cache, module.layer_idx), scheduled.of(cache)
        self.calls.update(part.form for part in now.batch.parts)
        self.calls["mixed batches"] += len(now.batch.parts) > 1
        for request in now.requests:
            mine = slice(request.first_query, request.first_query + request.new)
            keys = paged._part("latent", [request], 1, pages).rows
            want = _exact(module, query[0, :, mine], pages.flat()[keys], scale)
            got = out[0, mine].cpu().double()
            self.off = max(self.off, ((got - want).abs().max() / want.abs().max()).item())


def check(model: Any, may_wait: bool = False) -> Checked:
    """Serve requests of PROMPTS; their attention is right, and none of them fails.

    The host waits nowhere in it, unless it may: a kernel that is compiled is also loaded.
    """
    draw, checked = torch.Generator().manual_seed(3), Checked(may_wait)
    prompts = [torch.randint(5, 100, (n,), generator=draw).tolist() for n in PROMPTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention.paged, "attend", checked.around(paged.attend))
        found = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                **{SIZE: PAGE}, num_blocks=BLOCKS, max_batch_tokens=BATCH_TOKENS
            ),
            warmup=False,
        )
    answers = [(len(r.generated_tokens), r.error) for r in found.values()]
    assert answers == [(NEW, None)] * len(prompts)
    assert checked.off <= ULPS, checked.off
    assert all(checked.calls[what] for what in ("latent", "expanded", "mixed batches"))
    return checked


def _exact(module: Any, query: Tensor, rows: Tensor, scale: Any) -> Tensor:
    """float64 [tokens, heads, v] of queries [heads, tokens, nope + rope] over a request's rows."""
    query, rows = query.cpu().double().transpose(0, 1), rows.cpu().double()
    weight, latent = module.kv_b_proj.weight.cpu().double(), module.kv_lora_rank
    expanded = (rows[:, :latent] @ weight.T).view(len(rows), query.shape[1], -1)
    k, v = expanded.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    rope = rows[:, None, latent:].expand(-1, query.shape[1], -1)
    visible = formula.bottom_right(len(query), len(rows))
    scale = module.scaling if scale is None else scale
    return formula.attend(query, torch.cat([k, rope], -1), v, scale, visible).out


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """An error where the host would wait for the GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
