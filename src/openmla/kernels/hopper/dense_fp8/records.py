# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Records of the dense FP8 kernel alone; dense/records.py has those that it shares with bf16."""

from typing import Any, NamedTuple


class RingPlace(NamedTuple):
    """A stage of the rings of K and V, and the parity of the round."""

    stage: Any
    phase: Any


class SoftmaxState(NamedTuple):
    """What a consumer carries from block to block; softmax.py defines row_max and row_sum."""

    words: Any
    """P of the block before, packed in pairs."""
    O: Any
    """The output accumulator without that block, rescaled to row_max."""
    row_max: Any
    row_sum: Any
