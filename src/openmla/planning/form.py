"""Which form an MLA layer attends in: expanded, latent, sparse or masked, by lengths and heads.

Both dense forms compute the same function; they multiply in a different order. Per head, with n new
tokens, T keys (the new ones included) and P visible pairs of query and key:

    expanded   T * latent * (nope + v) + P * (nope + rope + v)
               every row goes through kv_b_proj, and keys are narrow
    latent     n * latent * (nope + v) + P * (2 * latent + rope)
               queries and outputs go through it instead, and keys are wide

A fresh prompt has T = n: the projections cost the same and expanded wins by its narrow keys. A few
new tokens over a long cache have T >> n: expanding the cache costs more than attending to it. For
DeepSeek-V3 (512, 128, 64, 128) the forms break even near 171 new tokens, whatever the context.

A DSA layer selects `topk` keys for each query. Sparse reads those rows alone, at a cost per query;
masked expands all keys and hides the others, at a cost per visible pair, which is less while
sequences are short: see `sparse_work` and `masked_work`.

>>> v3 = LayerDims(latent=512, nope=128, rope=64, v=128)
>>> choose_form(v3, new=[4096], keys=[4096]).form, choose_form(v3, new=[16], keys=[4096]).form
('expanded', 'latent')
>>> [choose_form(v3, [n], [n], topk=2048, heads=16).form for n in (2048, 8192, 131072)]
['expanded', 'masked', 'sparse']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openmla.errors import InvalidArgument

LayerForm = Literal["expanded", "latent", "sparse", "masked"]

# Most memory that keys and values expanded for one call may take. At 128 heads of V3 in bf16 it is
# 16384 keys: long enough to keep a GPU busy, short enough to leave room for a model.
EXPANDED_BYTES = 1 << 30

# Tera multiply-adds per second, H200, bf16: causal dense prefill of 8192 tokens took 0.11 us per
# query and 1000 keys at 128 heads and 0.0137 at 16; a sparse query with 2048 rows took 0.78 us at
# 128 heads and 0.45 at 16, whose tile of 64 heads is mostly empty. The mask itself is not in it.
DENSE_RATE = 373.0
SPARSE_RATES = {1: 317.0, 2: 366.0}
"""By tiles of 64 heads; one tile leaves the gather of rows exposed."""
TILE_HEADS = 64


@dataclass(frozen=True, slots=True)
class LayerDims:
    """Widths of one MLA layer: a cached row is latent + rope, a head's K nope + rope, its V v."""

    latent: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True, slots=True)
class FormChoice:
    """A form, and why."""

    form: LayerForm
    reason: str


def choose_form(
    dims: LayerDims, new: Sequence[int], keys: Sequence[int], topk: int = 0, heads: int = 0
) -> FormChoice:
    """The form for one call over sequences with these new tokens and keys, new ones included.

    `topk` is how many keys a query of a DSA model attends to, 0 for other models. Where no sequence
    has more keys than that, every key is selected and the dense forms serve. `heads` is how many
    this device has; 0 where the dense kernel takes no mask, and then there is no masked form.
    """
    _check_lengths(new, keys)
    longest = max(keys, default=0)
    if topk and longest > topk:
        return _choose_selected(dims, new, keys, topk, heads)
    expanded, latent = expanded_work(dims, new, keys), latent_work(dims, new, keys)
    if latent < expanded:
        return FormChoice("latent", f"latent: {_counts(latent, expanded)} expanded")
    return FormChoice("expanded", f"expanded: {_counts(expanded, latent)} in latent form")


def _choose_selected(
    dims: LayerDims, new: Sequence[int], keys: Sequence[int], topk: int, heads: int
) -> FormChoice:
    why = f"{max(keys)} keys, and a query selects {topk}"
    if not heads:
        return FormChoice("sparse", f"sparse: {why}")
    masked, sparse = masked_work(dims, new, keys, heads), sparse_work(dims, new, topk, heads)
    even = break_even(dims, topk, heads)
    form: LayerForm = "masked" if masked < sparse else "sparse"
    times = f"{masked / 1e3:.3g} ms masked, {sparse / 1e3:.3g} ms sparse at an H200's rates"
    where = f"at {heads} heads a query costs the same both ways when it sees {even} keys"
    return FormChoice(form, f"{form}: {why}; {times}; {where}, a fresh prompt of {2 * even}")


def masked_work(dims: LayerDims, new: Sequence[int], keys: Sequence[int], heads: int) -> float:
    """Microseconds of an H200 when all keys are expanded and bits hide those not selected."""
    return heads * expanded_work(dims, new, keys) / DENSE_RATE / 1e6


def sparse_work(dims: LayerDims, new: Sequence[int], topk: int, heads: int) -> float:
    """Microseconds of an H200 when every query reads its topk rows, as tiles of 64 heads."""
    tiles = -(-heads // TILE_HEADS)
    rate = SPARSE_RATES.get(tiles, SPARSE_RATES[max(SPARSE_RATES)])
    rows = tiles * TILE_HEADS * topk * (2 * dims.latent + dims.rope)
    projection = heads * dims.latent * (dims.nope + dims.v)
    return sum(new) * (rows / rate + projection / DENSE_RATE) / 1e6


def break_even(dims: LayerDims, topk: int, heads: int) -> int:
    """Keys that a query sees where masked and sparse attention take as long, but for projections.

    >>> v3 = LayerDims(512, 128, 64, 128)
    >>> break_even(v3, 2048, 128), break_even(v3, 2048, 16)
    (7096, 32773)
    """
    query = sparse_work(dims, [1], topk, heads)
    projection = heads * dims.latent * (dims.nope + dims.v) / DENSE_RATE / 1e6
    pair = heads * (dims.nope + dims.rope + dims.v) / DENSE_RATE / 1e6
    return int((query - projection) / pair)


def most_latent_tokens(dims: LayerDims) -> int:
    """New tokens of a request up to which the latent form needs less arithmetic than expanding the
    new tokens and their context, whatever the context.

    >>> most_latent_tokens(LayerDims(latent=512, nope=128, rope=64, v=128))
    170
    """
    more_per_pair = (2 * dims.latent + dims.rope) - (dims.nope + dims.rope + dims.v)
    return dims.latent * (dims.nope + dims.v) // more_per_pair


def least_latent_keys(dims: LayerDims, new: int) -> float:
    """Keys of a request with so many new tokens from which `choose_form` says latent; inf for none.

    Both works are linear in the keys, so there is one such number.

    >>> v3 = LayerDims(latent=512, nope=128, rope=64, v=128)
    >>> [least_latent_keys(v3, n) for n in (1, 16, 170, 171)]
    [2, 17, 21973, inf]
    """
    row = dims.latent * (dims.nope + dims.v)
    pair = (2 * dims.latent + dims.rope) - (dims.nope + dims.rope + dims.v)
    gained = row - new * pair  # by the latent form, with every key
    if gained <= 0:
        return float("inf")
    lost = new * row - pair * (new * (new - 1) // 2)
    return max(lost // gained + 1, new)


def expanded_work(dims: LayerDims, new: Sequence[int], keys: Sequence[int]) -> int:
    """Multiply-adds per head when every key is expanded to K and V of its own."""
    projection = sum(keys) * dims.latent * (dims.nope + dims.v)
    return projection + _pairs(new, keys) * (dims.nope + dims.rope + dims.v)


def latent_work(dims: LayerDims, new: Sequence[int], keys: Sequence[int]) -> int:
    """Multiply-adds per head when the projection moves to the queries and the outputs."""
    projection = sum(new) * dims.latent * (dims.nope + dims.v)
    return projection + _pairs(new, keys) * (2 * dims.latent + dims.rope)


def keys_per_piece(dims: LayerDims, heads: int, sequences: int, itemsize: int) -> int:
    """How many cached keys of each sequence to expand at a time: a piece of EXPANDED_BYTES.

    >>> keys_per_piece(LayerDims(512, 128, 64, 128), heads=128, sequences=1, itemsize=2)
    16384
    """
    row = heads * (dims.nope + dims.v) * itemsize * max(sequences, 1)
    return max(EXPANDED_BYTES // row // 64 * 64, 64)


def _counts(less: int, more: int) -> str:
    unit, size = ("G", 1e9) if less >= 1e10 else ("M", 1e6)
    return f"{less / size:.4g} {unit} multiply-adds per head, {more / size:.4g} {unit}"


def _pairs(new: Sequence[int], keys: Sequence[int]) -> int:
    """Visible pairs under the causal mask: the last query sees T keys, the first T - n + 1."""
    return sum(n * t - n * (n - 1) // 2 for n, t in zip(new, keys, strict=True))


def _check_lengths(new: Sequence[int], keys: Sequence[int]) -> None:
    if len(new) != len(keys):
        raise InvalidArgument("keys", f"{len(new)} lengths, as new has", len(keys))
    for n, t in zip(new, keys, strict=True):
        if not 0 <= n <= t:
            raise InvalidArgument("keys", f"at least the {n} new tokens of the sequence", t)
