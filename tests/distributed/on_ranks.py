"""What runs on every rank. Rank 0 to world-1 make the same batch, and keep their rows of it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import calls
import openmla
from openmla import LatentCache
from openmla.distributed import (
    agreement,
    gather,
    gather_latent,
    local_indices,
    merge_over_ranks,
    prefill,
    prefill_latent,
    prefill_sparse,
    send_latent,
    split,
)

HEADS, NOPE, V = 4, 16, 24
SCALE = (NOPE + 64) ** -0.5
PAGE = 8


@dataclass(frozen=True)
class Batch:
    """All tokens of all sequences, cached ones included, and what each rank computes with."""

    lengths: tuple[int, ...] = (70, 0, 3, 1, 129)
    cached: tuple[int, ...] = ()
    """Keys of every sequence that are cached; none when empty."""
    dtype: torch.dtype = torch.bfloat16
    latent: int = 512
    rope: int = 64
    seed: int = 1

    @property
    def keys(self) -> list[int]:
        """Tokens of every sequence."""
        return [a + b for a, b in zip(self.prefixes, self.lengths, strict=True)]

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Cached keys of every sequence."""
        return self.cached or (0,) * len(self.lengths)

    def numbers(self, number: int, *shape: int) -> Tensor:
        """The same on every rank; `number` tells tensors apart."""
        generator = torch.Generator().manual_seed(100 * self.seed + number)
        return torch.randn(shape, generator=generator).to(self.dtype)

    def rows(self) -> Tensor:
        """Latent rows of all tokens."""
        return self.numbers(0, sum(self.keys), self.latent + self.rope)

    def new(self) -> Tensor:
        """Which of all tokens are new, in the order of the batch."""
        starts = [sum(self.keys[:i]) + self.prefixes[i] for i in range(len(self.keys))]
        pairs = zip(starts, self.lengths, strict=True)
        return torch.cat([torch.arange(start, start + n) for start, n in pairs])

    def queries(self) -> Tensor:
        """MHA form, new tokens."""
        return self.numbers(1, sum(self.lengths), HEADS, NOPE + self.rope)

    def absorbed(self) -> Tensor:
        """Latent form, new tokens; small enough for a softmax that is not one-hot."""
        return self.numbers(2, sum(self.lengths), HEADS, self.latent + self.rope) / 4

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A projection in float64, so that a row's bits do not depend on how many there are."""
        weight = self.numbers(3, self.latent, HEADS * (NOPE + V)).double() * self.latent**-0.5
        kv = (rows.double() @ weight).to(self.dtype).view(-1, HEADS, NOPE + V)
        return kv[..., :NOPE], kv[..., NOPE:]

    def weight(self) -> Tensor:
        """What `expand` multiplies rows by, for whoever wants its gradient."""
        return self.numbers(3, self.latent, HEADS * (NOPE + V)) * self.latent**-0.5

    def lists(self, topk: int = 16) -> Tensor:
        """Rows that each new token selects: any of its batch, none, or the same twice."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (sum(self.lengths), topk)
        found = torch.randint(-2, sum(self.keys), shape, generator=generator, dtype=torch.int32)
        found[5] = -1
        return found

    def cache(self, format: str) -> tuple[LatentCache, Tensor]:
        """A cache that holds the cached prefixes, pages handed out from the last one down."""
        pages = [-(-n // PAGE) for n in self.keys]
        order = iter(reversed(range(sum(pages) + 2)))
        table = torch.full((len(pages), max(pages) + 1), 10**6, dtype=torch.int32)
        for row, count in zip(table, pages, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
        cache = LatentCache.allocate(
            num_pages=sum(pages) + 2,
            page_size=PAGE,
            latent=self.latent,
            rope=self.rope,
            format=format,
        )
        old = torch.ones(sum(self.keys), dtype=torch.bool)
        old[self.new()] = False
        self.append(cache, table, old.nonzero()[:, 0])
        return cache, table

    def append(self, cache: LatentCache, table: Tensor, tokens: Tensor) -> None:
        """Write tokens of the batch into their pages, as one process would."""
        rows = self.rows()[tokens]
        cache.append(rows[:, : self.latent], rows[:, self.latent :], self.slots(table)[tokens])

    def slots(self, table: Tensor) -> Tensor:
        """Physical rows of all tokens."""
        found = [
            int(table[s, p // PAGE]) * PAGE + p % PAGE
            for s, count in enumerate(self.keys)
            for p in range(count)
        ]
        return torch.tensor(found)


def gathered(rank: int, world: int, layout: Any, kind: str, wait: bool) -> Tensor:
    """The batch's rows as bytes, from their shards."""
    batch = Batch()
    rows = batch.rows()
    if kind == "e4m3":
        rows = rows.to(torch.float8_e4m3fn)
    if kind == "bytes":
        rows = rows.view(torch.uint8)[:, :656]
    shard = split(batch.lengths, world, rank, layout)
    local = rows.view(torch.uint8)[shard.rows()].view(rows.dtype)
    if kind == "negative bit":
        local = torch._neg_view(-local)  # the same numbers
    if wait:
        got = gather_latent(local, shard)
    else:
        got = gather_latent(local, shard, async_op=True).rows()
    assert got.dtype == rows.dtype
    return got.view(torch.uint8)


def batch_for(format: str) -> Batch:
    """A batch with a prefix, of a width that the cache format has."""
    latent, rope = calls.widths_of(format)
    return Batch(cached=(3, 0, 8, 21, 0), latent=latent, rope=rope)


def gathered_to_pages(rank: int, world: int, format: str) -> dict[str, Tensor]:
    """A cache with a prefix, after the new rows of all ranks have come."""
    batch = batch_for(format)
    cache, table = batch.cache(format)
    shard = split(batch.lengths, world, rank, cached=batch.cached)
    latent, rope = batch.rows()[batch.new()][shard.rows()].split([cache.latent, cache.rope], dim=1)
    going = send_latent(latent, rope, shard, cache=cache, block_table=table)
    values = going.rows()
    stored = {"data": cache.data.view(torch.uint8), "values": values}
    return stored if cache.scales is None else {**stored, "scales": cache.scales}


def attended(rank: int, world: int, form: str, batch: Batch, layout: Any, how: dict[str, Any]):
    """(rows of the batch, out, lse) of this rank. `how`: cache format, early, overlap, sink."""
    shard = split(batch.lengths, world, rank, layout, cached=batch.prefixes)
    mine = shard.rows()
    rows = batch.rows()[batch.new()][mine]
    given: list[Any] = [rows[:, : batch.latent], rows[:, batch.latent :]]
    options: dict[str, Any] = {"return_lse": True, "scale": SCALE}
    places: dict[str, Any] = {}
    if "format" in how:
        cache, table = batch.cache(how["format"])
        places = {"cache": cache, "block_table": table}
    if "sink" in how:
        options["sink"] = torch.full((HEADS,), how["sink"])
    if "early" in how:
        given = [send_latent(*given, shard, **places), None]
        places = {}
    if form == "dense":
        q = batch.queries()[mine]
        overlap = how.get("overlap", False)
        out, lse = prefill(q, *given, batch.expand, shard, overlap=overlap, **places, **options)
    elif form == "latent":
        out, lse = prefill_latent(batch.absorbed()[mine], *given, shard, **places, **options)
    else:
        lists = batch.lists()[mine]
        if "format" in how:
            lists = torch.where(lists < 0, -1, batch.slots(table)[lists.long()].int())
        q = batch.absorbed()[mine]
        out, lse = prefill_sparse(q, *given, lists, shard, **places, **options)
    return mine, out, lse


def attended_in_a_mesh(rank: int, world: int, batch: Batch):
    """2 x 2 ranks: sequences over one dimension, heads over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    group, half = mesh["context"].get_group(), mesh["heads"].get_local_rank() * HEADS // 2
    heads = slice(half, half + HEADS // 2)
    shard = split(batch.lengths, 2, mesh["context"].get_local_rank())
    rows = batch.rows()[shard.rows()]

    def expand(latent: Tensor) -> tuple[Tensor, Tensor]:
        k_nope, v = batch.expand(latent)
        return k_nope[:, heads], v[:, heads]

    q = batch.queries()[shard.rows()][:, heads].contiguous()
    out, lse = prefill(
        q, rows[:, :512], rows[:, 512:], expand, shard, group, scale=SCALE, return_lse=True
    )
    return shard.rows(), heads, out, lse


def merged(rank: int, world: int, batch: Batch):
    """(part, its lse, the whole, its lse): sparse attention over a pool sharded by rows."""
    rows = batch.rows()
    first, last = (rows.shape[0] * r // world for r in (rank, rank + 1))
    part = openmla.mla_prefill_sparse(
        batch.absorbed(),
        rows[first:last],
        local_indices(batch.lists(), first, last),
        scale=SCALE,
        return_lse=True,
    )
    whole = merge_over_ranks(*part)
    # Views with the negative bit: the same numbers.
    again = merge_over_ranks(*(torch._neg_view(-x) for x in part))
    assert whole[0].equal(again[0]) and whole[1].equal(again[1])
    return *part, *whole


def no_queries_merged(rank: int, world: int) -> tuple[Tensor, Tensor]:
    return merge_over_ranks(torch.zeros(0, 2, 4), torch.zeros(0, 2))


def errors(rank: int, world: int, mistake: str) -> tuple[str, str]:
    """The error of this rank where the last one makes a mistake, and then a call that works."""
    wrong = rank == world - 1
    batch = Batch(lengths=(9, 5, 7))
    lengths = (9, 6, 7) if wrong and mistake == "lengths" else batch.lengths
    lengths = (*lengths, 4) if wrong and mistake == "sequences" else lengths
    cached = (0, 1, 0) if wrong and mistake == "cached" else None
    layout = "contiguous" if wrong and mistake == "layout" else "zigzag"
    shard = split(lengths, world, rank, layout, cached=cached)  # type: ignore[arg-type]
    rows = torch.zeros(shard.tokens, 576, dtype=torch.bfloat16)
    places: dict[str, Any] = {}
    if wrong and mistake == "dtype":
        rows = rows.half()
    if wrong and mistake == "width":
        rows = rows[:, :544]
    if wrong and mistake == "own rows":
        rows = rows[1:]
    if wrong and mistake == "rank":
        shard = split(lengths, world, 0)
    if mistake in ("format", "cached", "pages"):
        format = "fp8_block64" if wrong and mistake == "format" else "fp8_656"
        cache = LatentCache.allocate(num_pages=12, page_size=4, format=format)
        table = torch.arange(12, dtype=torch.int32).view(3, 4)
        table[2, 0] += 12 * (wrong and mistake == "pages")
        places = {"cache": cache, "block_table": table}
    said = kind = ""
    try:
        if wrong and mistake == "call":
            gather_latent(rows, shard)
        else:
            send_latent(rows[:, :512], rows[:, 512:], shard, **places).rows()
    except openmla.OpenMLAError as error:
        kind, said = type(error).__name__, str(error)
    fine = split(batch.lengths, world, rank)
    assert gather_latent(batch.rows()[fine.rows()], fine).equal(batch.rows())
    return kind, said


def outlived(rank: int, world: int, how: str) -> tuple[str, str, float]:
    """What the others are told, and when, if the last rank dies or never makes the call."""
    batch, group = Batch(), dist.new_group(timeout=timedelta(seconds=4))
    shard = split(batch.lengths, world, rank)
    local = batch.rows()[shard.rows()]
    gather_latent(local, shard, group)
    if rank == world - 1:
        if how == "dies":
            os._exit(3)
        time.sleep(7)
        return "", "", 0.0
    started = time.monotonic()
    try:
        gather_latent(local, shard, group, verify=how == "is late")
    except openmla.OpenMLAError as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", time.monotonic() - started


def received_bytes(rank: int, world: int, lengths: tuple[int, ...]) -> list[int]:
    """Bytes from other ranks in each collective of one gather_latent."""
    counted: list[int] = []

    def counting(call: str, got: Tensor, sent: Tensor, group: Any) -> Any:
        counted.append(got.nbytes - sent.nbytes)
        return agreement.all_gather(call, got, sent, group)

    gather.all_gather = counting
    try:
        shard = split(lengths, world, rank)
        gather_latent(torch.zeros(shard.tokens, 576, dtype=torch.bfloat16), shard)
    finally:
        gather.all_gather = agreement.all_gather
    return counted


def differentiated(rank: int, world: int, batch: Batch, layout: Any, how: dict[str, Any]):
    """Gradients of this rank's rows, by name, and its parts of those that all ranks share.

    The loss weighs every element of out and lse of the batch by a number of its own. `how`:
    overlap, early, sink, frozen (names of what needs no gradient).
    """
    shard = split(batch.lengths, world, rank, layout)
    mine = shard.rows()
    rows, frozen = batch.rows(), how.get("frozen", ())
    given = {
        "q": batch.queries()[mine],
        "latent": rows[mine, : batch.latent],
        "rope": rows[mine, batch.latent :],
        "weight": batch.weight(),
        "sink": torch.full((HEADS,), 0.5) if "sink" in how else None,
    }
    leaves = {
        name: x.clone().requires_grad_(name not in frozen)
        for name, x in given.items()
        if x is not None
    }

    def expand(latent: Tensor) -> tuple[Tensor, Tensor]:
        kv = (latent @ leaves["weight"]).view(-1, HEADS, NOPE + V)
        return kv[..., :NOPE], kv[..., NOPE:]

    sent: list[Any] = [leaves["latent"], leaves["rope"]]
    if "early" in how:
        sent = [send_latent(*sent, shard), None]
    out, lse = prefill(
        leaves["q"],
        *sent,
        expand,
        shard,
        overlap=how.get("overlap", False),
        sink=leaves.get("sink"),
        scale=SCALE,
        return_lse=True,
    )
    by_out = batch.numbers(5, sum(batch.lengths), HEADS, V)[mine]
    by_lse = batch.numbers(6, sum(batch.lengths), HEADS)[mine].float()
    ((out * by_out).sum() + (lse * by_lse).sum()).backward()
    return mine, {name: leaf.grad for name, leaf in leaves.items() if leaf.requires_grad}


def gathered_gradients(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Gradients of rows gathered by themselves, where rank r counts row t (r + 1) * t times."""
    shard = split((7, 4), world, rank)
    local = torch.zeros(shard.tokens, 2, requires_grad=True)
    counts = (rank + 1) * torch.arange(11.0)[:, None]
    (gather_latent(local, shard) * counts).sum().backward()
    return shard.rows(), local.grad


def lone_gradients(rank: int, world: int) -> str:
    """What all ranks are told where the rows of one need gradients and those of others do not."""
    shard = split((6,), world, rank)
    local = torch.zeros(shard.tokens, 2, requires_grad=rank == 1)
    try:
        gather_latent(local, shard)
    except openmla.InvalidArgument as error:
        return str(error)
    return ""
