"""Token-sparse MLA prefill on the CPU, latent form.

Called by kernels/launch.py only. One query token at a time: drop the indices that do not count,
fetch the rows in blocks of BN, and multiply them with all heads at once. Scratch memory is one
block of rows, whatever topk and total_q are.
"""

import torch
from torch import Tensor

from openmla.kernels.cpu.online_softmax import OnlineSoftmax
from openmla.kernels.cpu.plan import CpuConfig
from openmla.kernels.cpu.workspace import Workspace
from openmla.operands import Results, SparseOperands


def sparse(config: CpuConfig, op: SparseOperands, results: Results) -> None:
    """Fill `results`, token by token; a token without a key stays an empty row."""
    work = Workspace()
    lengths = None if op.topk_lengths is None else op.topk_lengths.tolist()
    for token in range(op.q.shape[0]):
        listed = op.indices[token]
        if lengths is not None:
            listed = listed[: max(lengths[token], 0)]
        rows = listed[(listed >= 0) & (listed < op.rows)].long()
        if rows.numel():
            _token(config, op, results, work, token, rows)


def _token(
    config: CpuConfig,
    op: SparseOperands,
    results: Results,
    work: Workspace,
    token: int,
    slots: Tensor,
) -> None:
    """One query token over the physical rows `slots`."""
    out, lse, max_logits = _attend(config, op, work, token, slots, tame=True)
    if not torch.isfinite(out).all():
        # Huge values overflowed, or a row holds Inf or NaN: rare enough to look only afterwards.
        out, lse, max_logits = _attend(config, op, work, token, slots, tame=False)
    results.write(token, out[0], lse[0], max_logits[0])


def _attend(
    config: CpuConfig, op: SparseOperands, work: Workspace, token: int, slots: Tensor, tame: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logits) of one token; `tame` as in `OnlineSoftmax.add_block`."""
    q = work.pack("q", op.q[token]).mul_(op.weights.scale)
    if op.weights.q_scale is not None:
        q.mul_(op.weights.q_scale[token])
    state = OnlineSoftmax(1, q.shape[0], op.d_v)
    for first in range(0, slots.numel(), config.BN):
        block = slots[first : first + config.BN]
        rows = work.pack("rows", op.read(block))
        scores = work.take("scores", 1, q.shape[0], block.numel())
        torch.mm(q, rows.T, out=scores[0])
        if op.weights.k_scale is not None:
            scores.mul_(op.weights.k_scale[block])
        state.add_block(scores, rows[None, :, : op.d_v], tame)
    return state.finish(op.weights.sink)
