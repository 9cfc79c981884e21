"""Layers of DeepSeek-V4.1 against their definition in float64: one sequence, one query at a time.

Every layer is given hidden states of its own, so that one that is wrong does not hide another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from nn import exact
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.groups_reference import best_blocks
from openmla.lab.testing.indexer import BOUND, selection_fits
from openmla.nn import (
    Batch,
    CompressedCache,
    Rows,
    Selected,
    SharedRowsAttention,
    SharedRowsConfig,
)
from openmla.nn.compressed import shared
from openmla.nn.indexer import fold

CLOSE = 1e-5
LENGTHS = (61, 23)
CUTS = {
    "whole": [LENGTHS],
    "chunks": [(13, 0), (4, 5), (21, 3), (0, 1), (23, 14)],
    "then one by one": [(40, 2), *[(1, 1)] * 21],
}
# The window alone; two writers of ratio 2 and a reader; a writer of ratio 1 that names blocks, an
# indexer inside of them, and a reader of its list.
SETTINGS: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 7,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 8,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 5],
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 5,
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 4,
    "rms_norm_eps": 1e-20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"factor": 16, "original_max_position_embeddings": 32},
}
WIDE = {"head_dim": 512, "qk_rope_head_dim": 64, "num_attention_heads": 2, "o_lora_rank": 8}


def settings(**more: Any) -> Any:
    return SimpleNamespace(**{**SETTINGS, **more})


class Pages(NamedTuple):
    """Where sequences lie in the pools of all layers, shuffled."""

    window: Tensor
    rows: Rows


class Model:
    """The layers, their caches, and what each left in the last forward pass."""

    def __init__(self, config: Any, **formats: Any) -> None:
        torch.manual_seed(1)
        self.layers, self.caches = [], []
        for number in range(config.num_hidden_layers):
            layer = SharedRowsAttention.from_config(config, number).requires_grad_(False)
            for name, parameter in layer.named_parameters():
                if "norm" in name:
                    torch.nn.init.uniform_(parameter, 0.5, 1.5)
                else:
                    torch.nn.init.normal_(parameter, std=1.0 if name == "sinks" else 0.1)
            sizes = {"pages": 24, "row_pages": 24, "requests": 3, "page_size": 8}
            cache = CompressedCache.allocate(layer.config, **sizes, row_page_size=4, **formats)
            if cache.keys is not None:
                cache.keys.data.fill_(0xFF)  # NaN, wherever no key is
            if cache.state is not None:  # what was there before must not matter
                cache.state.kv.fill_(7.0)
                cache.state.gate.fill_(7.0)
            if layer.config.ratio and not layer.config.writer:
                cache = cache.beside(self.caches[layer.config.source])
            self.layers.append(layer)
            self.caches.append(cache)
        g = torch.Generator().manual_seed(2)
        order = [torch.randperm(24, generator=g).int() for _ in range(2)]
        # The shorter sequence has six pages of rows; entries behind them are never read.
        rows = torch.full((2, 18), -(2**30), dtype=torch.int32)
        rows[0, :17], rows[1, :6] = order[1][:17], order[1][17:23]
        table = order[0][:18].view(2, 9).contiguous()
        self.pages = Pages(table, Rows(rows, torch.tensor([2, 0])))
        self.left: list[Selected] = []

    def __call__(self, xs: list[list[Tensor]], context: list[int]) -> list[list[Tensor]]:
        """[layer][sequence] of hidden states, and of results."""
        new = [len(x) for x in xs[0]]
        batch, selected, found = Batch.of(new, context, self.pages.window), Selected(), []
        self.left = []
        for layer, cache, x in zip(self.layers, self.caches, xs, strict=True):
            out = layer(torch.cat(x), cache, batch, self.pages.rows, selected)
            found.append(list(out.split(new)))
            self.left.append(replace(selected))
        return found

    def window_of(self, number: int, line: int) -> Tensor:
        place = torch.arange(LENGTHS[line])
        pages = self.pages.window[line].long()
        return self.caches[number].window.gather(pages[place // 8] * 8 + place % 8).float()

    def slots(self, number: int, line: int) -> Tensor:
        place = torch.arange(LENGTHS[line] // self.layers[number].config.ratio)
        return self.pages.rows.block_table[line].long()[place // 4] * 4 + place % 4


Hidden = list[list[Tensor]]


def hidden() -> Hidden:
    torch.manual_seed(5)
    count = SETTINGS["num_hidden_layers"]
    return [[torch.randn(n, 64) for n in LENGTHS] for _ in range(count)]


class Run(NamedTuple):
    """Results and lists of both sequences, layer by layer."""

    out: list[list[Tensor]]
    lists: list[list[list[list[int]]]]
    blocks: list[list[list[list[int]] | None]]


def in_parts(model: Model, xs: Hidden, cuts: list[tuple[int, ...]]) -> Run:
    """Whole sequences, a few tokens of each at a time."""
    context = [0, 0]
    out: Any = [[[], []] for _ in model.layers]
    lists: Any = [[[], []] for _ in model.layers]
    blocks: Any = [[[], []] for _ in model.layers]
    for new in cuts:
        starts = zip(context, new, strict=True)
        part = [slice(c, c + n) for c, n in starts]
        given = [[x[at] for x, at in zip(layer, part, strict=True)] for layer in xs]
        found = model(given, context)
        for number, layer in enumerate(model.layers):
            left, first = model.left[number], 0
            for line, n in enumerate(new):
                out[number][line].append(found[number][line])
                for i in range(n) if layer.config.ratio else ():
                    ready = (context[line] + i + 1) // layer.config.ratio
                    row = None if left.rows is None else left.rows[first + i]
                    lists[number][line].append(_places(model, number, line, row, ready))
                    named = None if left.blocks is None else left.blocks[first + i].tolist()
                    blocks[number][line].append(named and [b for b in named if b >= 0])
                first += n
        context = [c + n for c, n in zip(context, new, strict=True)]
    return Run([[torch.cat(x) for x in lines] for lines in out], lists, blocks)


def _places(model: Model, number: int, line: int, row: Tensor | None, ready: int) -> list[int]:
    """What a query's list names, as places in its sequence."""
    if row is None:
        return list(range(ready))
    place = {slot: at for at, slot in enumerate(model.slots(number, line).tolist())}
    return [place[slot] for slot in row.tolist() if slot >= 0]


def judge(model: Model, xs: Hidden, run: Run, row_share: tuple[float, int], window: Any) -> None:
    """Rows, keys, lists, blocks and results of every layer and sequence."""
    for number, layer in enumerate(model.layers):
        config, cache = layer.config, model.caches[number]
        for line, x in enumerate(xs[number]):
            rows, lists = torch.empty(0, config.width), [[] for _ in x]
            if config.ratio:
                slots = model.slots(number, line)
                rows, lists = cache.rows.gather(slots).float(), run.lists[number][line]
            if config.writer:
                made = exact.written_rows(layer, x)
                exact.cached(rows, *row_share)(made.rows)
                values, scale = cache.keys.gather(slots)
                keys = values.float() * scale[:, None]
                exact.cached(keys, *KEY_SHARE[cache.keys.scales])(made.keys)
            if layer.indexer is not None:
                judge_lists(model, number, line, x, lists, run.blocks[number][line])
            stored = exact.cached(model.window_of(number, line), *window)
            expected = exact.shared_rows_layer(layer, x, stored, rows, lists)
            got = run.out[number][line]
            assert (got - expected[: len(got)]).abs().max() <= CLOSE, f"layer {number}"


KEY_SHARE = {"ue8m0": (0.07, 128), "mxfp4": (0.34, 32)}
"""Powers of two as scales: a step is up to twice as wide as it need be."""


def judge_lists(
    model: Model, number: int, line: int, x: Tensor, lists: Any, named: list[list[int] | None]
) -> None:
    """A list has the best of the rows so far, or of those in the candidate blocks; blocks are the
    best, and the last."""
    layer, cache = model.layers[number], model.caches[number]
    config, topk = layer.config, layer.config.topk
    values, scale = cache.keys.gather(model.slots(number, line))
    k = values.double() * scale.double()[:, None]
    residual = layer.q_a_norm(layer.q_a_proj(x))
    q, folded = fold(*layer.indexer.project(x, residual, torch.arange(len(x))))
    for t, found in enumerate(lists):
        ready = (t + 1) // config.ratio
        products = (q[t].double() @ k[:ready].T).relu()
        scores = folded[t].double() @ products
        bound = BOUND * folded[t].double().abs() @ (q[t].double().abs() @ k[:ready].abs().T)
        allowed = list(range(ready))
        if config.within_blocks and named[t] is not None:
            allowed = [row for row in allowed if row // config.block in named[t]]
        chosen = torch.full((topk,), -1)
        at = torch.tensor([allowed.index(row) for row in found], dtype=torch.int64)
        chosen[: len(at)] = at
        assert selection_fits(chosen, scores[allowed], bound[allowed], topk)
        if config.names_blocks and named[t] is not None:
            assert named[t] == best_blocks(scores.tolist(), config.blocks, config.block)


@pytest.mark.parametrize("scales", ["ue8m0", "mxfp4"])
@pytest.mark.parametrize("cuts", CUTS)
def test_equals_the_definition(cuts: str, scales: str) -> None:
    model, xs = Model(settings(), scales=scales), hidden()
    run = in_parts(model, xs, CUTS[cuts])
    judge(model, xs, run, (2**-8, 1), (2**-8, 1))
    inside = [named for named in run.blocks[5][0] if named is not None]
    assert inside and all(len(named) <= 4 for named in inside)
    # A layer reads the list of the last indexer, and its own only if it has one.
    assert run.lists[2] == run.lists[1] != run.lists[3]
    assert run.lists[6] == run.lists[5] != run.lists[4]


FORMATS: dict[str, tuple[dict[str, Any], tuple[float, int], tuple[float, int]]] = {
    "V4.1's own, scales in rows": (
        {"format": "fp8_528_v41", "row_format": "fp4_288", "scales": "mxfp4"},
        (0.2, 16),
        (0.08, 32),
    ),
    "V4.1's own, scales behind rows": (
        {"format": "fp8_528_v41_split", "row_format": "fp4_288_split", "scales": "mxfp4"},
        (0.2, 16),
        (0.08, 32),
    ),
    "V4's, as on Hopper": ({"format": "fp8_584"}, (0.08, 64), (0.08, 64)),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_as_engines_keep_them(kind: str) -> None:
    formats, rows, window = FORMATS[kind]
    model, xs = Model(settings(**WIDE), **formats), hidden()
    judge(model, xs, in_parts(model, xs, [(30, 23), (31, 0)]), rows, window)


def test_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of blocks exist for a bounded number of queries; the cut changes nothing."""
    xs = hidden()
    whole = in_parts(Model(settings()), xs, CUTS["whole"])
    monkeypatch.setattr(shared, "SCORES_LIMIT", 7 * 4 * 72)
    parts = in_parts(Model(settings()), xs, CUTS["whole"])
    assert parts.lists == whole.lists and parts.blocks == whole.blocks


def test_the_cut_of_a_prompt_changes_no_list() -> None:
    """Blocks name every row of a short sequence: None says so, and chooses the same."""
    xs = hidden()
    whole = in_parts(Model(settings()), xs, CUTS["whole"])
    for cuts in ("chunks", "then one by one"):
        run = in_parts(Model(settings()), xs, CUTS[cuts])
        for number in range(7):
            for line, out in enumerate(run.out[number]):
                n = len(out)
                lists = whole.lists[number][line]
                assert run.lists[number][line] == lists[: len(run.lists[number][line])]
                assert (out - whole.out[number][line][:n]).abs().max() <= CLOSE


def test_the_released_sizes() -> None:
    """The 40 layers of DeepSeek-V4.1-Flash: 4 writers, 8 indexers, one that names blocks."""
    released = settings(
        num_hidden_layers=40,
        compress_ratios=[0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
        kv_source_layer_ids=[2, 8, 14, 20],
        index_source_layer_ids=[2, 8, 14, 20, 24, 28, 32, 36],
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        index_topk=512,
    )
    layers = [SharedRowsConfig.of(released, number) for number in range(40)]
    sources = [layer.source for layer in layers]
    assert sources == [-1, -1, *[2] * 6, *[8] * 6, *[14] * 6, *[20] * 20]
    assert [n for n, layer in enumerate(layers) if layer.writer] == [2, 8, 14, 20]
    assert [n for n, layer in enumerate(layers) if layer.names_blocks] == [20]
    assert [n for n, layer in enumerate(layers) if layer.within_blocks] == [24, 28, 32, 36]
    assert (layers[0].rope.theta, layers[0].rope.yarn) == (10000.0, None)
    assert layers[20].rope.theta == 160000.0 and layers[20].rope.amplitude == 1.0
    assert layers[20].eps == 1e-20 and "state" not in layers[20].kept


def one_layer(number: int) -> tuple[SharedRowsAttention, Callable[..., Tensor]]:
    model = Model(settings())
    batch = Batch.of([9], block_table=model.pages.window[:1])
    rows = Rows(model.pages.rows.block_table[:1], torch.tensor([0]))

    def call(**change: Any) -> Tensor:
        given = {"cache": model.caches[number], "batch": batch, "rows": rows} | change
        out: Tensor = model.layers[number](torch.ones(9, 64), **given)
        return out

    return model.layers[number], call


def test_wrong_arguments() -> None:
    reader, call = one_layer(2)
    with pytest.raises(InvalidArgument, match="selected: expected a Selected"):
        call()
    with pytest.raises(InvalidArgument, match="selected: expected rows of layer 1, got an empty"):
        call(selected=Selected())
    with pytest.raises(InvalidArgument, match="rows of layer 1, got one of layer 3"):
        call(selected=Selected(source=3))
    with pytest.raises(InvalidArgument, match="rows: expected the pages of compressed rows"):
        call(rows=None, selected=Selected(source=1))
    window = CompressedCache.allocate(reader.config, pages=24)
    assert window.rows is None
    with pytest.raises(InvalidArgument, match="cache: expected what a layer of ratio 2 keeps"):
        call(cache=window, selected=Selected(source=1))
    reader.requires_grad_(True)
    with pytest.raises(Unsupported, match="gradients of SharedRowsAttention"):
        call(selected=Selected(source=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v4"}, "no layer of shared rows for 'deepseek_v4'"),
        ({"index_head_dim": 64}, "an indexer 64 wide"),
        ({"kv_source_layer_ids": [3, 4]}, "layer 1 of ratio 2, without rows of that ratio"),
        ({"index_source_layer_ids": [3, 4, 5]}, "layer 1, which writes rows and no keys"),
    ],
)
def test_what_is_not_served_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        SharedRowsConfig.of(settings(**change), 1)


def test_there_is_no_such_layer() -> None:
    with pytest.raises(InvalidArgument, match="layer: expected 0 to 6, got 7"):
        SharedRowsConfig.of(settings(), 7)


def test_a_batch_without_tokens() -> None:
    model = Model(settings())
    found = model([[torch.empty(0, 64), torch.empty(0, 64)]] * 7, [0, 0])
    assert all(out.shape == (0, 64) for lines in found for out in lines)
    in_parts(model, hidden(), CUTS["whole"])
    found = model([[torch.empty(0, 64), torch.empty(0, 64)]] * 7, list(LENGTHS))
    assert all(out.shape == (0, 64) for lines in found for out in lines)
