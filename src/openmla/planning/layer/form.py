"""Which form an MLA layer attends in: expanded, latent or sparse, by lengths alone.

Both dense forms compute the same function; they multiply in a different order. Per head, with n new
tokens, T keys (the new ones included) and P visible pairs of query and key:

    expanded   T * latent * (nope + v) + P * (nope + rope + v)
               every row goes through kv_b_proj, and keys are narrow
    latent     n * latent * (nope + v) + P * (2 * latent + rope)
               queries and outputs go through it instead, and keys are wide

A fresh prompt has T = n: the projections cost the same and expanded wins by its narrow keys. A few
new tokens over a long cache have T >> n: expanding the cache costs more than attending to it. For
DeepSeek-V3 (512, 128, 64, 128) the forms break even near 171 new tokens, whatever the context.

>>> v3 = LayerDims(latent=512, nope=128, rope=64, v=128)
>>> choose_form(v3, new=[4096], keys=[4096]).form, choose_form(v3, new=[16], keys=[4096]).form
('expanded', 'latent')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from openmla.errors import InvalidArgument

LayerForm = Literal["expanded", "latent", "sparse"]

# Most memory that keys and values expanded for one call may take. At 128 heads of V3 in bf16 it is
# 16384 keys: long enough to keep a GPU busy, short enough to leave room for a model.
EXPANDED_BYTES = 1 << 30


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
    dims: LayerDims, new: Sequence[int], keys: Sequence[int], topk: int = 0
) -> FormChoice:
    """The form for one call over sequences with these new tokens and keys, new ones included.

    `topk` is how many keys a query of a DSA model attends to, 0 for other models. Where no sequence
    has more keys than that, every key is selected and the dense forms serve.
    """
    _check_lengths(new, keys)
    longest = max(keys, default=0)
    if topk and longest > topk:
        return FormChoice("sparse", f"sparse: {longest} keys, and a query selects {topk}")
    expanded, latent = expanded_work(dims, new, keys), latent_work(dims, new, keys)
    if latent < expanded:
        return FormChoice("latent", f"latent: {_millions(latent, expanded)} expanded")
    return FormChoice("expanded", f"expanded: {_millions(expanded, latent)} in latent form")


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


def _millions(less: int, more: int) -> str:
    return f"{less / 1e6:.4g} M multiply-adds per head, {more / 1e6:.4g} M"


def _pairs(new: Sequence[int], keys: Sequence[int]) -> int:
    """Visible pairs under the causal mask: the last query sees T keys, the first T - n + 1."""
    return sum(n * t - n * (n - 1) // 2 for n, t in zip(new, keys, strict=True))


def _check_lengths(new: Sequence[int], keys: Sequence[int]) -> None:
    if len(new) != len(keys):
        raise InvalidArgument("keys", f"{len(new)} lengths, as new has", len(keys))
    for n, t in zip(new, keys, strict=True):
        if not 0 <= n <= t:
            raise InvalidArgument("keys", f"at least the {n} new tokens of the sequence", t)
