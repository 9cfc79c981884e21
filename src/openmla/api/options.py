"""Keyword options of the public calls, for type checkers.

`return_lse=True` makes a tuple of a call's result. Its overloads say so and name the options that
do not matter there once, here. `openmla.api` has their meaning; tests compare the two.
"""

from typing import Required, TypedDict

from torch import Tensor

from openmla.problem import Backend
from openmla.sources import TurnBack


class CallOptions(TypedDict, total=False):
    """Keyword arguments that every call takes."""

    scale: float | None
    sink: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None
    out: Tensor | None
    backend: Backend


class DenseOptions(CallOptions, total=False):
    """Keyword arguments of `mla_prefill`."""

    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Tensor | None
    k_start: Tensor | None
    block_table: Tensor | None
    cache_lengths: Tensor | None
    causal: bool
    window: int | None
    key_mask: Tensor | None


class LatentOptions(CallOptions, total=False):
    """Keyword arguments of `mla_prefill_latent`."""

    cu_seqlens_q: Required[Tensor]
    causal: bool
    window: int | None
    invariant: bool
    range_keys: int | None
    d_v: int | None


class SparseOptions(CallOptions, total=False):
    """Keyword arguments of `mla_prefill_sparse`."""

    topk_lengths: Tensor | None
    d_v: int | None


class AttendOptions(TypedDict, total=False):
    """Keyword arguments of `mla_attend`."""

    scale: Required[float]
    sink: Tensor | None
    d_v: int | None
    turn_back: TurnBack | None
    out: Tensor | None
    backend: Backend
