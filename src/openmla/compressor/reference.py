"""What a compressed row is: float64, one column of one row at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def reference(
    kv: Tensor, gate: Tensor, bias: Tensor | None = None, *, ratio: int, overlap: bool = False
) -> Tensor:
    """float64 [rows, width] of the tokens [tokens, width] of one sequence, from its first token.

    With overlap, [tokens, 2 * width]: the first columns of a token go into the row after its own.
    """
    width = kv.shape[1] // 2 if overlap else kv.shape[1]
    rows = torch.empty(kv.shape[0] // ratio, width, dtype=torch.float64)
    for row in range(rows.shape[0]):
        for column in range(width):
            # (token, the column of its values and gates that this row reads)
            read = [(row * ratio + i, column + width * overlap) for i in range(ratio)]
            if overlap and row:
                read += [((row - 1) * ratio + i, column) for i in range(ratio)]
            weights = []
            for token, at in read:
                place = 0.0 if bias is None else float(bias[token % ratio, at])
                weights.append(math.exp(float(gate[token, at]) + place))
            values = [float(kv[token, at]) for token, at in read]
            weighed = sum(w * v for w, v in zip(weights, values, strict=True))
            rows[row, column] = weighed / sum(weights)
    return rows
