"""Cases that a kernel's plan asks for: lengths at its own edges, uneven memory, one row alone.

A plan knows where its tiles, blocks and rings end. From that, and from any small case of the
kernel, follow cases that no test has to list:

    at_edges(case, plan)   lengths of Q and K one less than a tile or block, as many, and one more;
                           as many blocks as a ring has, and one key more; lists that end there
    UnevenMemory           gaps of their own between the rows, heads and pages of every tensor, and
                           any stride where there is one head or page only
    at_ranges(case)        requests of as many keys as are not split, as fill ranges, and one more
    lone_row(built)        all queries are zero but those of one row of a tile, whose scores lie
                           thousands apart: what depends on "some row" is seen apart from "all"
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openmla.lab.testing.build import BuiltCase
from openmla.lab.testing.case import Case
from openmla.lab.testing.memory import Memory, fill
from openmla.operands import SparseOperands
from openmla.planning import Plan
from openmla.planning.latent_split import SHORT, LatentSplit

_ALIGNED = 16  # elements: 16 bytes or more in every dtype
LONE = 7
LOUD = 512.0
"""Times a unit normal query: scores of hundreds to thousands, with the scales of the cases."""
_ABSURD = 2**40  # a stride that is never used, and that no descriptor could have


@dataclass(frozen=True)
class Edges:
    """Where the tiles of a plan end."""

    queries: int
    """Rows of a tile, or of one of the tiles of a work item."""
    keys: int
    """Keys of a block."""
    ring: int
    """Blocks after which a ring begins again; 2 where there is none."""


def edges_of(plan: Plan) -> Edges:
    """The edges of a plan of a Gluon kernel."""
    config, dense = plan.config, plan.problem.form == "dense"
    if plan.backend == "cdna4":
        if dense:
            return Edges(config.BM, config.KV_BLOCK, config.k_slots)
        return Edges(config.BM, config.B_TOPK, config.num_kv_stages)
    if dense:
        rows = 64 if plan.backend == "hopper" else 128
        return Edges(rows * min(config.num_qo, 2), config.BN, config.num_kv_stages)
    if plan.backend == "hopper":  # a step is two blocks
        return Edges(config.BM, config.B_TOPK, max(2 * config.num_kv_stages, 2))
    return Edges(1, config.B_TOPK, config.num_mbars)  # a tile is the heads of one query


def at_edges(case: Case, plan: Plan) -> Case:
    """A case with lengths at the edges of a plan; lists are cut by `lists_at_edges`."""
    edges = edges_of(plan)
    block, turn = edges.keys, edges.keys * edges.ring
    if case.form == "sparse":
        counts = len(list_lengths(edges))
        return replace(case, q_lens=(counts,), topk=turn + block + 1, topk_lengths="full")
    if case.form == "dense":
        tile = edges.queries
        q_lens = (tile - 1, 3, tile + 1, tile, 1)
        k_lens = (block, block + 1, block - 1, 2 * block, turn + 1)
        return replace(case, heads=1, group=1, q_lens=q_lens, k_lens=k_lens, spare=0)
    tile = edges.queries
    page = case.page_size
    q_lens = (tile - 1, 1, tile + 1, tile, 3, 2)
    k_lens = (block, block + 1, block - 1, page, page + 1, turn + 1)
    return replace(case, heads=1, q_lens=q_lens, k_lens=k_lens, spare=0)


def at_ranges(case: Case) -> Case:
    """A latent case with as many keys as are never split, as fill ranges, and one more of each."""
    whole, range_ = SHORT, LatentSplit.keys_of_range(case.heads, SHORT + 1)
    full = -(-(whole + 1) // range_) * range_
    k_lens = (whole, whole + 1, full, full + 1)
    return replace(case, q_lens=(1,) * len(k_lens), k_lens=k_lens, spare=0)


def list_lengths(edges: Edges) -> list[int]:
    """Lengths of lists around the ends of blocks and rings, and of none."""
    ends = (0, edges.keys, 2 * edges.keys, edges.keys * edges.ring)
    around = {end + step for end in ends for step in (-1, 0, 1)}
    return sorted(n for n in around if n >= 0)


def lists_at_edges(built: BuiltCase, edges: Edges) -> BuiltCase:
    """A sparse case whose lists end at the edges, one token each: lengths that tensors say. What
    follows the end names rows as real as those before it."""
    op = built.operands
    assert isinstance(op, SparseOperands) and op.topk_lengths is not None
    op.topk_lengths.copy_(torch.tensor(list_lengths(edges)))
    return built


def lone_row(built: BuiltCase) -> BuiltCase:
    """A case of bf16 or fp16 queries, all zero but one head of every token, or in the dense form
    one token of 64, which are so large that the largest key takes all the weight."""
    q = built.operands.q
    lone = q[LONE::64] if built.case.form == "dense" else q[:, LONE % q.shape[1]]
    loud = lone * LOUD
    q.zero_()
    lone.copy_(loud)
    return built


class UnevenMemory(Memory):
    """CPU memory in which tensors have gaps of their own, filled with the background."""

    def __init__(self, background: str = "nan") -> None:
        super().__init__("cpu", background)
        self._made = 0

    def new(
        self, shape: Sequence[int], dtype: torch.dtype, strided: bool = False, aligned: bool = False
    ) -> Tensor:
        """A tensor with gaps after each row and outer slice; vectors have none."""
        if len(shape) < 2 or 0 in shape:
            return super().new(shape, dtype)
        self._made += 1
        strides = uneven_strides(shape, self._made)
        used = zip(shape, strides, strict=True)
        reach = sum((n - 1) * s for n, s in used) + 1
        raw = self._bytes(reach * dtype.itemsize, dtype)
        self.buffers.append(raw)
        fill(raw, dtype, self.background)
        return raw.view(dtype).as_strided(tuple(shape), strides)


def uneven_strides(shape: Sequence[int], number: int) -> tuple[int, ...]:
    """Strides with gaps that differ by the number of the tensor and by dimension.

    >>> uneven_strides((2, 3, 4), 1), uneven_strides((2, 1, 4), 2)
    ((144, 32, 1), (128, 1099511627776, 1))
    """
    strides, step = [1], -(-shape[-1] // _ALIGNED) * _ALIGNED
    for depth, size in enumerate(reversed(shape[:-1])):
        step += _ALIGNED * (number % 5 + depth * (number % 3 + 1))
        strides.append(step if size > 1 else _ABSURD)
        step *= size
    return tuple(reversed(strides))
