"""Dense cases whose sequences begin anywhere in the keys of the batch, and so share some."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import torch

from openmla.lab.testing.build import BuiltCase
from openmla.operands import DenseOperands


def with_shared_keys(built: BuiltCase, seed: int, all_keys: bool = False) -> BuiltCase:
    """The same queries and rows of keys; how many a sequence has, and from where, is drawn.

    Pages of a rope and bits of a mask are made for the case's own lengths, so those are kept there.
    Elsewhere sequences together may have more keys than there are rows; with `all_keys` each has
    all of them.
    """
    case, op, rng = built.case, built.operands, random.Random(seed)
    assert isinstance(op, DenseOperands)
    rows = sum(case.k_lens)
    lengths = list(case.k_lens)
    if all_keys:
        lengths = [rows for _ in lengths]
    elif op.rope_cache is None and op.key_mask is None:
        lengths = [rng.choice([n, 0, rows, rng.randint(0, rows)]) for n in lengths]
    starts = [rng.choice([0, rows - n, rng.randint(0, rows - n)]) for n in lengths]
    # The call's keyword arguments are given apart from its operands, and must say the same.
    offsets, k_start = (
        built.memory.of(torch.tensor(x, dtype=torch.int32, device=op.q.device))
        for x in ([0, *accumulate(lengths)], starts)
    )
    arguments = {**built.arguments, "cu_seqlens_k": offsets, "k_start": k_start}
    return replace(
        built, operands=replace(op, cu_seqlens_k=offsets, k_start=k_start), arguments=arguments
    )
