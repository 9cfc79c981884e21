"""Malformed calls: how one is described and how it is judged.

An entry starts from a valid call of tests/calls.py and changes some arguments. It must raise the
error it names, with the argument, what was expected and what came in the message, and before any
work: `out` was filled with a pattern that must still be there, and so must every input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import calls
import openmla
from formula import bits
from openmla import InvalidArgument, LatentCache, OpenMLAError, Problem, Unsupported
from openmla.compat.flash_attn import flash_attn_varlen_func
from openmla.compat.flash_mla import flash_mla_sparse_fwd

Arguments = dict[str, Any]
REMOVED = object()


@dataclass(frozen=True)
class Malformed:
    """One malformed call. `change` gets the valid arguments and returns those to replace."""

    call: str
    argument: str
    expected: str
    got: str
    change: Mapping[str, Any] | Callable[[Arguments], Mapping[str, Any]] = field(repr=False)
    error: type[OpenMLAError] = InvalidArgument

    def __str__(self) -> str:
        return f"{self.call}-{self.argument}-{self.expected}-{self.got}".replace(" ", "_")


def latent_cache() -> Arguments:
    """LatentCache(...): tensors that fit each other."""
    data = torch.zeros(2, 3, 12, dtype=torch.float8_e4m3fn)
    return {
        "data": data,
        "scales": torch.ones(2, 3, 1),
        "latent": 8,
        "rope": 4,
        "format": "fp8_block32",
    }


def problem() -> Arguments:
    """Problem(...)."""
    return {"form": "dense", "heads": 4, "d_nope": 8, "d_rope": 4, "d_v": 6}


def append() -> Arguments:
    """LatentCache.append: also carries the cache itself."""
    return {
        "cache": LatentCache.allocate(num_pages=2, page_size=3, latent=8, rope=4),
        "latent": torch.ones(2, 8),
        "rope": torch.ones(2, 4),
        "slot_mapping": torch.tensor([0, 4]),
    }


def gather() -> Arguments:
    """LatentCache.gather."""
    return {**append(), "rows": torch.tensor([0])}


def dense_cache() -> Arguments:
    """mla_prefill with rope in a cache."""
    call = calls.dense()
    rows = torch.cat([torch.zeros(5, calls.LATENT), call["k_rope"]], dim=1)
    call["k_rope"], call["block_table"] = calls.paged(rows, [2, 3], page_size=2)
    return {**call, "cache_lengths": torch.tensor([2, 3], dtype=torch.int32)}


def sparse_cache() -> Arguments:
    """mla_prefill_sparse over a cache."""
    cache = LatentCache.allocate(num_pages=2, page_size=4, latent=8, rope=4)
    return {**calls.sparse(), "kv": cache}


def attend() -> Arguments:
    """mla_attend: a span of a cache, and a list of plain rows."""
    call, paged = calls.sparse(), calls.latent()
    tokens = torch.zeros(5, dtype=torch.int32)
    span = openmla.Span(paged["cache"], paged["block_table"], tokens, tokens, tokens + 3)
    return {
        "q": call["q"],
        "sources": [span, openmla.Listed(call["kv"], call["indices"])],
        "scale": 0.3,
        "d_v": calls.LATENT,
    }


def _method(name: str) -> Callable[..., Any]:
    def call(cache: LatentCache, **arguments: Any) -> Any:
        used = {"append": ("latent", "rope", "slot_mapping"), "gather": ("rows",)}[name]
        return getattr(cache, name)(**{n: v for n, v in arguments.items() if n in used})

    return call


# name -> (function, valid arguments, width of `out` or 0 when the call takes none)
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments], int]] = {
    "mla_prefill": (openmla.mla_prefill, calls.dense, calls.D_V),
    "mla_prefill+cache": (openmla.mla_prefill, dense_cache, calls.D_V),
    "mla_prefill_latent": (openmla.mla_prefill_latent, calls.latent, calls.LATENT),
    "mla_prefill_sparse": (openmla.mla_prefill_sparse, calls.sparse, calls.LATENT),
    "mla_prefill_sparse+cache": (openmla.mla_prefill_sparse, sparse_cache, calls.LATENT),
    "mla_attend": (openmla.mla_attend, attend, calls.LATENT),
    "merge_states": (openmla.merge_states, calls.merge, 0),
    "merge_many": (openmla.merge_many, calls.merge_many, 0),
    "plan": (openmla.plan, lambda: {"problem": Problem(**problem())}, 0),
    "Problem": (Problem, problem, 0),
    "LatentCache": (LatentCache, latent_cache, 0),
    "allocate": (LatentCache.allocate, lambda: {"num_pages": 2, "page_size": 3}, 0),
    "append": (_method("append"), append, 0),
    "gather": (_method("gather"), gather, 0),
    "flash_mla": (flash_mla_sparse_fwd, calls.flash_mla, calls.LATENT),
    "flash_attn": (flash_attn_varlen_func, calls.flash_attn, 0),
}


def arguments_of(entry: Malformed) -> Arguments:
    """The valid arguments with the entry's change, and an `out` full of a pattern."""
    _, valid, out_width = CALLS[entry.call]
    arguments = valid()
    if out_width:
        arguments["out"] = torch.full((5, calls.HEADS, out_width), 1234.5)
    change = entry.change(arguments) if callable(entry.change) else entry.change
    arguments.update(change)
    return {name: value for name, value in arguments.items() if value is not REMOVED}


def judge(entry: Malformed) -> str:
    """What is wrong with the library's answer; empty when it is right."""
    arguments = arguments_of(entry)
    before = _bytes(arguments)
    try:
        CALLS[entry.call][0](**arguments)
    except OpenMLAError as error:
        message = str(error)
        if type(error) is not entry.error:
            return f"raised {type(error).__name__}: {message}"
        if isinstance(error, InvalidArgument) and error.name != entry.argument:
            return f"named {error.name!r}: {message}"
        missing = [
            part for part in (entry.argument, entry.expected, entry.got) if part not in message
        ]
        if missing:
            return f"{missing} not in: {message}"
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    else:
        return "raised nothing"
    return "" if _bytes(arguments) == before else "raised, but had written already"


def _bytes(arguments: Arguments) -> dict[str, bytes]:
    """Every byte of every CPU tensor, caches included, so that a write cannot hide."""
    tensors: dict[str, Any] = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, LatentCache):
            tensors[name], tensors[f"{name}.scales"] = value.data, value.scales
    return {
        name: bits(value.detach()).numpy().tobytes()
        for name, value in tensors.items()
        if isinstance(value, Tensor)
        and value.device.type == "cpu"
        and not value.is_nested
        and value.layout == torch.strided
    }


__all__ = ["CALLS", "REMOVED", "Malformed", "Unsupported", "arguments_of", "judge"]
