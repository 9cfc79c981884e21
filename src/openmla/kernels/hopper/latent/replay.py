"""Sparse calls like one that was made before: other addresses, other tokens, no planning.

A `SparseReplay` belongs to everything else that decides how a call over bf16 or fp16 rows is
launched: widths, heads, strides, the pool and its pages, the length of lists, dtypes, options,
device (openmla.fastpath has the key).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

from openmla.cache import LatentCache
from openmla.kernels.hopper.latent.launch import calls
from openmla.kernels.hopper.repeat import Names, Repeat, address, hooked, launcher, row_step
from openmla.operands import Results, SparseOperands
from openmla.planning import Plan
from openmla.planning.hopper import HopperSparseConfig

NAMES = Names(
    changing=(
        "data_ptr", "indices_ptr", "lengths_ptr", "out_ptr", "lse_ptr", "logits_ptr", "sink_ptr",
        "tiles", "total_q",
    ),
    described={"q_half_desc": 0, "q_rope_desc": 0},  # both of q
)  # fmt: skip
ELEMENT = 2  # bytes of bf16 and fp16
INDEX = 4
BULK = 16  # bytes: bulk copies and vectors of 16 bytes begin at such addresses


class SparseReplay:
    """Launches for one key of openmla.fastpath."""

    def __init__(self, plan: Plan, op: SparseOperands, results: Results) -> None:
        """Take what Triton compiled for a call; it was launched before."""
        self._config: HopperSparseConfig = plan.config
        self._device = op.q.device.index
        # How far rows reach, in elements, for the check of overlaps.
        self._out, self._q, self._lists = (row_step(x) for x in (results.out, op.q, op.indices))
        data = stored(op)
        self._pool_bytes = _reach(row_step(data), data.shape[0] - 1, ELEMENT)
        (call,) = calls(plan, op, results)
        compiled = call.compile()
        launch = launcher(compiled)
        self._repeat = None if launch is None else Repeat(call, compiled, launch, NAMES)

    def add(self, plan: Plan, op: SparseOperands, results: Results) -> None:
        """Nothing: one kernel serves every call of a key."""

    def run(self, op: SparseOperands, results: Results) -> bool:
        """Launch, or return False: then the call must be checked and planned like a new one."""
        total_q, lengths, sink = op.q.shape[0], op.topk_lengths, op.weights.sink
        data, out, q = stored(op).data_ptr(), results.out.data_ptr(), op.q.data_ptr()
        if not (
            self._repeat is not None
            and total_q and op.indices.shape[0] == total_q and results.out.shape[0] == total_q
            and (lengths is None or lengths.shape[0] == total_q)
            and not (data | out | q) % BULK
            and self._apart(out, q, data, op)
            and torch.cuda.current_device() == self._device
            and not torch.cuda.is_current_stream_capturing()
            and not hooked()
        ):  # fmt: skip
            return False
        tiles = total_q * self._config.row_blocks
        changing = (
            data, op.indices.data_ptr(), address(lengths), out, address(results.lse),
            address(results.max_logits), address(sink), tiles, total_q,
        )  # fmt: skip
        stream = driver.active.get_current_stream(self._device)
        self._repeat.run(min(tiles, self._config.sm_count), stream, changing, ((q, total_q),))
        return True

    def _apart(self, out: int, q: int, data: int, op: SparseOperands) -> bool:
        """Whether `out` shares no memory with an input."""
        more = op.q.shape[0] - 1
        last = out + _reach(self._out, more, ELEMENT)
        small = [(x.data_ptr(), INDEX * x.shape[0]) for x in (op.topk_lengths, op.weights.sink)
                 if x is not None]  # fmt: skip
        inputs = [
            (q, _reach(self._q, more, ELEMENT)), (data, self._pool_bytes),
            (op.indices.data_ptr(), _reach(self._lists, more, INDEX)), *small,
        ]  # fmt: skip
        return all(start >= last or out >= start + size for start, size in inputs)


def stored(op: SparseOperands) -> Tensor:
    """The tensor of the rows."""
    return op.cache.data if isinstance(op.cache, LatentCache) else op.cache


def _reach(step: tuple[int, int], more: int, size: int) -> int:
    """Bytes from the first element to past the last of 1 + `more` rows."""
    return (step[0] * more + step[1]) * size
