"""FlashMLA calls of vLLM's DeepSeek-V4 layer, run again through openmla.compat on any device.

`v4_calls.pt` holds the calls of every kind of layer (window alone, ratio 4, ratio 128) in steps
that decode, prefill, verify drafted tokens or draft a block: arguments by name, lists and lengths
as they came, and what type, shape and strides other tensors have. It was made by
tests/vllm_engine/v4_recording.py with vLLM 0.32's own layer and metadata builders.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import calls
import formula
from openmla import LatentCache
from openmla.compat import flash_mla

CALLS = Path(__file__).with_name("v4_calls.pt")
STEPS: dict[str, list[dict[str, Any]]] = torch.load(CALLS, weights_only=True)
PER_CALL = ("out", "q", "attn_sink")
NAN_BYTE = 0xFF  # e4m3, bf16 and ue8m0: NaN in all three


@dataclass(frozen=True)
class Replayed:
    """One call with drawn queries and rows, and what it must give."""

    name: str
    arguments: dict[str, Any]
    want: formula.Expected

    def run(self) -> tuple[Tensor, ...]:
        """What openmla's function of that name returns."""
        return tuple(getattr(flash_mla, self.name)(**self.arguments))


def replayed(step: str, device: str = "cpu") -> list[Replayed]:
    """The calls of a step."""
    return [_drawn(call, device) for call in STEPS[step]]


def _drawn(call: dict[str, Any], device: str) -> Replayed:
    """Memory that no list names holds NaN, as do results before the call."""
    drawn = {name: value for name, value in call.items() if name != "name"}
    for seed, name in enumerate(PER_CALL):
        drawn[name] = _strided(drawn[name], torch.nan if name == "out" else seed)
    if "kv" in call:
        lists = [_named(call["indices"], call["topk_length"])]
        drawn["kv"] = _strided(call["kv"], torch.nan)
        rows = drawn["kv"][:, 0]
        there = _all_of(lists[0])
        rows[there] = calls.numbers(len(there), rows.shape[1], seed=5, dtype=rows.dtype)
        sources, scale = [rows], call["sm_scale"]
    else:
        lists = [_named(call["indices"], call["topk_length"])]
        drawn["k_cache"], sources = _pages(call["k_cache"], lists[0], seed=5)
        if call["extra_k_cache"] is not None:
            lists.append(_named(call["extra_indices_in_kvcache"], call["extra_topk_length"]))
            drawn["extra_k_cache"], more = _pages(call["extra_k_cache"], lists[1], seed=6)
            sources += more
        scale = call["softmax_scale"]
        # vLLM passes an object that FlashMLA makes and fills.
        drawn["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
    q = drawn["q"].flatten(0, -3)
    both = [first + second for first, second in zip(lists[0], _after(sources, lists), strict=True)]
    want = formula.listed(q, torch.cat(sources), both, 512, scale, drawn["attn_sink"])
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in drawn.items()}
    for name, value in drawn.items():  # a copy to a device makes tensors dense
        if isinstance(value, Tensor) and not value.is_contiguous():
            moved[name] = _with_gaps(value, device)
    return Replayed(call["name"], moved, want)


def _named(indices: Tensor, lengths: Tensor) -> list[list[int]]:
    """The rows that count for each token."""
    lines = zip(indices.flatten(0, 1).tolist(), lengths.tolist(), strict=True)
    return [[row for row in line[:length] if row >= 0] for line, length in lines]


def _after(sources: list[Tensor], lists: list[list[list[int]]]) -> list[list[int]]:
    """The second lists, their rows numbered after those of the first source."""
    if len(lists) == 1:
        return [[] for _ in lists[0]]
    return [[len(sources[0]) + row for row in line] for line in lists[1]]


def _all_of(lists: list[list[int]]) -> Tensor:
    """Every row that a list names, once."""
    return torch.tensor(sorted({row for line in lists for row in line}), dtype=torch.long)


def _strided(like: dict[str, Any], fill: float) -> Tensor:
    """A tensor of that type, shape and strides: drawn with a seed, or full of NaN."""
    made = torch.empty_strided(like["shape"], like["stride"], dtype=like["dtype"])
    if fill != fill:
        return made.fill_(fill)
    return made.copy_(calls.numbers(*like["shape"], seed=int(fill), dtype=like["dtype"]))


def _with_gaps(value: Tensor, device: str) -> Tensor:
    """The same bytes with the same strides on a device, and NaN between them."""
    whole = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    whole.copy_(torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage()))
    return whole.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())


def _pages(like: dict[str, Any], lists: list[list[int]], seed: int) -> tuple[Tensor, list[Tensor]]:
    """A pool of pages as vLLM has it, with drawn rows where a list names them, and their values."""
    pages, rows = like["shape"][:2]
    pool = torch.full((pages, like["stride"][0]), NAN_BYTE, dtype=torch.uint8)
    cache = LatentCache.from_pages(pool, page_size=rows, format="fp8_584")
    there = _all_of(lists)
    cache.append(calls.numbers(len(there), 512, seed=seed, dtype=torch.bfloat16), None, there)
    return pool.as_strided(like["shape"], like["stride"]), [cache.gather(torch.arange(cache.rows))]
