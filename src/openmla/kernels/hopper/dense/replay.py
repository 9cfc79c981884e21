"""Dense calls like one that was made before: other addresses, other token counts, no planning.

A `DenseReplay` belongs to everything else that decides how a call is launched: widths, heads,
strides, dtypes, options, device (openmla.fastpath has the key). What token counts decide is decided
here again, by the functions that the planner uses: the number of query tiles, whether the keys of a
request may be split, the number of programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from openmla.kernels.hopper.dense.launch import (
    Fixed,
    SplitSpace,
    calls,
    counter_of_stream,
    fixed_of,
    merge_programs,
    programs_of,
    split_space,
)
from openmla.kernels.hopper.repeat import Names, Repeat, address, hooked, launcher, row_step
from openmla.operands import DenseOperands, Results
from openmla.planning import Plan
from openmla.planning.hopper import HopperDenseConfig

NAMES = Names(
    changing=(
        "out_ptr", "lse_ptr", "sink_ptr", "cu_q_ptr", "cu_k_ptr", "counter_ptr", "part_sums_ptr",
        "part_state_ptr", "batch", "total_q", "rest_q", "total_k",
    ),
    # The tensors are q, k_nope, k_rope, v.
    described={
        "q_main_desc": 0, "q_tail_desc": 0, "q_rope_desc": 0, "k_main_desc": 1, "k_tail_desc": 1,
        "k_rope_desc": 2, "v_desc": 3,
    },
)  # fmt: skip
ELEMENT = 2  # bytes of bf16 and fp16
MOST_COUNTS = 4096


class Variant(NamedTuple):
    """The kernels for one number of query tiles, with or without splits."""

    config: HopperDenseConfig
    fixed: Fixed
    dense: Repeat
    merge: Repeat | None


class Choice(NamedTuple):
    """What token counts decide."""

    variant: Variant
    space: SplitSpace | None
    programs: int
    merge_programs: int


class DenseReplay:
    """Launches for one key of openmla.fastpath; rope comes from a tensor, if there is any."""

    def __init__(self, plan: Plan, op: DenseOperands, results: Results) -> None:
        self._config: HopperDenseConfig = plan.config
        self._variants: dict[tuple[int, bool], Variant] = {}
        self._choices: dict[tuple[int, int, int, bool], Choice] = {}
        self._device = op.q.device.index
        # How far a row of each tensor reaches, in elements, for the check of overlaps.
        rope = op.k_nope if op.k_rope is None else op.k_rope
        self._steps = [row_step(x) for x in (results.out, op.q, op.k_nope, op.v, rope)]

    def add(self, plan: Plan, op: DenseOperands, results: Results) -> None:
        """Compile what a call needs, if it needs one group only; it was launched before."""
        fixed = fixed_of(plan.problem, plan.config)
        space = split_space(fixed, plan.config, op)
        if space is not None and space.group < space.requests:
            return
        repeats = []
        for call in calls(plan, op, results):
            compiled = call.compile()
            launch = launcher(compiled)
            if launch is None:
                return
            repeats.append(Repeat(call, compiled, launch, NAMES))
        merge = repeats[1] if space is not None else None
        key = (plan.config.num_qo, space is not None)
        self._variants[key] = Variant(plan.config, fixed, repeats[0], merge)

    def run(self, op: DenseOperands, results: Results) -> bool:
        """Launch, or return False: then the call must be checked and planned like a new one."""
        q, k, rope, v, out = op.q, op.k_nope, op.k_rope, op.v, results.out
        total_q, total_k, batch = q.shape[0], k.shape[0], op.cu_seqlens_q.shape[0] - 1
        rows = (total_q, total_q, total_k, total_k, total_k)
        starts = (
            out.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(),
            k.data_ptr() if rope is None else rope.data_ptr(),
        )  # fmt: skip
        if not (
            batch >= 0 and total_q and total_k and out.shape[0] == total_q and v.shape[0] == total_k
            and (rope is None or rope.shape[0] == total_k)
            and op.cu_seqlens_k.shape[0] == batch + 1
            and self._apart(starts, rows, op)
            and torch.cuda.current_device() == self._device
            and not torch.cuda.is_current_stream_capturing()
            and not hooked()
        ):  # fmt: skip
            return False
        same = op.cu_seqlens_q.data_ptr() == op.cu_seqlens_k.data_ptr()
        counts = (total_q, total_k, batch, same)
        choice = self._choices.get(counts) or self._choose(counts, op)
        if choice is None:
            return False
        self._launch(choice, op, results, starts, counts)
        return True

    def _choose(self, counts: tuple[int, int, int, bool], op: DenseOperands) -> Choice | None:
        """As the planner and `calls` would; None while the kernel for it has not been made."""
        total_q, _, batch, _ = counts
        num_qo = self._config.num_qo_for(total_q, batch)
        for split in (False, True):
            variant = self._variants.get((num_qo, split))
            if variant is None:
                continue
            space = split_space(variant.fixed, variant.config, op)
            if (space is not None) != split or (space and space.group < space.requests):
                continue
            programs = programs_of(variant.config, total_q, batch, split)
            merges = 0 if space is None else merge_programs(variant.config, space)
            if len(self._choices) >= MOST_COUNTS:
                self._choices.clear()
            self._choices[counts] = Choice(variant, space, programs, merges)
            return self._choices[counts]
        return None

    def _apart(self, starts: tuple[int, ...], rows: tuple[int, ...], op: DenseOperands) -> bool:
        """Whether bulk copies can read all tensors and `out` shares no memory with another."""
        if (starts[0] | starts[1] | starts[2] | starts[3] | starts[4]) & 15:
            return False
        first = starts[0]
        last = first + (self._steps[0][0] * (rows[0] - 1) + self._steps[0][1]) * ELEMENT
        for i in (1, 2, 3, 4):
            step, reach = self._steps[i]
            if starts[i] < last and first < starts[i] + (step * (rows[i] - 1) + reach) * ELEMENT:
                return False
        for small in (op.cu_seqlens_q, op.cu_seqlens_k, op.weights.sink):
            if small is not None:
                start = small.data_ptr()
                if start < last and first < start + 4 * small.shape[0]:
                    return False
        return True

    def _launch(
        self,
        choice: Choice,
        op: DenseOperands,
        results: Results,
        starts: tuple[int, ...],
        counts: tuple[int, int, int, bool],
    ) -> None:
        stream, counter = counter_of_stream(op.q.device)
        out, q, k, v, rope = starts
        total_q, total_k, batch, _ = counts
        lse, sink = results.lse, op.weights.sink
        sums = state = None
        if choice.space is not None:
            # Freed when this returns, and given away by torch only behind these launches.
            sums, state = choice.space.allocate(op.q.device)
        changing = (
            out, address(lse), address(sink),
            op.cu_seqlens_q.data_ptr(), op.cu_seqlens_k.data_ptr(), counter.data_ptr(),
            address(sums), address(state),
            batch, total_q, total_q, total_k,
        )  # fmt: skip
        bases = ((q, total_q), (k, total_k), (rope, total_k), (v, 0))
        variant = choice.variant
        variant.dense.run(choice.programs, stream, changing, bases)
        if variant.merge is not None:
            variant.merge.run(choice.merge_programs, stream, changing, bases)
