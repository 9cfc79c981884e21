"""`RowAttention`: what layers of DeepSeek-V4 and of V4.1 do alike.

A token's hidden state becomes one row, K and V of all heads, and a query for each head; the last
columns of both are turned by the token's position. A query sees the rows of a window of tokens and,
in the same softmax, whatever sources the layer names besides. V was turned with K, so the result is
turned back by the query's position, and projected in groups of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import openmla
from openmla import checks
from openmla.cache import LatentCache
from openmla.errors import InvalidArgument, Unsupported
from openmla.nn.batch import Batch, require_pages
from openmla.nn.compressed.cache import CompressedCache, Rows
from openmla.nn.compressed.config import CompressedConfig
from openmla.nn.rope import turn_tail, turns_back
from openmla.sources import Source, Span

Layer = TypeVar("Layer", bound="RowAttention")


class RowAttention(nn.Module):
    """Projections of one layer, and attention to its window and to other sources of rows.

    Args:
        config: sizes and rotary embedding of the layer; weights are untrained.
    """

    def __init__(self, config: CompressedConfig) -> None:
        super().__init__()
        self.config = config
        rows = config.heads * config.width
        self.q_a_proj = nn.Linear(config.hidden, config.q_lora, bias=False)
        self.q_a_norm = nn.RMSNorm(config.q_lora, eps=config.eps)
        self.q_b_proj = nn.Linear(config.q_lora, rows, bias=False)
        self.kv_proj = nn.Linear(config.hidden, config.width, bias=False)
        self.kv_norm = nn.RMSNorm(config.width, eps=config.eps)
        groups = config.o_groups
        self.o_a_proj = nn.Linear(rows // groups, groups * config.o_lora, bias=False)
        self.o_b_proj = nn.Linear(groups * config.o_lora, config.hidden, bias=False)
        self.sinks = nn.Parameter(torch.zeros(config.heads))

    def load(self: Layer, source: nn.Module | Mapping[str, Tensor], prefix: str = "") -> Layer:
        """Take the weights of an attention module, or of a state dict under `prefix`.

        Args:
            source: the model's own attention module, or tensors by the names of its parameters.
            prefix: what names of the state dict begin with, such as "model.layers.0.self_attn.";
                others are left alone. Empty: all are the layer's.

        Raises:
            RuntimeError: torch's own, where weights are missing, left over or of another shape.
        """
        state = source.state_dict() if isinstance(source, nn.Module) else source
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        self.load_state_dict(own)
        return self

    def check(self, x: Tensor, cache: CompressedCache, batch: Batch, rows: Rows | None) -> None:
        """Refuse what the layer cannot be called with, before anything is written.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            cache: the caches of the layer.
            batch: the sequences, with a block_table of the window's pages.
            rows: the pages of compressed rows and the lines of state.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: the call needs gradients.
        """
        _check(x, cache, batch, rows, self.config)
        if checks.needs_gradients(x, *self.parameters()):
            raise Unsupported(
                f"gradients of {type(self).__name__}: its caches carry none", "torch.no_grad()"
            )

    def attend(
        self,
        x: Tensor,
        window: LatentCache,
        batch: Batch,
        others: Callable[[Tensor], list[Source]],
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]; new rows are appended to the window.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            window: the cache of a row per token.
            batch: the sequences, with a block_table of the window's pages.
            others: what queries see besides, from their compressed queries [tokens, q_lora].
        """
        config = self.config
        cos, sin = (t[:, None] for t in config.rope.cos_sin(batch.positions, x.dtype))
        residual = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(residual).view(len(x), config.heads, config.width)
        if config.norms_heads:
            q = rms_norm(q, q.shape[2:], eps=config.eps)
        kv = turn_tail(self.kv_norm(self.kv_proj(x)), cos[:, 0], sin[:, 0])
        window.append(kv, None, batch.slots(window.page_size))
        sources = [_last(window, batch, config.window), *others(residual)]
        q, scale = turn_tail(q, cos, sin), config.width**-0.5
        back = turns_back(cos[:, 0], sin[:, 0])
        out = openmla.mla_attend(q, sources, scale=scale, sink=self.sinks.float(), turn_back=back)
        return self._project(out)

    def _project(self, out: Tensor) -> Tensor:
        """[tokens, heads, width] -> [tokens, hidden]; a group of heads has a weight of its own."""
        groups = self.config.o_groups
        weight = self.o_a_proj.weight.view(groups, self.config.o_lora, -1)
        grouped = out.reshape(len(out), groups, weight.shape[2])
        low = torch.einsum("tgi,goi->tgo", grouped, weight)
        projected: Tensor = self.o_b_proj(low.flatten(1))
        return projected


def up_to(ends: Tensor, cache: LatentCache, table: Tensor, batch: Batch) -> Span:
    """The first ends[t] rows of each query's sequence."""
    return Span(cache, table, batch.sequences.int(), torch.zeros_like(ends), ends)


def _last(cache: LatentCache, batch: Batch, count: int) -> Span:
    """The rows of each query's last `count` tokens, its own among them."""
    assert batch.block_table is not None
    last = batch.positions.int()
    return Span(cache, batch.block_table, batch.sequences.int(), last - count + 1, last + 1)


def _check(
    x: Tensor, cache: CompressedCache, batch: Batch, rows: Rows | None, config: CompressedConfig
) -> None:
    if x.shape != (batch.tokens, config.hidden):
        expected = f"[{batch.tokens}, {config.hidden}], as the batch has tokens"
        raise InvalidArgument("x", expected, f"shape {tuple(x.shape)}")
    if batch.block_table is None:
        raise InvalidArgument("batch", "a block_table: the pages of the window", "none")
    require_pages("batch.block_table", batch.block_table, cache.window.page_size, batch.keys)
    if not config.ratio:
        return
    if any(getattr(cache, name) is None for name in config.kept):
        raise InvalidArgument("cache", f"what a layer of ratio {config.ratio} keeps", "less")
    if rows is None:
        raise InvalidArgument("rows", "the pages of compressed rows", "None")
    sequences = len(batch.new)
    if rows.block_table.dim() != 2 or rows.block_table.shape[0] != sequences:
        got = f"shape {tuple(rows.block_table.shape)}"
        raise InvalidArgument("rows.block_table", f"[{sequences}, max_pages]", got)
    if rows.requests.shape != (sequences,):
        got = f"shape {tuple(rows.requests.shape)}"
        raise InvalidArgument("rows.requests", f"[{sequences}]", got)
    assert cache.rows is not None
    lengths = [keys // config.ratio for keys in batch.keys]
    require_pages("rows.block_table", rows.block_table, cache.rows.page_size, lengths)
