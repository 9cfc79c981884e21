"""How fast a Blackwell kernel should be: a prediction, never a measurement.

The kernel itself runs on the simulator, one piece of work at a time, with the clock on and the
rates of the chip. Two lengths give a straight line, clocks = piece + blocks x block; the problem is
so many pieces of so many blocks, spread over the SMs. The share of peak that follows does not
depend on the clock frequency.

Rates per SM and clock, B200:

| unit | rate | source |
|---|---|---|
| tcgen05, 16 bits | 4096 multiply-adds | datasheet: 2250 TFLOP/s dense, 148 SMs, 1.855 GHz |
| tcgen05, 8 bits | 8192 multiply-adds | datasheet: 4500 TFLOP/s dense |
| exp2 | 16 | CUDA C++ Programming Guide, throughput of arithmetic instructions |
| fp32 arithmetic | 128 | the same table |
| shared memory | 128 bytes | the same guide: 32 banks of 4 bytes |
| TMA, from L2 | 64 bytes | an assumption: no figure is published for this chip |
| tensor memory to and from registers | 128 words | an assumption: one word a lane |
| latency of a copy, of a product | 800, 100 clocks | assumptions |

Predicted on 2026-11-15 with Triton 3.6, `openmla explain --model … --tokens …`:

| | share of peak | bound by |
|---|---|---|
| deepseek-v3, 8192 tokens, causal, bf16 | 79 % | shared memory, 91 % busy; tensor cores 87 % |
| the same with copies 500 clocks late instead of 800 | 86 % | shared memory, 99 % busy |
| the same in e4m3 | 37 % of the FP8 peak | arithmetic and exponentials, 64 % each, and waits |
| deepseek-v3.2, top-2048, 4096 tokens | 39 % | shared memory, 100 % busy |

Not in the model: DRAM, L2 misses, the power limit, launch overhead, instruction issue, blocks that
end unevenly (whole pieces are dealt out evenly), and how the exponentials and the arithmetic of a
warp overlap (they do not, here).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from openmla.planning.config import Plan
from openmla.planning.target import target_by_name
from openmla.problem import Problem

FLOPS_PER_CLOCK = {2: 8192, 1: 16384}  # of one SM, by bytes of an operand
FULL = 0.9  # a unit that is busier than this is what bounds a kernel
BLOCKS = (4, 8)  # lengths that are simulated
UNITS = {
    "mma": "tensor cores",
    "exp": "exponentials",
    "vector": "fp32 arithmetic",
    "memory": "tensor memory",
    "copy": "copies from L2",
    "smem": "shared memory",
}


@dataclass(frozen=True)
class Prediction:
    """What the model says about one plan."""

    block_clocks: float
    """Clocks per block of keys of one piece of work."""
    piece_clocks: float
    """Clocks that every piece costs besides: filling the pipeline and writing the result."""
    share_of_peak: float
    """Of the datasheet's dense peak."""
    busy: dict[str, float]
    """Share of the time, while blocks follow one another, that each unit is busy."""
    sm_count: int

    @property
    def bound_by(self) -> str:
        """The unit that is busiest."""
        return max(self.busy, key=lambda unit: self.busy[unit])

    def lines(self) -> list[str]:
        """For people."""
        busy = sorted(self.busy.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{UNITS[unit]} {100 * share:.0f} %" for unit, share in busy)
        full = self.busy[self.bound_by] > FULL
        bound = "bound by" if full else "bound by waits between its stages; busiest:"
        return [
            "prediction (simulated with published rates, not measured)",
            f"  {self.share_of_peak:.0%} of the datasheet's peak",
            f"  {self.block_clocks:.0f} clocks per block of keys, {self.piece_clocks:.0f} per piece"
            f" of work besides, {self.sm_count} SMs",
            f"  {bound} {UNITS[self.bound_by]}; busy: {shares}",
        ]


def predict(chosen: Plan) -> Prediction | None:
    """The prediction for a Blackwell plan; None for others, and where nothing can be simulated."""
    config = chosen.config
    if chosen.backend != "blackwell" or not chosen.runs_today:
        return None
    try:
        runs = [_timed(chosen, blocks) for blocks in BLOCKS]
    except ImportError:
        return None  # no Triton, or no gluon-sim
    (first, busy_first), (second, busy_second) = runs
    more = BLOCKS[1] - BLOCKS[0]
    needed = {unit: (busy_second[unit] - busy_first[unit]) / more for unit in UNITS}
    # Operations do not wait for one another at shared memory: all its bytes still have to pass.
    block = max((second - first) / more, *needed.values())
    piece = first - BLOCKS[0] * (second - first) / more
    busy = {unit: clocks / block for unit, clocks in needed.items()}
    sm_count = target_by_name(chosen.target).sm_count
    pieces, blocks = _work(chosen)
    clocks = (pieces * piece + blocks * block) / sm_count
    peak = clocks * sm_count * FLOPS_PER_CLOCK[config.qkv_dtype_size]
    return Prediction(block, piece, useful_flops(chosen.problem) / peak, busy, sm_count)


def useful_flops(problem: Problem) -> float:
    """Two per multiply-add that is not masked, of sequences of equal lengths."""
    if problem.form == "sparse" or not problem.causal:
        return float(problem.flops)
    batch = max(problem.batch, 1)
    q_len, k_len = problem.total_q / batch, problem.total_k / batch
    seen = sum(max(0.0, min(k_len, k_len - q_len + i + 1)) for i in range(round(q_len)))
    return 2.0 * problem.heads * batch * seen * (problem.d_qk + problem.d_v)


def _work(chosen: Plan) -> tuple[int, int]:
    """Pieces of work, and blocks of keys in all of them, of sequences of equal lengths."""
    problem, config = chosen.problem, chosen.config
    if problem.form == "sparse":
        config = _as_it_runs(config)
        pieces = problem.total_q * -(-problem.heads // config.padded_num_q_heads)
        return pieces, pieces * -(-problem.topk // config.B_TOPK)
    batch = max(problem.batch, 1)
    per_sequence = list(_dense_blocks(problem.total_q // batch, problem.total_k // batch, chosen))
    count = batch * problem.heads
    return count * len(per_sequence), count * sum(per_sequence)


def _dense_blocks(q_len: int, k_len: int, chosen: Plan) -> Iterator[int]:
    config = chosen.config
    for row in range(0, q_len, config.BM):
        seen = k_len - q_len + min(row + config.BM, q_len) if chosen.problem.causal else k_len
        yield max(-(-min(seen, k_len) // config.BN), 1)


def _as_it_runs(config: Any) -> Any:
    """One CTA per 64 heads: a pair of CTAs would have twice the heads and half the SMs."""
    return config.one_cta()


def _timed(chosen: Plan, blocks: int) -> tuple[float, dict[str, float]]:
    """Clocks of one piece of `blocks` blocks, and how many each unit was busy."""
    from gluon_sim import intercept
    from openmla.kernels.launch import launch

    plan, operands, results = _one_piece(chosen, blocks)
    with intercept(schedule="timed", resident=1, rates=b200_rates()) as reports:
        launch(plan, operands, results)
    (report,) = reports
    report.raise_if_bad()
    timeline = report.timeline
    assert timeline is not None
    bars = [e for e in timeline.events if e.lane.split(" ")[-1] == e.kind and e.kind in UNITS]
    busy = dict.fromkeys(UNITS, 0.0)
    for bar in bars:
        busy[bar.kind] += bar.end - bar.start
    return max(e.end for e in timeline.events), busy


def b200_rates() -> Any:
    """The table above, in the simulator's units: its product is two multiply-adds."""
    from gluon_sim import Rates

    cost = {
        "mma": 2048.0, "exp": 16.0, "vector": 128.0, "memory": 128.0, "global": 64.0, "copy": 64.0,
    }  # fmt: skip
    return Rates(cost, {"copy": 800.0, "mma": 100.0}, shared=True, smem_bytes=128.0)


def _one_piece(chosen: Plan, blocks: int) -> tuple[Plan, Any, Any]:
    """The plan with operands for one block of the grid: zeros, so that no maximum moves."""
    from openmla.aot.operands import DTYPES, operands_of

    problem, config = chosen.problem, chosen.config
    small = replace(
        problem, batch=1, page_size=0, has_sink=False, has_q_scale=False, has_k_scale=False,
        has_topk_lengths=False, wants_lse=False, wants_max_logits=False,
    )  # fmt: skip
    if problem.form == "sparse":
        config = _as_it_runs(config)
        heads, keys = min(problem.heads, config.padded_num_q_heads), blocks * config.B_TOPK
        config = replace(config, num_q_heads=heads, indices_stride=keys)
        shape = {"heads": heads, "topk": keys, "total_q": 1, "kv_dtype": problem.q_dtype}
    else:
        rope_dtype = problem.rope_dtype if problem.rope_dtype in DTYPES else "bf16"
        keys = blocks * config.BN
        shape = {"heads": 1, "total_q": config.BM, "causal": False, "rope": "shared",
                 "rope_dtype": rope_dtype}  # fmt: skip
    small = replace(small, total_k=keys, **shape)
    return replace(chosen, problem=small, config=config), *operands_of(small, "cpu")
