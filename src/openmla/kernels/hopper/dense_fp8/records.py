# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""Records of the dense FP8 kernel alone; dense/records.py has those that it shares with bf16."""

from typing import Any, NamedTuple


class RingPlace(NamedTuple):
    """A stage of the rings of K and V, and the parity of the round."""

    stage: Any
    phase: Any


class BlocksBefore(NamedTuple):
    """Where the blocks lie that a step still has to release."""

    place: RingPlace
    """Place of the block before, whose V is multiplied next."""
    older: Any
    """Stage of the one before that, whose V is no longer read."""


class SoftmaxState(NamedTuple):
    """What a consumer carries from block to block; softmax.py defines row_max and row_sum."""

    words: Any
    """P of the block before, packed in pairs."""
    O: Any
    """The output accumulator without that block."""
    row_max: Any
    row_sum: Any
    rescale: Any
    """What O must still be multiplied by."""
