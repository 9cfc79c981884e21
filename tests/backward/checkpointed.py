"""Activation checkpointing that keeps what one operator computed, as a trainer's policy would."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def saving(operator: Any) -> Callable[[], Any]:
    """checkpoint's context_fn: the results of `operator` are kept, others computed again."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op is operator
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)
