"""`MLAAttention`: Multi-head Latent Attention, from hidden states to hidden states.

A token's hidden state x becomes, for every head, a query of a nope and a rope part. For all heads
together it becomes one row, which is all that a cache keeps:

    latent = norm(x W_a)[:latent]        rope = turn(x W_a [latent:], position)

Each head's key and value are linear in the latent, K = [latent W_K | rope] and V = latent W_V, with
W_K and W_V side by side in `kv_b_proj`. So attention can be computed in two orders:

    expanded   make K and V, then attend                        narrow keys, one expansion per key
    latent     q.K = (q_nope W_K^T).latent + q_rope.rope        wide keys, one expansion per query

Over the keys that an indexer selected for each query, sparse is latent over those rows alone, and
masked is expanded with bits that hide the others. The layer chooses by lengths and heads
(openmla.planning.form). Parameters are named as in Transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import openmla
from openmla import checks
from openmla.backward.given import with_expanded_gradients
from openmla.cache import LatentCache
from openmla.dispatch import device_target
from openmla.distributed import ContextShard
from openmla.distributed.agreement import Group
from openmla.distributed.indexes import fresh_table
from openmla.errors import InvalidArgument, Unsupported
from openmla.indexer.cache import IndexCache
from openmla.nn import ranks
from openmla.nn.batch import Batch
from openmla.nn.config import MLAConfig
from openmla.nn.indexer import Indexer
from openmla.nn.pooled import PoolCache, PoolIndexer, PoolIndexerConfig
from openmla.planning.form import FormChoice, choose_form, keys_per_piece
from openmla.planning.registry import masks_keys

MASK_STEP = 128  # keys whose bits are 16 bytes: a part of a mask that begins there can be copied
FRESH_PAGE = 64  # rows: blocks of that many are copied whole


class MLAAttention(nn.Module):
    """One attention layer over ragged batches and paged caches.

    Without a cache it has gradients, those of the expanded form; selected keys are then masked, not
    gathered. What else it does is inference. With `config.invariant` every token is attended to in
    latent form, and has the bits that it has in any other call.

    Args:
        config: sizes, rotary embedding and scale; weights are untrained.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        dims, heads, hidden = config.dims, config.heads, config.hidden
        queries = heads * (dims.nope + dims.rope)
        if config.q_lora:
            self.q_a_proj = nn.Linear(hidden, config.q_lora, bias=config.bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora, eps=config.eps)
            self.q_b_proj = nn.Linear(config.q_lora, queries, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, dims.latent + dims.rope, bias=config.bias)
        self.kv_a_layernorm = nn.RMSNorm(dims.latent, eps=config.eps)
        self.kv_b_proj = nn.Linear(dims.latent, heads * (dims.nope + dims.v), bias=False)
        self.o_proj = nn.Linear(heads * dims.v, hidden, bias=config.bias)
        if config.gate:
            self.g_proj = nn.Linear(hidden, heads * dims.v, bias=False)
        self.indexer: Indexer | PoolIndexer | None = None
        if isinstance(config.indexer, PoolIndexerConfig):
            self.indexer = PoolIndexer(config.indexer)
        elif config.indexer is not None:
            self.indexer = Indexer(config.indexer)

    @staticmethod
    def from_config(config: Any) -> MLAAttention:
        """An untrained layer of the model that a Transformers configuration describes.

        Args:
            config: a configuration of Transformers, or an object with the same attributes.

        Raises:
            Unsupported: the model's attention is not this layer, or its rotary embedding is not
                served.
        """
        return MLAAttention(MLAConfig.of(config))

    def load(self, source: nn.Module | Mapping[str, Tensor], prefix: str = "") -> MLAAttention:
        """Take the weights of an attention module, or of a state dict under `prefix`.

        A layer whose weights have no indexer shares that of a layer before it, and has none then;
        an indexer that is not served is left alone. Anything else missing or left over raises.

        Args:
            source: the model's own attention module, or tensors by the names of its parameters.
            prefix: what names of the state dict begin with, such as "model.layers.0.self_attn.";
                others are left alone. Empty: all are the layer's.

        Raises:
            RuntimeError: torch's own, where weights are missing, left over or of another shape.
        """
        state = source.state_dict() if isinstance(source, nn.Module) else source
        own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        if not any(k.startswith("indexer.") for k in own):
            self.indexer = None
        elif self.indexer is None:
            own = {k: v for k, v in own.items() if not k.startswith("indexer.")}
        self.load_state_dict(own)
        return self

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cache: LatentCache | None = None,
        batch: Batch | None = None,
        indices: Tensor | None = None,
        index_cache: IndexCache | PoolCache | None = None,
        shard: ContextShard | None = None,
        group: Group = None,
    ) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]. New rows are appended to the caches.

        Where a sequence has more keys than config.topk, the layer's own indexer selects, over its
        keys in index_cache. A layer without one takes indices instead.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end; with a shard,
                of this rank's tokens.
            positions: int [tokens], each token's place in its sequence, usually batch.positions, or
                shard.positions().
            cache: a LatentCache that holds the batch's context and takes the new rows; None for
                fresh sequences that nobody will go on with.
            batch: the sequences, and where their keys lie in the cache; None: x is one fresh
                sequence, with a shard those of the shard.
            indices: int [tokens, topk], places in the query's own sequence, -1 for none, of keys
                that were selected elsewhere; keys after the query are not seen. None of them twice:
                gathered, a key would count as often, and masked, as in training, once. On the CPU
                that raises; a GPU would have to wait to look. None: the layer's indexer selects.
            index_cache: the IndexCache of the layer's indexer, or the PoolCache of one that scores
                pools; its pages have the numbers of the cache's.
            shard: which tokens this rank has, as openmla.distributed.split made it: see
                openmla.nn.ranks. None: all of them.
            group: the ranks that have the other tokens of a shard; None is torch's default group.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
            PeerLost: with a shard, another rank has ended or did not make this call in time.
        """
        if shard is not None:
            if self.config.invariant:
                raise Unsupported(
                    "invariant, with a sequence over several ranks: keys are gathered"
                )
            if isinstance(self.indexer, PoolIndexer) or isinstance(index_cache, PoolCache):
                raise Unsupported("an indexer of pools, with a sequence over several ranks")
            caches = cache, index_cache
            return ranks.forward(self, x, positions, caches, batch, indices, shard, group)
        batch = batch if batch is not None else Batch.of([x.shape[0]], device=x.device)
        check(x, positions, cache, batch, batch.tokens)
        if self.config.invariant:
            return self._invariant(x, positions, cache, batch)
        indexer = self.indexer if indices is None else None
        keys: Any = index_cache
        if indexer is not None:
            indexer.check_cache(keys)
        form = self.choose(batch, x.device if indexer is not None else None).form
        if form == "sparse" and checks.needs_gradients(x, *self.parameters()):
            form = "masked"
        if form in ("sparse", "masked"):
            self.check_selection(batch, indices, index_cache)
        compressed = self.compress_queries(x) if self.config.q_lora else None
        q, latent, rope = self.project(x, positions, compressed)
        if cache is not None:
            cache.append(latent, rope, batch.slots(cache.page_size))
        mask = None
        if indexer is not None and compressed is not None and form in ("sparse", "masked"):
            masks = form == "masked"
            found = indexer(x, compressed, positions, batch, keys, return_mask=masks)
            indices, mask = found if masks else (found, None)
        elif indexer is not None and keys is not None:
            indexer.append(x, positions, batch, keys)
        if form == "masked" and indices is not None:
            mask = batch.selected_bits(indices) if mask is None else mask
            out = self._masked(q, latent, rope, cache, batch, mask)
        elif form == "sparse" and indices is not None:
            out = self._sparse(q, latent, rope, cache, batch, indices)
        elif form == "latent" and cache is not None:
            out = self._latent(q, cache, batch)
        else:
            out = self._expanded(q, latent, rope, cache, batch)
        return self.output(out, x)

    def forward_and_loss(
        self, x: Tensor, positions: Tensor, batch: Batch | None = None, sparse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The output, and the loss that trains the layer's indexer, float32 [tokens].

        The indexer learns what attention looks at: over all keys, which is the warm-up of DSA, or
        with `sparse` over those that it selected. Its loss has gradients of the indexer's weights
        alone, and the output none of them; their sum, or mean, is the caller's.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            positions: int [tokens], each token's place in its sequence.
            batch: the sequences, all of them fresh; None: x is one sequence.
            sparse: limit attention, and the loss, to the keys that the indexer selects.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: the layer has no indexer, or no kernel serves such a call.
        """
        if self.indexer is None:
            raise Unsupported("the loss of an indexer, in a layer that has none")
        if isinstance(self.indexer, PoolIndexer):
            raise Unsupported("the loss of an indexer that scores pools of tokens")
        if self.config.invariant:
            raise Unsupported(
                "the loss of an indexer, in a layer whose bits are invariant: it expands K and V",
                nearest="a layer with invariant=False",
            )
        batch = batch if batch is not None else Batch.of([x.shape[0]], device=x.device)
        check(x, positions, None, batch, batch.tokens)
        compressed = self.compress_queries(x)
        q, latent, rope = self.project(x, positions, compressed)
        if q.shape[1] != self.config.heads:
            raise Unsupported(
                "the loss of an indexer, where heads are split over ranks: it follows all of them"
            )
        mask = None
        if sparse:
            _, mask = self.indexer(x, compressed, positions, batch, return_mask=True)
        k_nope, v = self.expand(latent)
        out, lse = openmla.mla_prefill(
            *(q, k_nope, rope, v),
            cu_seqlens_q=batch.cu_seqlens,
            scale=self.config.scale,
            key_mask=mask,
            return_lse=True,
        )
        target = q, k_nope, rope, lse
        loss = self.indexer.loss(x, compressed, positions, batch, target, self.config.scale, mask)
        return self.output(out, x), loss

    def choose(self, batch: Batch, device: torch.device | None = None) -> FormChoice:
        """The form that a batch is computed in, and why; masked only on a device that masks.

        Args:
            batch: the sequences; lengths alone are looked at.
            device: where the layer runs, which decides whether there is a masked form; None: there
                is none.
        """
        masks = device is not None and masks_keys(device_target(device))
        heads = self.config.heads if masks else 0
        return choose_form(self.config.dims, batch.new, batch.keys, self.config.topk, heads)

    def project(
        self, x: Tensor, positions: Tensor, compressed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, nope+rope]; a row's latent [tokens, latent] and rope part.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
            positions: int [tokens], each token's place in its sequence.
            compressed: [tokens, q_lora], what compress_queries(x) gave; None: it is asked here.
        """
        dims, turning = self.config.dims, self.config.rope
        if self.config.q_lora and compressed is None:
            compressed = self.compress_queries(x)
        q = self.q_proj(x) if compressed is None else self.q_b_proj(compressed)
        q_nope, q_rope = _by_head(q, dims.nope + dims.rope).split_with_sizes(
            (dims.nope, dims.rope), -1
        )
        latent, rope = self.kv_a_proj_with_mqa(x).split([dims.latent, dims.rope], -1)
        if turning is not None:
            cos, sin = turning.cos_sin(positions, q.dtype)
            q_rope = turning.turn(q_rope, cos[:, None], sin[:, None])
            rope = turning.turn(rope, cos, sin)
        normed: Tensor = self.kv_a_layernorm(latent)
        # Under autocast, projections are narrower than x and than what a norm makes of them.
        return torch.cat([q_nope, q_rope], dim=-1), normed.to(q.dtype), rope

    def compress_queries(self, x: Tensor) -> Tensor:
        """[tokens, q_lora]: what queries are made of, and what an indexer starts from.

        Args:
            x: [tokens, hidden], hidden states of the batch's new tokens, end to end.
        """
        compressed: Tensor = self.q_a_layernorm(self.q_a_proj(x))
        return compressed

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """K without rope [keys, heads, nope] and V [keys, heads, v]: views of one projection.

        Args:
            latent: [keys, latent], rows without their rope part, normed.
        """
        dims = self.config.dims
        kv = _by_head(self.kv_b_proj(latent), dims.nope + dims.v)
        # Their gradients are joined in one step.
        k_nope, v = kv.split_with_sizes((dims.nope, dims.v), -1)
        return k_nope, v

    def absorb(self, q: Tensor) -> Tensor:
        """Queries to compare with rows: [tokens, heads, latent+rope].

        Args:
            q: [tokens, heads, nope+rope], as `project` makes them.
        """
        nope = self.config.dims.nope
        latent = torch.einsum("thn,hnl->thl", q[..., :nope], self._weights()[:, :nope])
        return torch.cat([latent, q[..., nope:]], dim=-1)

    def release(self, out: Tensor) -> Tensor:
        """Sums of latents [tokens, heads, latent] to sums of values [tokens, heads, v].

        Args:
            out: [tokens, heads, latent], what attention in latent form returned.
        """
        return torch.einsum("thl,hvl->thv", out, self._weights()[:, self.config.dims.nope :])

    def output(self, out: Tensor, x: Tensor) -> Tensor:
        """[tokens, heads, v] -> [tokens, hidden], through the gate of a layer that has one.

        Args:
            out: [tokens, heads, v], what attention gave every head.
            x: [tokens, hidden], the hidden states that the layer was given.
        """
        flat = out.flatten(1)
        if self.config.gate:
            flat = flat * self.g_proj(x).sigmoid()
        projected: Tensor = self.o_proj(flat)
        return projected

    def _expanded(
        self, q: Tensor, latent: Tensor, rope: Tensor, cache: LatentCache | None, batch: Batch
    ) -> Tensor:
        """New tokens among themselves, contexts in pieces of bounded size, merged by their lse."""
        cu = batch.cu_seqlens
        parts = [self._attend_to(q, latent, rope, cu, cu, causal=True)]
        if cache is not None:
            size = (self.config.dims, self.config.heads, len(batch.new), q.element_size())
            piece = keys_per_piece(*size)
            for start in range(0, max(batch.context, default=0), piece):
                rows, cu_k = batch.context_rows(start, start + piece, cache.page_size)
                cached = cache.gather(rows).to(q.dtype)
                latent, rope = cached[:, : cache.latent], cached[:, cache.latent :]
                parts.append(self._attend_to(q, latent, rope, cu, cu_k, causal=False))
        if len(parts) == 1:
            return parts[0][0]
        return openmla.merge_many([out for out, _ in parts], [lse for _, lse in parts])[0]

    def _attend_to(
        self,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        causal: bool,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        k_nope, v = self.expand(latent)
        out, lse = openmla.mla_prefill(
            q,
            k_nope,
            rope,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            scale=self.config.scale,
            causal=causal,
            key_mask=mask,
            return_lse=True,
        )
        return out, lse

    def _masked(
        self,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        cache: LatentCache | None,
        batch: Batch,
        mask: Tensor,
    ) -> Tensor:
        """All keys expanded, in pieces of bounded size, and hidden where the mask has no bit.

        A query's bits are of keys that it may see, so only one piece of them all needs causal,
        which makes it faster.
        """
        cu = batch.cu_seqlens
        if cache is None:
            return self._attend_to(q, latent, rope, cu, cu, causal=True, mask=mask)[0]
        size = (self.config.dims, self.config.heads, len(batch.new), q.element_size())
        piece = max(keys_per_piece(*size) // MASK_STEP, 1) * MASK_STEP
        longest = max(batch.keys)
        parts = []
        for start in range(0, longest, piece):
            rows, cu_k = batch.key_rows(start, start + piece, cache.page_size)
            cached = cache.gather(rows).to(q.dtype)
            bits = mask[:, start // 32 : (start + piece) // 32]
            latent, rope = cached[:, : cache.latent], cached[:, cache.latent :]
            whole = longest <= piece
            parts.append(self._attend_to(q, latent, rope, cu, cu_k, whole, bits))
        if len(parts) == 1:
            return parts[0][0]
        return openmla.merge_many([out for out, _ in parts], [lse for _, lse in parts])[0]

    def check_selection(
        self,
        batch: Batch,
        indices: Tensor | None,
        index_cache: IndexCache | PoolCache | None,
    ) -> None:
        """Refuse a batch with more keys than topk where nothing can select them.

        Args:
            batch: the sequences, one of which has more keys than config.topk.
            indices: what `forward` was given.
            index_cache: what `forward` was given.

        Raises:
            InvalidArgument: there is neither an indexer nor indices, indices on the CPU name a key
                twice, or keys of the context are nowhere.
        """
        if indices is not None and indices.device.type == "cpu":
            _named_once(indices)
        if indices is None and self.indexer is None:
            expected = f"[{batch.tokens}, topk]: a sequence has more than {self.config.topk} keys"
            raise InvalidArgument("indices", expected, None)
        if indices is None and index_cache is None and any(batch.context):
            raise InvalidArgument("index_cache", "the cache of the indexer's keys", None)
        if index_cache is not None and batch.block_table is None:
            raise InvalidArgument("batch", "one with a block_table, beside an index_cache", "none")

    def _invariant(
        self, x: Tensor, positions: Tensor, cache: LatentCache | None, batch: Batch
    ) -> Tensor:
        """The output with bits of attention that do not depend on how tokens are batched.

        Fresh sequences get pages of their own for the call, and gradients of the expanded form.
        """
        if self.config.topk:
            raise Unsupported(
                "invariant, in a layer that selects keys: how many a batch has decides whether it "
                "does",
                nearest="a layer with topk=0",
            )
        q, latent, rope = self.project(x, positions)
        if cache is not None:
            cache.append(latent, rope, batch.slots(cache.page_size))
            return self.output(self.attend_invariantly(q, cache, batch)[0], x)
        if q.dtype != torch.bfloat16:
            raise Unsupported(
                f"invariant, without a cache, in {q.dtype}: rows are kept in bfloat16",
                nearest="a layer and hidden states in bfloat16, or torch.autocast to it",
            )
        with torch.no_grad():
            cache, paged = fresh_pages(latent, rope, batch)
            out, lse = self.attend_invariantly(q, cache, paged)
        if checks.needs_gradients(q, latent, rope, *self.kv_b_proj.parameters()):
            k_nope, v = self.expand(latent)
            out, _ = with_expanded_gradients(
                *(out, lse, q, k_nope, rope, v),
                cu_seqlens_q=batch.cu_seqlens,
                scale=self.config.scale,
            )
        return self.output(out, x)

    def attend_invariantly(
        self, q: Tensor, cache: LatentCache, batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Sums of values [tokens, heads, v], and lse fp32 [tokens, heads], over rows of a cache.

        The bits of a token depend on it and on the keys that it sees alone.

        Args:
            q: [tokens, heads, nope+rope], as `project` makes them.
            cache: the LatentCache, new rows included.
            batch: the sequences, with a block_table of the cache's pages.

        Raises:
            InvalidArgument: an argument is wrong; the message names it, and what was expected.
            Unsupported: no kernel serves such a call; the message says what would.
        """
        assert batch.block_table is not None
        out, lse = openmla.mla_prefill_latent(
            *(self.absorb(q), cache, batch.block_table, batch.cache_lengths),
            cu_seqlens_q=batch.cu_seqlens,
            scale=self.config.scale,
            invariant=True,
            range_keys=self.config.range_keys,
            return_lse=True,
        )
        return self.release(out), lse

    def _latent(self, q: Tensor, cache: LatentCache, batch: Batch) -> Tensor:
        assert batch.block_table is not None
        out = openmla.mla_prefill_latent(
            self.absorb(q),
            cache,
            batch.block_table,
            batch.cache_lengths,
            cu_seqlens_q=batch.cu_seqlens,
            scale=self.config.scale,
            range_keys=self.config.range_keys,
        )
        assert isinstance(out, Tensor)
        return self.release(out)

    def _sparse(
        self,
        q: Tensor,
        latent: Tensor,
        rope: Tensor,
        cache: LatentCache | None,
        batch: Batch,
        indices: Tensor,
    ) -> Tensor:
        page_size = None if cache is None else cache.page_size
        out = openmla.mla_prefill_sparse(
            self.absorb(q),
            torch.cat([latent, rope], dim=-1) if cache is None else cache,
            batch.selected_rows(indices, page_size),
            scale=self.config.scale,
            d_v=self.config.dims.latent,
        )
        assert isinstance(out, Tensor)
        return self.release(out)

    def _weights(self) -> Tensor:
        """kv_b_proj by head: [heads, nope + v, latent], W_K before W_V."""
        dims, projection = self.config.dims, self.kv_b_proj
        # An adapter around it, or a quantized one, computes something else than its weight says.
        if getattr(type(projection), "forward", None) is not nn.Linear.forward:
            raise Unsupported(
                f"kv_b_proj is a {type(projection).__name__}, not a plain nn.Linear, whose weight "
                "this form multiplies by",
                nearest="adapters that are merged into the weight",
            )
        weight: Any = projection.weight
        if hasattr(weight, "to_local"):  # heads are split over ranks
            weight = weight.to_local()
        by_head: Tensor = weight.view(-1, dims.nope + dims.v, dims.latent)
        return by_head


def _by_head(x: Tensor, width: int) -> Tensor:
    """[tokens, heads * width] -> [tokens, heads, width], also of no tokens; a rank has some heads.

    >>> _by_head(torch.empty(0, 12), 4).shape
    torch.Size([0, 3, 4])
    """
    return x.view(len(x), x.shape[1] // width, width)


def _named_once(indices: Tensor) -> None:
    """CPU only: no line names a key twice."""
    if torch.compiler.is_compiling():
        return
    ordered = indices.sort(dim=-1).values
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(again.any()):
        line, place = again.nonzero()[0].tolist()
        got = f"key {int(ordered[line, place])} twice in line {line}"
        raise InvalidArgument("indices", "every key at most once in a line", got)


def fresh_pages(latent: Tensor, rope: Tensor, batch: Batch) -> tuple[LatentCache, Batch]:
    """The rows of fresh sequences in pages of their own, and the batch with its block table."""
    pages = tuple(-(-n // FRESH_PAGE) for n in batch.new)
    size = {"num_pages": max(sum(pages), 1), "page_size": FRESH_PAGE, "format": "bf16"}
    widths = {"latent": latent.shape[1], "rope": rope.shape[1]}
    cache = LatentCache.allocate(**size, **widths, device=latent.device)  # type: ignore[arg-type]
    paged = Batch.of(batch.new, block_table=fresh_table(pages, latent.device))
    cache.append(latent, rope, paged.slots(FRESH_PAGE))
    return cache, paged


def check(
    x: Tensor, positions: Tensor, cache: LatentCache | None, batch: Batch, tokens: int
) -> None:
    """Shapes of what a layer is given, and that a cache has its pages."""
    if x.dim() != 2 or x.shape[0] != tokens:
        expected = f"[{tokens}, hidden], one row per new token of the batch"
        raise InvalidArgument("x", expected, f"shape {tuple(x.shape)}")
    if positions.shape != x.shape[:1]:
        raise InvalidArgument("positions", f"[{tokens}]", f"shape {tuple(positions.shape)}")
    if cache is None and any(batch.context):
        raise InvalidArgument("cache", "the cache that holds the batch's context", None)
    if cache is not None and batch.block_table is None:
        raise InvalidArgument("batch", "one with a block_table, beside a cache", "none")
