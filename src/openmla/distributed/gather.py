"""Gathering latent rows: every rank sends its own, and all get all of them in sequence order.

A latent row is 576 numbers where K and V of 128 heads are 40960, so rows travel and every rank
expands them by itself. They travel as they are: bf16, or the bytes of an FP8 format, quantized once
by the rank that has them, so all ranks hold the same bits.

Rows that require gradients are gathered in one collective, and their gradients come back in another
(openmla.distributed.gradients): every rank must then go backwards, also one without tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openmla import checks
from openmla.cache import LatentCache, check_rows
from openmla.distributed.agreement import (
    Facts,
    Group,
    all_gather,
    check_group,
    check_together,
    loud,
)
from openmla.distributed.gradients import give_back
from openmla.distributed.indexes import (
    Arrival,
    arrival,
    fresh_table,
    key_places,
    key_rows,
    new_tokens,
    slots_of,
)
from openmla.distributed.shard import ContextShard, Part
from openmla.errors import InvalidArgument
from openmla.formats import FormatName

ROW_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.uint8,
)
Check = Callable[[], object]
PAGE_ROWS = 64
"""Rows per page where the caller has no cache: what every latent kernel reads in whole tiles."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Gathered rows in a tensor of their own: [all tokens, width], in sequence order."""

    rows: Tensor

    def put(self, numbers: Tensor, rows: Tensor) -> None:
        """Rows `numbers` of the batch have arrived."""
        _bytes(self.rows).index_copy_(0, numbers, rows)

    def keys(self, parts: tuple[Part, ...], shard: ContextShard) -> Tensor:
        """The keys of parts, one part after the other."""
        return self.rows[key_rows(parts, shard.offsets, self.rows.device)]


@dataclass(frozen=True, eq=False)
class Pages:
    """Gathered rows in the pages of a cache, beside the prefix that was there before."""

    cache: LatentCache
    block_table: Tensor
    slots: Tensor
    """Where each new token of the batch goes."""

    def put(self, numbers: Tensor, rows: Tensor) -> None:
        """Rows `numbers` of the batch have arrived, in the bytes of the cache's format."""
        slots, cache = self.slots[numbers], self.cache
        page, offset = slots // cache.page_size, slots % cache.page_size
        if cache.scales is None:
            cache.data[page, offset] = rows
            return
        data = cache.data.shape[2]
        cache.data.view(torch.uint8)[page, offset] = rows[:, :data]
        scales = rows[:, data:].clone(memory_format=torch.contiguous_format)
        cache.scales[page, offset] = scales.view(cache.scales.dtype)

    def keys(self, parts: tuple[Part, ...], shard: ContextShard) -> Tensor:
        """The keys of parts as bf16 values, one part after the other, prefixes included."""
        where = key_places(parts, self.cache.device)
        return self.cache.gather(slots_of(self.block_table, self.cache.page_size, *where))


@dataclass(eq=False)
class Gathering:
    """Rows on their way to every rank, one collective per wave."""

    shard: ContextShard
    """Which tokens this rank has."""
    destination: Rows | Pages
    """Where rows are written when they arrive."""
    latent: int
    """Columns of a row before rope."""
    group: Group = None
    """The ranks that share the sequences; None is torch's default group."""
    call: str = "gather_latent"
    """The user's call, which errors name."""
    _pending: list[tuple[Arrival, Any, Tensor, Tensor]] = field(default_factory=list)

    def start(self, sent: Tensor, wave: int | None) -> None:
        """Begin to send one wave of this rank's rows, or all of them in one collective.

        Args:
            sent: [shard.tokens, width], this rank's rows in the order of `shard.rows()`, in the
                dtype or the bytes that the destination keeps.
            wave: which wave of the shard; all of them if None.

        Raises:
            PeerLost: another rank has ended, or did not make this call within the group's timeout.
        """
        due = arrival(self.shard, wave, sent.device)
        own = sent[due.local].resolve_neg()
        if self.shard.world == 1 or not due.most:
            self._pending.append((due, None, own, own))
            return
        if own.shape[0] < due.most or not own.is_contiguous():
            own = own.new_zeros(due.most, own.shape[1])
            own[: due.local.stop - due.local.start] = sent[due.local]
        got = own.new_empty(self.shard.world * due.most, own.shape[1])
        work = all_gather(self.call, got, own, self.group)
        self._pending.append((due, work, own, got))  # `own` must live until it is sent

    def wait(self, waves: int | None = None) -> Rows | Pages:
        """Where the rows are, once the first `waves` of them (or all) have arrived.

        Args:
            waves: how many waves to wait for, counted from the first; all if None.

        Raises:
            PeerLost: another rank has ended, or did not make this call within the group's timeout.
        """
        keep = 0 if waves is None else max(len(self.shard.waves) - waves, 0)
        while len(self._pending) > keep:
            due, work, _, got = self._pending.pop(0)
            if work is not None:
                with loud(self.call, self.group):
                    work.wait()
            if due.places is not None:
                got = got.index_select(0, due.places)
            self.destination.put(due.rows, got)
        return self.destination

    def rows(self) -> Tensor:
        """All rows in sequence order: [all tokens, width].

        Raises:
            PeerLost: another rank has ended, or did not make this call within the group's timeout.
        """
        done = self.wait()
        if isinstance(done, Pages):
            return done.cache.gather(done.slots)
        return done.rows


class _Gathered(torch.autograd.Function):
    """Rows of all ranks, of this rank's, whose gradients are the sums of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: ContextShard, group: Group, call: str) -> Tensor:
        """[shard.tokens, width] -> [all tokens, width] in sequence order."""
        ctx.call = shard, group, call
        rows = local.new_empty(sum(shard.lengths), local.shape[1])
        going = Gathering(shard, Rows(rows), local.shape[1], group, call)
        going.start(local, None)
        return going.rows()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, None, None, None]:
        """On all ranks together."""
        return give_back(d_rows, *ctx.call), None, None, None


def _differentiable(local: Tensor, shard: ContextShard, group: Group, call: str) -> Tensor:
    """Rows of all ranks, here already, through which autograd can go back."""
    function: Any = _Gathered
    rows: Tensor = function.apply(local, shard, group, call)
    return rows


@overload
def gather_latent(
    local: Tensor,
    shard: ContextShard,
    group: Group = ...,
    *,
    async_op: Literal[False] = ...,
    verify: bool = ...,
) -> Tensor: ...
@overload
def gather_latent(
    local: Tensor,
    shard: ContextShard,
    group: Group = ...,
    *,
    async_op: Literal[True],
    verify: bool = ...,
) -> Gathering: ...
def gather_latent(
    local: Tensor,
    shard: ContextShard,
    group: Group = None,
    *,
    async_op: bool = False,
    verify: bool = True,
) -> Tensor | Gathering:
    """Rows of every rank, all tokens of the batch in sequence order: [all tokens, width].

    Bit for bit, in one collective. With `async_op` there is one per wave, and the result is a
    `Gathering`: `rows()` waits. Without it, rows that require gradients have them.

    Args:
        local: [shard.tokens, width], this rank's rows in the order of `shard.rows()`: bf16, fp16,
            fp32, e4m3, or uint8 for the bytes of any other format.
        shard: which tokens this rank has, as `split` made it.
        group: the ranks that share the sequences; None is torch's default group.
        async_op: return at once, with a `Gathering` of rows on their way.
        verify: check first that all ranks agree, which waits for the GPU; False on all ranks or on
            none.

    Raises:
        InvalidArgument: an argument is wrong, or ranks disagree; the message names it.
        Unsupported: rows require gradients beside async_op, or have a tangent of forward mode.
        PeerLost: another rank has ended, or did not make this call within the group's timeout.
    """

    def facts() -> Facts:
        checks.tensor("local", local, (shard.tokens, "width"), ROW_DTYPES)
        checks.no_tangents(local=local)
        if async_op:
            checks.no_gradients(local=local)
        kind = {"dtype": str(local.dtype), "gradients": checks.needs_gradients(local)}
        return {"width": local.shape[1], "async_op": async_op, **kind}

    _check("gather_latent", shard, group, facts, verify)
    if checks.needs_gradients(local):
        return _differentiable(local, shard, group, "gather_latent")
    rows = local.new_empty(sum(shard.lengths), local.shape[1])
    going = Gathering(shard, Rows(rows), local.shape[1], group)
    for wave in range(len(shard.waves)) if async_op else (None,):
        going.start(_bytes(local), wave)
    return going if async_op else going.rows()


def send_latent(
    latent: Tensor,
    rope: Tensor | None,
    shard: ContextShard,
    group: Group = None,
    *,
    cache: LatentCache | None = None,
    block_table: Tensor | None = None,
    verify: bool = True,
) -> Gathering:
    """Start to send this rank's rows; `prefill` takes the result in place of `latent`.

    What is computed between the two calls, such as the queries, hides the time the rows take. With
    a `cache`, rows travel in its format and go into its pages.

    Args:
        latent: [shard.tokens, latent], bf16, fp16 or fp32, this rank's rows in the order of
            `shard.rows()`.
        rope: [shard.tokens, rope] in the dtype of latent, their rope part; None without one.
        shard: which tokens this rank has, as `split` made it.
        group: the ranks that share the sequences; None is torch's default group.
        cache: a LatentCache whose pages get the rows of all ranks; if None, a tensor of their own.
        block_table: int32 [sequences, max_pages]: position p of sequence s, cached prefix included,
            goes to page block_table[s, p // page_size]; only with a cache.
        verify: check first that all ranks agree, which waits for the GPU; False on all ranks or on
            none.

    Raises:
        InvalidArgument: an argument is wrong, or ranks disagree; the message names it.
        Unsupported: rows require gradients beside a cache, or have a tangent of forward mode.
        PeerLost: another rank has ended, or did not make this call within the group's timeout.
    """
    given = Given(latent, rope, cache, block_table)
    return start_sending("send_latent", given, shard, group, verify)


@dataclass(frozen=True, eq=False)
class Given:
    """This rank's rows, and where those of all ranks are to go."""

    latent: Tensor
    rope: Tensor | None
    cache: LatentCache | None
    block_table: Tensor | None
    paged: bool = False
    """Whether they are to be in pages even if there is no cache."""

    def facts(self, shard: ContextShard) -> Facts:
        """Check what this rank was given; what must be the same on all ranks."""
        dtypes = ROW_DTYPES[:1] if self.paged and self.cache is None else ROW_DTYPES[:3]
        latent = checks.tensor("latent", self.latent, (shard.tokens, "latent"), dtypes)
        rope = self.rope
        if rope is not None:
            shape = (shard.tokens, "rope")
            rope = checks.tensor("rope", rope, shape, (latent.dtype,), latent.device)
        checks.no_tangents(latent=latent, rope=rope)
        if self.paged or self.cache is not None:  # a cache carries no gradient
            checks.no_gradients(latent=latent, rope=rope)
        widths = latent.shape[1], 0 if rope is None else rope.shape[1]
        if self.cache is None:
            if self.block_table is not None:
                raise InvalidArgument("block_table", "None without a cache", "a tensor")
            if any(shard.cached):
                raise InvalidArgument("cache", "the one that holds the cached prefix", "None")
        else:
            _check_pages(self.cache, self.block_table, shard, latent, widths)
        stored = "none" if self.cache is None else self.cache.format
        width = f"{widths[0]} + {widths[1]}"
        gradients = checks.needs_gradients(latent, rope)
        kind = {"dtype": str(latent.dtype), "gradients": gradients}
        return {"width": width, "cache": stored, **kind}

    def start(self, shard: ContextShard, group: Group, call: str) -> Gathering:
        """Send the rows, wave by wave."""
        rows = self.latent
        if self.rope is not None:
            rows = torch.cat([rows, self.rope], dim=1)
        if checks.needs_gradients(rows):
            whole = _differentiable(rows, shard, group, call)
            return Gathering(shard, Rows(whole), self.latent.shape[1], group, call)
        cache, table = self.cache, self.block_table
        if cache is None and self.paged:
            cache, table = _cache_for(shard, self.latent, rows.shape[1])
        destination: Rows | Pages
        if cache is None or table is None:
            destination = Rows(rows.new_empty(sum(shard.lengths), rows.shape[1]))
        else:
            slots = slots_of(table, cache.page_size, *new_tokens(shard, rows.device))
            destination, rows = Pages(cache, table, slots), _stored(rows, cache)
        going = Gathering(shard, destination, self.latent.shape[1], group, call)
        for wave in range(len(shard.waves)):
            going.start(rows, wave)
        return going


def start_sending(
    call: str,
    given: Given,
    shard: ContextShard,
    group: Group,
    verify: bool,
    also: Check = lambda: None,
) -> Gathering:
    """Check on all ranks together (`also` what else the caller was given), then send."""

    def facts() -> Facts:
        also()
        return given.facts(shard)

    _check(call, shard, group, facts, verify)
    return given.start(shard, group, call)


def _check(
    call: str, shard: ContextShard, group: Group, facts: Callable[[], Facts], verify: bool
) -> None:
    """This rank's own checks, and those of the others unless they are known to agree."""

    def everything() -> Facts:
        check_group(group, shard.world, shard.rank)
        batch = {"lengths": shard.lengths, "cached": shard.cached, "layout": shard.layout}
        return {"world": shard.world, **batch, **facts()}

    if not isinstance(shard, ContextShard):
        raise InvalidArgument("shard", "a ContextShard, as split makes it", type(shard).__name__)
    if checks.flag("verify", verify):
        check_together(call, group, shard.world, everything)
    else:
        everything()


def _check_pages(
    cache: LatentCache,
    block_table: Tensor | None,
    shard: ContextShard,
    latent: Tensor,
    widths: tuple[int, int],
) -> None:
    """A cache must take these rows, and its block table must have a page for each."""
    if not isinstance(cache, LatentCache):
        raise InvalidArgument("cache", "a LatentCache", type(cache).__name__)
    checks.on_device("cache", cache, latent.device)
    if (cache.latent, cache.rope) != widths:
        expected = f"{widths[0]} + {widths[1]} columns, as latent and rope have"
        raise InvalidArgument("cache", expected, f"{cache.latent} + {cache.rope}")
    batch = len(shard.lengths)
    table = checks.tensor(
        "block_table", block_table, (batch, "max_pages"), (torch.int32,), latent.device
    )
    longest = max((a + b for a, b in zip(shard.cached, shard.lengths, strict=True)), default=0)
    if table.shape[1] * cache.page_size < longest:
        expected = f"pages for {longest} keys, of {cache.page_size} rows each"
        raise InvalidArgument("block_table", expected, f"{table.shape[1]} pages")
    if table.device.type == "cpu":  # a GPU would have to be waited for
        slots = slots_of(table, cache.page_size, *new_tokens(shard, table.device))
        check_rows("block_table", slots, cache.rows)


def _stored(rows: Tensor, cache: LatentCache) -> Tensor:
    """Rows as the cache keeps them: bf16, or bytes with the scales at the end."""
    tokens = rows.shape[0]
    if not cache.layout.quantized:
        return rows.to(torch.bfloat16)
    page = LatentCache.allocate(
        num_pages=1,
        page_size=max(tokens, 1),
        latent=cache.latent,
        rope=cache.rope,
        format=cast(FormatName, cache.format),
        device=rows.device,
    )
    slots = torch.arange(tokens, device=rows.device)
    page.append(rows[:, : cache.latent], rows[:, cache.latent :], slots)
    parts = [page.data[0, :tokens]]
    if page.scales is not None:
        parts.append(page.scales[0, :tokens])
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def _cache_for(shard: ContextShard, latent: Tensor, width: int) -> tuple[LatentCache, Tensor]:
    """bf16 pages for every new token, and their block table."""
    pages = tuple(-(-length // PAGE_ROWS) for length in shard.lengths)
    cache = LatentCache.allocate(
        num_pages=sum(pages),
        page_size=PAGE_ROWS,
        latent=latent.shape[1],
        rope=width - latent.shape[1],
        device=latent.device,
    )
    return cache, fresh_table(pages, latent.device)


def _bytes(rows: Tensor) -> Tensor:
    """FP8 as plain bytes: not every operation knows FP8."""
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows
