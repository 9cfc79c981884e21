"""Record the FlashMLA calls of vLLM's DeepSeek-V4 layer, for tests/integrations/vllm.

    make record-vllm

vLLM's own metadata builders and its `DeepseekV4FlashMLAAttention` run here: their Triton kernels in
Triton's interpreter, on a CPU. No model is needed: what a call holds besides queries and cached
rows follows from a batch's lengths, tables and slots. The calls are kept without the contents of
queries and rows, which whoever replays them draws.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton.backends
from torch import Tensor

# On a CPU vLLM imports Triton if it has a backend named "cpu"; the interpreter needs none.
triton.backends.backends.setdefault("cpu", SimpleNamespace(driver=None))

from vllm.models.deepseek_v4 import sparse_mla  # noqa: E402
from vllm.models.deepseek_v4.nvidia import flashmla  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.mla import sparse_swa  # noqa: E402
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec  # noqa: E402

from openmla.compat.flash_mla import get_mla_metadata  # noqa: E402

WINDOW, HEADS, WIDTH, ROW = 128, 64, 512, 584
TOPK = 512
LONGEST = 40960  # tokens of a request that the model takes: rows of lists are wider than a call's
MOST_TOKENS = 256
BLOCK = 256  # tokens of a block of every cache
PAGE = 64  # rows of a window's page
ALIGNED = 576


@dataclass(frozen=True)
class Batch:
    """Requests with tokens before this step and new ones; decodes come first."""

    before: tuple[int, ...]
    new: tuple[int, ...]
    drafted: int = 0
    """Tokens that a decode may have beside its own."""
    padding: int = 0
    """Tokens that a CUDA graph adds, which belong to no request's cache."""
    causal: bool = True
    """False: tokens of a DSpark draft, each of which sees all of its block."""
    layers: int = 1
    """Layers whose pages lie in one allocation, one after another."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each request after this step."""
        return [a + b for a, b in zip(self.before, self.new, strict=True)]


BATCHES = {
    "decode": Batch((0, 63, 127, 128, 129, 700, 3001), (1,) * 7),
    "padded decode": Batch((300, 5), (1, 1), padding=3),
    "verified": Batch((254, 511, 1023), (3, 3, 2), drafted=2, layers=3),
    "draft block": Batch((2, 500), (5, 5), drafted=5, causal=False),
    "prefill": Batch((0, 300), (70, 9)),
    "mixed": Batch((126, 1500, 0), (1, 1, 33)),
}
RATIOS = {"window": 1, "ratio 4": 4, "ratio 128": 128}


def config(batch: Batch) -> Any:
    """What the builders read of vLLM's configuration."""
    text = SimpleNamespace(
        sliding_window=WINDOW,
        compress_ratios=[1, 4, 128],
        index_topk=TOPK,
        model_type="deepseek_v4",
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=batch.drafted,
        parallel_drafting=False,
        use_dspark=lambda: not batch.causal,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LONGEST, hf_config=text),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MOST_TOKENS, max_num_seqs=16),
        speculative_config=speculative if batch.drafted else None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        use_v2_model_runner=True,
    )


def tables(batch: Batch, tokens: int, seed: int) -> Tensor:
    """A line of pages for each request, in no order; what lies behind it names nothing."""
    counts = [-(-length // tokens) for length in batch.lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(len(counts), -(-LONGEST // tokens), dtype=torch.int32)
    for line, pages in zip(table, order.split(counts), strict=True):
        line[: len(pages)] = pages
    return table


def common(batch: Batch, table: Tensor, tokens: int) -> CommonAttentionMetadata:
    """The step as vLLM's runner describes it, with the tables of one cache. What a graph adds are
    requests without tokens, and tokens of no request."""
    new, lengths = torch.tensor(batch.new), torch.tensor(batch.lengths, dtype=torch.int32)
    spans = zip(batch.before, batch.lengths, strict=True)
    positions = torch.cat([torch.arange(*span) for span in spans])
    requests = torch.arange(len(new)).repeat_interleave(new)
    slots = table[requests, positions // tokens].long() * tokens + positions % tokens
    starts = torch.tensor([0, *batch.new]).cumsum(0).int()
    added = (0, batch.padding)
    starts = torch.cat([starts, starts[-1:].expand(batch.padding)])
    lengths = torch.nn.functional.pad(lengths, added)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=len(positions) + batch.padding,
        max_query_len=max(batch.new),
        max_seq_len=max(batch.lengths),
        block_table_tensor=torch.nn.functional.pad(table, (0, 0, *added)),
        slot_mapping=torch.nn.functional.pad(slots, added, value=-1),
        positions=torch.nn.functional.pad(positions, added),
        causal=batch.causal,
    )


def pool(pages: int, rows: int, layers: int) -> Tensor:
    """A cache as the layer holds it, [pages, rows, bytes]: pages are aligned. Nothing is in it."""
    stride = -(-rows * ROW // ALIGNED) * ALIGNED * layers
    return torch.zeros(pages, stride, dtype=torch.uint8)[:, : rows * ROW].view(pages, rows, ROW)


def chosen(batch: Batch, tokens: int, ratio: int) -> Tensor:
    """What an indexer leaves in its buffer: rows of each token's own request, in no order, -1 where
    there are fewer than it may choose."""
    generator = torch.Generator().manual_seed(7)
    buffer = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    ends = [p + 1 for span in zip(batch.before, batch.lengths, strict=True) for p in range(*span)]
    for line, end in zip(buffer, ends, strict=False):
        there = torch.randperm(end // ratio, generator=generator)[:TOPK]
        line[: len(there)] = there
    return buffer


def calls_of(batch: Batch, ratio: int) -> list[dict[str, Any]]:
    """FlashMLA calls of one layer in one step, each with its name and arguments."""
    vllm, kept = config(batch), []
    windows = tables(batch, PAGE, seed=1)
    step = common(batch, windows, PAGE)
    window_spec = SlidingWindowMLASpec(
        block_size=PAGE,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=WIDTH,
        dtype=torch.uint8,
        sliding_window=WINDOW,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=ROW,
        alignment=ALIGNED,
        model_version="deepseek_v4",
    )
    device = torch.device("cpu")
    builder = flashmla.DeepseekSparseSWAFlashMLAMetadataBuilder(window_spec, ["w"], vllm, device)
    with mock.patch.object(sparse_swa, "get_mla_metadata", get_mla_metadata):
        metadata: dict[str, Any] = {"w": builder.build(0, step)}
    layer = SimpleNamespace(
        compress_ratio=ratio,
        prefix="layer",
        kv_cache=None,
        swa_cache_layer=SimpleNamespace(
            prefix="w", kv_cache=pool(int(windows.max()) + 1, PAGE, batch.layers)
        ),
        topk_indices_buffer=chosen(batch, step.num_actual_tokens, max(ratio, 4)),
        scale=WIDTH**-0.5,
        attn_sink=torch.zeros(HEADS),
        window_size=WINDOW,
        max_image_tokens=0,
        max_num_batched_tokens=MOST_TOKENS,
        max_model_len=LONGEST,
        PREFILL_CHUNK_SIZE=flashmla.DeepseekV4FlashMLAAttention.PREFILL_CHUNK_SIZE,
    )
    if ratio > 1:
        blocks = tables(batch, BLOCK, seed=2)
        spec = MLAAttentionSpec(
            block_size=BLOCK,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=WIDTH,
            dtype=torch.uint8,
            tokens_per_state=ratio,
            cache_dtype_str="fp8_ds_mla",
            alignment=ALIGNED,
            model_version="deepseek_v4",
            state_content_bytes=ROW,
        )
        rows = sparse_mla.DeepseekV4FlashMLAMetadataBuilder(spec, ["layer"], vllm, device)
        metadata["layer"] = rows.build(0, common(batch, blocks, BLOCK))
        layer.kv_cache = pool(int(blocks.max()) + 1, BLOCK // ratio, batch.layers)
    for name in ("_forward_prefill", "_forward_decode"):
        method = getattr(flashmla.DeepseekV4FlashMLAAttention, name)
        setattr(layer, name, method.__get__(layer))
    q = torch.zeros(step.num_actual_tokens, HEADS, WIDTH, dtype=torch.bfloat16)

    def keep(name: str) -> Any:
        def call(**arguments: Any) -> tuple[Tensor, None]:
            kept.append({"name": name, **{k: described(v) for k, v in arguments.items()}})
            return arguments["out"], None

        return call

    with ExitStack() as patches:
        for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
            patches.enter_context(mock.patch.object(flashmla, name, keep(name)))
        context = SimpleNamespace(attn_metadata=metadata)
        spaces = SimpleNamespace(get_simultaneous=workspaces)
        patches.enter_context(mock.patch.object(flashmla, "get_forward_context", lambda: context))
        patches.enter_context(
            mock.patch.object(flashmla, "current_workspace_manager", lambda: spaces)
        )
        patches.enter_context(
            mock.patch.object(flashmla, "dequantize_and_gather_k_cache", lambda *_, **__: None)
        )
        attend = flashmla.DeepseekV4FlashMLAAttention.forward_mqa
        attend(layer, q, torch.empty(0), step.positions, torch.zeros_like(q))
    return kept


def workspaces(*wanted: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Memory that a layer asks for, as vLLM's manager hands it out: with what was there before."""
    return [torch.full(shape, 77, dtype=dtype) for shape, dtype in wanted]


def described(value: Any) -> Any:
    """An argument as it is kept: lists and lengths as they are, strides included; of queries, rows
    and results their type, shape and strides."""
    if not isinstance(value, Tensor):
        return value if isinstance(value, int | float | bool | None) else type(value).__name__
    if value.dtype in (torch.int32, torch.int64):
        base = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return base.copy_(value)
    return {"dtype": value.dtype, "shape": tuple(value.shape), "stride": value.stride()}


def main() -> None:
    """Record every batch, with every kind of layer, to the file named on the command line."""
    recorded = {
        f"{batch}, {ratio}": calls_of(BATCHES[batch], RATIOS[ratio])
        for batch in BATCHES
        for ratio in RATIOS
    }
    torch.save(recorded, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
