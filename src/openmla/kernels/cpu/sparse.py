"""Token-sparse MLA prefill on the CPU, latent form.

Called by kernels/launch.py only. One query token at a time: find the rows that count, source by
source, fetch them in blocks of BN, and multiply them with all heads at once, in one softmax.
Scratch memory is one block of rows, however many rows and tokens there are.
"""

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import OnlineSoftmax
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import AttendOperands, Results, SparseOperands

Sparse = SparseOperands | AttendOperands


def sparse(config: CpuConfig, op: Sparse, results: Results) -> None:
    """Fill `results`, token by token; a token without a key stays an empty row."""
    work = Workspace()
    sources = op.sources
    for token in range(op.q.shape[0]):
        slots = [source.seen(token) for source in sources]
        if any(rows.numel() for rows in slots):
            _token(config, op, results, work, token, slots)


def _token(
    config: CpuConfig,
    op: Sparse,
    results: Results,
    work: Workspace,
    token: int,
    slots: list[Tensor],
) -> None:
    """One query token over the physical rows `slots` of each source."""
    out, lse, max_logits = _attend(config, op, work, token, slots, tame=True)
    if not torch.isfinite(out).all():
        # Huge values overflowed, or a row holds Inf or NaN: rare enough to look only afterwards.
        out, lse, max_logits = _attend(config, op, work, token, slots, tame=False)
    results.write(token, out[0], lse[0], max_logits[0])


def _attend(
    config: CpuConfig, op: Sparse, work: Workspace, token: int, slots: list[Tensor], tame: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of one token; `tame` as in `OnlineSoftmax.add_block`."""
    q = work.pack("q", op.q[token]).mul_(op.weights.scale)
    if op.weights.q_scale is not None:
        q.mul_(op.weights.q_scale[token])
    state = OnlineSoftmax(1, q.shape[0], op.d_v)
    for source, seen in zip(op.sources, slots, strict=True):
        for first in range(0, seen.numel(), config.BN):
            block = seen[first : first + config.BN]
            rows = work.pack("rows", source.read(block))
            scores = work.take("scores", 1, q.shape[0], block.numel())
            torch.mm(q, rows.T, out=scores[0])
            if op.weights.k_scale is not None:
                scores.mul_(op.weights.k_scale[block])
            state.add_block(scores, rows[None, :, : op.d_v], tame)
    return state.finish(op.weights.sink)
