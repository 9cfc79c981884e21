"""Keyword options of the calls on this rank's rows, for type checkers: see openmla.api.options."""

from typing import Required, TypedDict

from torch import Tensor

from openmla.cache import LatentCache
from openmla.problem import Backend


class CallOptions(TypedDict, total=False):
    """Keyword arguments that every call takes."""

    cache: LatentCache | None
    block_table: Tensor | None
    verify: bool
    sink: Tensor | None
    backend: Backend


class DenseOptions(CallOptions, total=False):
    """Keyword arguments of `prefill`."""

    overlap: bool
    scale: float | None


class LatentOptions(CallOptions, total=False):
    """Keyword arguments of `prefill_latent`."""

    scale: Required[float]


class SparseOptions(LatentOptions, total=False):
    """Keyword arguments of `prefill_sparse`."""

    topk_lengths: Tensor | None
