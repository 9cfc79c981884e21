"""What a call that needs gradients keeps, what is computed again, and what kernels allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import calls
import openmla
from backward import test_sparse
from backward.checkpointed import saving
from formula import same_bits
from openmla.backward.problem import BackwardProblem
from openmla.indexer import loss_ops
from openmla.indexer.loss_operands import LossOperands
from openmla.lab.testing.index_loss import LossCase, build_loss
from openmla.planning import plan
from openmla.problem import Problem


class Trained(NamedTuple):
    """A call that has gradients, as a function of the tensors that need them."""

    leaves: tuple[Tensor, ...]
    run: Callable[..., Any]
    """The result that is differentiated."""
    given: tuple[Tensor, ...]
    """What else the call reads."""
    results: Callable[[Any], int]
    """How many tensors besides arguments the backward pass reads."""
    operator: Any


def dense() -> Trained:
    call = calls.dense([9, 4], dtype=torch.bfloat16)
    q, rope = call["q"], call["k_rope"]
    kv = torch.cat([call["k_nope"], call["v"]], dim=-1)  # as one projection makes them
    cu, width = call["cu_seqlens_q"], call["k_nope"].shape[2]

    def run(q: Tensor, kv: Tensor, rope: Tensor) -> Tensor:
        return openmla.mla_prefill(q, kv[..., :width], rope, kv[..., width:], cu_seqlens_q=cu)

    leaves = tuple(x.detach().requires_grad_() for x in (q, kv, rope))
    return Trained(leaves, run, (cu,), lambda out: 2, torch.ops.openmla.dense_train.default)


def sparse() -> Trained:
    call = test_sparse.call(torch.bfloat16)
    leaves = tuple(call.pop(name) for name in ("q", "kv", "sink"))

    def run(q: Tensor, kv: Tensor, sink: Tensor) -> Tensor:
        return openmla.mla_prefill_sparse(**call, q=q, kv=kv, sink=sink)

    given = call["indices"], call["topk_lengths"]
    return Trained(leaves, run, given, lambda out: 2, torch.ops.openmla.sparse_train.default)


def loss() -> Trained:
    assert loss_ops.SCHEMAS  # importing it registers torch.ops.openmla.index_loss
    op: LossOperands = build_loss(LossCase((9, 4), (9, 4), dtype=torch.bfloat16))
    a = op.attention
    assert a.k_rope is not None
    target = a.q, a.k_nope, a.k_rope, op.lse

    def run(*index: Tensor) -> Tensor:
        return openmla.indexer_loss(*index, *target, cu_seqlens_q=a.cu_seqlens_q, scale=0.2)

    leaves = tuple(x.requires_grad_() for x in (op.index_q, op.index_k, op.index_weights))
    given = (*target, a.cu_seqlens_q)
    return Trained(leaves, run, given, lambda out: 0, torch.ops.openmla.index_loss.default)


TRAINED = [dense, sparse, loss]


def gradients(trained: Trained, run: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Gradients of the sum of squares."""
    return torch.autograd.grad(run(*trained.leaves).float().square().sum(), trained.leaves)


@pytest.mark.parametrize("made", TRAINED, ids=lambda made: made.__name__)
def test_arguments_and_results_are_kept_and_nothing_else(made: Callable[[], Trained]) -> None:
    """Keys and values of one projection are one tensor, whose views they are."""
    trained = made()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        found = trained.run(*trained.leaves)
    memory = {x.untyped_storage().data_ptr() for x in saved}
    arguments = {x.untyped_storage().data_ptr() for x in (*trained.leaves, *trained.given)}
    assert memory >= arguments
    others = [x for x in saved if x.untyped_storage().data_ptr() not in arguments]
    assert len(memory - arguments) == trained.results(found)
    rows, heads = trained.leaves[0].shape[:2]
    for x in others:  # out, and lse
        assert x.shape[:2] == (rows, heads) and x.dim() == (2 if x.dtype == torch.float32 else 3)


@pytest.mark.parametrize("made", TRAINED, ids=lambda made: made.__name__)
@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing_changes_no_bit(made: Callable[[], Trained], selective: bool) -> None:
    trained, ran = made(), []
    how = {"context_fn": saving(trained.operator)} if selective else {}

    def again(*leaves: Tensor) -> Tensor:
        ran.append(None)
        return checkpoint(
            lambda *given: trained.run(*given) * 1.0, *leaves, use_reentrant=False, **how
        )

    for got, want in zip(gradients(trained, again), gradients(trained, trained.run), strict=True):
        assert same_bits(got, want)
    assert ran


V3 = Problem(
    form="dense",
    heads=128,
    d_nope=128,
    d_rope=64,
    d_v=128,
    total_q=4096,
    total_k=4096,
    self_attention=True,
)
LONGER = {"total_k": 8192, "self_attention": False}  # queries at the end: none of them is blind
BAR = 136 * 1024 * 1024


@pytest.mark.parametrize(
    ("chip", "backend", "most"),
    [("h200", "hopper", BAR), ("h200", "portable", 136_400_000), ("a100", "auto", 136_400_000)],
)
def test_the_workspace_of_a_dense_backward_pass_is_small(
    chip: str, backend: str, most: int
) -> None:
    found = plan(BackwardProblem.of(V3), chip, backend)
    needed = found.config.workspace(found.problem)
    # A part of every rope row for each head, and less than 4 % more.
    parts = 4096 * 128 * 64 * 4
    assert parts < needed <= min(most, parts * 1.04)
    assert f"workspace: {needed} bytes" in found.explain()


@pytest.mark.parametrize(
    "more",
    [{}, {"has_sink": True}, {"has_key_mask": True}, {"rope": "per_head"}, {"batch": 3}, LONGER],
    ids=str,
)
def test_portable_launches_allocate_what_the_plan_says(more: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    from openmla.aot.operands import operands_of
    from openmla.kernels.launch import calls as launches

    problem = BackwardProblem.of(replace(V3, **more))
    found = plan(problem, "a100")
    operands, gradients = operands_of(problem)
    forward = operands.forward
    named = (vars(operands), vars(forward), vars(forward.weights), gradients.tensors())
    known = {id(owner(x)) for one in named for x in one.values() if isinstance(x, Tensor)}
    listed = list(launches(found, operands, gradients))
    read = [owner(x) for c in listed for x in c.arguments.values() if isinstance(x, Tensor)]
    made = {id(x): x.nbytes for x in read if id(x) not in known}
    assert sum(made.values()) == found.config.workspace(problem)


def owner(x: Tensor) -> Tensor:
    """The tensor whose memory a view shows."""
    return x if x._base is None else x._base
