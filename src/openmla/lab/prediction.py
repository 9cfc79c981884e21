"""How fast a kernel should be: a prediction from its simulated timeline, never a measurement.

The kernel itself runs on the simulator, one work item at a time, with the clock on and the rates of
the chip. Two lengths give a straight line, clocks = item + blocks x block. The problem is so many
items of so many blocks; SMs take them longest first. The share of peak that follows does not depend
on the clock frequency.

Rates per SM and clock:

| unit | H200 | B200 | MI355X | source |
|---|---|---|---|---|
| products, 16 bits | 2048 | 4096 | 2048 | datasheets: TFLOP/s, SMs, clock |
| products, 8 bits | 4096 | 8192 | 4096 | datasheets |
| exp2, fp32 arithmetic | 16, 128 | 16, 128 | 16, 128 | CUDA C++ Programming Guide; CDNA4 ISA |
| shared memory, bytes | 128 x 0.88 | 128 x 0.88 | 128 x 0.88 | guides; the share: measured, H200 |
| of it, reads of waves | - | - | 256 x 0.88 | 64 banks; AMD, announcement of CDNA 4 |
| copies from L2, bytes | 64 | 64 | 64 | an assumption |
| tensor memory, words | - | 128 | - | an assumption: one word a lane |
| clocks until a copy, a product is there | 700, 60 | 800, 100 | 800, 0 | assumptions |
| clocks before the first work item | 33,000 | 33,000 | 33,000 | measured on the H200, caches cold |

On the MI355X the waves of a block run in step: products, exponentials and arithmetic follow one
another. Each wave reads its own fragments from LDS; these bytes are counted from the plan, since
the simulated program reads a tile once.

Two figures come from measured kernels, both on the H200: the share of shared memory's bytes that a
loop of products and copies gets, from causal 1x8192 with 128 heads, and the start, from 1x4096 with
16. The other shapes of benchmarks/results/predicted-h200-*.json then test the model:
docs/prediction.md has the table, and `ERROR` its figures. Nobody has measured a B200 or an MI355X:
their predictions carry that error at least.

Not in the model: DRAM, L2 misses, the power limit, instruction issue, and how the exponentials and
the arithmetic of a warp overlap (they do not, here).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from openmla.errors import Unsupported
from openmla.formats import BF16, FORMATS
from openmla.planning.dequantize import PLAIN
from openmla.planning.latent_split import LatentSplit
from openmla.planning.registry import Plan
from openmla.planning.target import target_by_name
from openmla.problem import DTYPE_BYTES, Problem
from openmla.sequences import first_key

FULL = 0.9  # a unit that is busier than this is what bounds a kernel
BLOCKS = (6, 12)  # lengths that are simulated
BANKS = 32  # of 4 bytes
SMEM_BYTES = 4.0 * BANKS * 0.88
START = 33_000.0
ERROR = (0.02, 0.10)
"""Median and worst error of the cycles predicted for the H200, rounded up; a test compares them."""
MANY = 100_000  # work items that are dealt out evenly instead of one by one
UNITS = {
    "mma": "tensor cores",
    "exp": "exponentials",
    "vector": "fp32 arithmetic",
    "memory": "tensor memory",
    "copy": "copies from L2",
    "smem": "shared memory",
}


@dataclass(frozen=True)
class Chip:
    """What one SM does per clock; see the table above."""

    products: float
    """Multiply-adds of 16 bits."""
    latency: dict[str, float] = field(default_factory=dict)

    def rates(self) -> Any:
        """In the simulator's units; its products of both chips count in wgmma's of 16 bits."""
        from gluon_sim import Rates

        cost = {
            "mma": 2048.0,
            "exp": 16.0,
            "vector": 128.0,
            "memory": 128.0,
            "global": 64.0,
            "copy": 64.0,
        }
        return Rates(cost, self.latency, shared=True, smem_bytes=SMEM_BYTES)


CHIPS = {
    "hopper": Chip(2048.0, {"copy": 700.0, "mma": 60.0}),
    "blackwell": Chip(4096.0, {"copy": 800.0, "mma": 100.0}),
    "cdna4": Chip(2048.0, {"copy": 800.0, "mma": 0.0}),
}


@dataclass(frozen=True)
class Prediction:
    """What the model says about one plan."""

    block_clocks: float
    """Clocks per block of keys of one work item."""
    item_clocks: float
    """Clocks that every work item costs besides: filling the pipeline and writing the result."""
    clocks: float
    """Clocks of the whole kernel."""
    share_of_peak: float
    """Share of the datasheet's dense peak."""
    busy: dict[str, float]
    """Share of the time, while blocks follow one another, that each unit is busy."""
    sm_count: int
    cores: str = "SMs"
    share_of_bandwidth: float = 0.0
    """Share of the memory's datasheet bandwidth, if keys are read once; of the latent form."""

    @property
    def bound_by(self) -> str:
        """The unit that is busiest."""
        return max(self.busy, key=lambda unit: self.busy[unit])

    def lines(self) -> list[str]:
        """For people."""
        busy = sorted(self.busy.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{UNITS[unit]} {100 * share:.0f} %" for unit, share in busy if share)
        full = self.busy[self.bound_by] > FULL
        bound = "bound by" if full else "bound by waits between its stages; busiest:"
        median, worst = ERROR
        read = f"  {self.share_of_bandwidth:.0%} of the memory's bandwidth, if keys are read once"
        memory = [read] if self.share_of_bandwidth else []
        return [
            "prediction (simulated, not measured)",
            f"  {self.share_of_peak:.0%} of the datasheet's peak; cycles predicted for an H200 are"
            f" off by {median:.0%} in the middle and {worst:.0%} at worst",
            *memory,
            f"  {self.block_clocks:.0f} clocks per block of keys, {self.item_clocks:.0f} per work "
            f"item besides, {self.sm_count} {self.cores}",
            f"  {bound} {UNITS[self.bound_by]}; busy: {shares}",
        ]


def predict(chosen: Plan) -> Prediction | None:
    """For a plan of attention on Hopper, Blackwell or CDNA4; None where nothing can be simulated.

    FP8 rows that a pass dequantizes count as bf16: the pass takes about 1 % of the time. So do FP8
    values of a dense call that a pass upcasts.
    """
    if not isinstance(chosen.problem, Problem):
        return None  # a step of the indexer
    chosen, amd = _as_installed(chosen), chosen.backend == "cdna4"
    pages = chosen.problem.form == "latent" and chosen.backend == "hopper"
    if chosen.backend not in CHIPS or not chosen.runs_today or pages:
        return None
    if chosen.problem.is_attend:
        return None  # how long a span is only the device knows, and two sources are no one loop
    if chosen.backend == "hopper" and _waits_for_loads(chosen):
        return None
    try:
        one = _one_item_of_waves if amd else _one_item
        runs = [_timed(one(chosen, blocks)) for blocks in BLOCKS]
    except ImportError:
        return None  # no Triton, or no gluon-sim
    (first, busy_first), (second, busy_second) = runs
    more = BLOCKS[1] - BLOCKS[0]
    needed = {unit: (busy_second[unit] - busy_first[unit]) / more for unit in UNITS}
    if amd:
        needed |= {"memory": 0.0, "smem": _lds_clocks(chosen)}
    # Operations do not wait for one another at shared memory: all its bytes still have to pass.
    block = max((second - first) / more, *needed.values())
    item = first - BLOCKS[0] * (second - first) / more
    if _ctas(chosen) == 2 and chosen.problem.form != "dense":
        # This pair stays for the next item: what it costs beside another one.
        several, _ = _timed(_one_item(chosen, BLOCKS[0], items=3))
        item = (several - first) / 2 - BLOCKS[0] * (second - first) / more
    busy = {unit: clocks / block for unit, clocks in needed.items()}
    sm_count = target_by_name(chosen.target).sm_count
    work: Sequence[float] = _work_of_waves(chosen) if amd else _work(chosen)
    items = [item + blocks * block for blocks in work]
    clocks = START + _last_end(items, sm_count // _ctas(chosen))
    peak = clocks * sm_count * 2 * CHIPS[chosen.backend].products
    peak *= 2 // chosen.config.qkv_dtype_size if chosen.backend == "blackwell" else 1
    peak *= 2 if amd and chosen.problem.form == "dense" and chosen.problem.q_dtype == "e4m3" else 1
    share, cores = useful_flops(chosen.problem) / peak, "CUs" if amd else "SMs"
    chip = target_by_name(chosen.target)
    rate = sm_count * 2 * CHIPS[chosen.backend].products  # of bf16, a clock
    seconds = clocks * rate / (chip.bf16_tflops * 1e12)
    bandwidth = _share_of_bandwidth(chosen.problem, seconds, chip.hbm_gbps)
    return Prediction(block, item, clocks, share, busy, sm_count, cores, bandwidth)


def _waits_for_loads(chosen: Plan) -> bool:
    """FP8 rows dequantized in the kernel: loads to registers take no time in the model."""
    read = getattr(chosen.config, "cache_read", None)
    return read is not None and read.mode == "in_kernel"


def _last_end(items: list[float], sm_count: int) -> float:
    """When the last of the items is done, longest first.

    >>> _last_end([1.0, 2.0, 3.0], 2)
    3.0
    """
    if len(items) > MANY:
        return sum(items) / sm_count
    ends = [0.0] * sm_count
    for clocks in sorted(items, reverse=True):
        heapq.heapreplace(ends, ends[0] + clocks)
    return max(ends)


def useful_flops(problem: Problem) -> float:
    """Two per multiply-add that is not masked, of sequences of equal lengths."""
    if problem.form == "sparse" or not problem.causal:
        return float(problem.flops)
    batch = max(problem.batch, 1)
    q_len, k_len = problem.total_q / batch, problem.total_k / batch
    most = problem.window or k_len
    seen = sum(max(0.0, min(k_len, most, k_len - q_len + i + 1)) for i in range(round(q_len)))
    return 2.0 * problem.heads * batch * seen * (problem.d_qk + problem.d_v)


def _work(chosen: Plan) -> list[float]:
    """Blocks of keys of every work item, of sequences of equal lengths."""
    problem: Problem = chosen.problem
    batch = max(problem.batch, 1)
    if problem.form != "dense":
        rows, keys = _sparse_tile(chosen)
        q_len, k_len = problem.total_q // batch, problem.total_k // batch
        seen = [problem.topk] * q_len
        if problem.form == "latent":
            seen = [k_len - problem.causal * (q_len - 1 - i) for i in range(q_len)]
            seen = [n for token in seen for n in _ranges(chosen, token, q_len, k_len)]
        steps = [float(max(-(-n // keys), 1)) for n in seen]
        return steps * (batch * -(-problem.heads // rows))
    blocks = list(_dense_blocks(problem.total_q // batch, problem.total_k // batch, chosen))
    return blocks * (batch * problem.heads)


def _ranges(chosen: Plan, seen: int, q_len: int, k_len: int) -> Iterator[int]:
    """Keys of each work item of a token: those of its request's ranges that it sees."""
    space = getattr(chosen.variant, "ranges", None)
    if space is None or not space.rows:
        yield seen
        return
    rule, rows = LatentSplit(chosen.problem.heads, chosen.problem.d_v), q_len * chosen.problem.heads
    each = rule.keys_of_range(rows, k_len)
    for first in range(0, each * rule.ranges(rows, k_len), each):
        yield max(min(seen - first, each), 0)


def _share_of_bandwidth(problem: Problem, seconds: float, gbps: float) -> float:
    """What q, out and every key of the sequences, each moved once, take of the memory bandwidth."""
    if problem.form != "latent" or not gbps:
        return 0.0
    rows = FORMATS.get(problem.kv_dtype, BF16).layout(problem.d_nope, problem.d_rope)
    heads = problem.total_q * problem.heads * (problem.d_qk + problem.d_v)
    moved = problem.total_k * rows.row_bytes + heads * DTYPE_BYTES[problem.q_dtype]
    return moved / seconds / (gbps * 1e9)


def _sparse_tile(chosen: Plan) -> tuple[int, int]:
    """Heads of a work item and keys of a step."""
    assert chosen.block is not None
    return chosen.block.tile_rows * _ctas(chosen), chosen.block.tile_keys


def _ctas(chosen: Plan) -> int:
    """SMs that a work item takes."""
    if chosen.backend != "blackwell":
        return 1
    config, dense = chosen.config, chosen.problem.form == "dense"
    return int(1 + config.pair_cta) if dense else int(getattr(config, "ctas", 1))


def _as_installed(chosen: Plan) -> Plan:
    """What runs with the Triton that is installed: a pair of CTAs, or one at a time."""
    from openmla.dispatch import plan_for, triton_version

    if chosen.backend != "blackwell" or triton_version() >= chosen.kernel.first_triton:
        return chosen
    try:
        return plan_for(chosen.problem, target_by_name(chosen.target), chosen.backend)
    except Unsupported:
        return chosen


def _dense_blocks(q_len: int, k_len: int, chosen: Plan) -> Iterator[float]:
    """Blocks of keys by work item. Where a Blackwell kernel has two query tiles, the first skips
    the blocks that it does not see. Blocks before the window of a tile's first row are not visited;
    they are counted from the first key that any query sees."""
    config, rows = chosen.config, chosen.config.BM * _ctas(chosen)
    tiles = config.num_qo if chosen.backend == "blackwell" else 1
    keys, window = int(config.BN), chosen.problem.window
    origin = first_key(k_len - q_len + 1, window)

    def blocks(begin: int, end: int) -> int:
        seen = k_len - q_len + min(end, q_len) if chosen.problem.causal else k_len
        before = (first_key(k_len - q_len + begin + 1, window) - origin) // keys
        return max(-(-(min(seen, k_len) - origin) // keys) - before, 1)

    for row in range(0, q_len, rows):
        ends = [row + rows * (i + 1) // tiles for i in range(tiles)]
        yield sum(blocks(row, end) for end in ends) / tiles


@lru_cache(maxsize=64)
def _timed(item: Plan) -> tuple[float, dict[str, float]]:
    """Clocks of one work item, and how many each unit was busy."""
    from gluon_sim import intercept
    from openmla.aot.operands import operands_of
    from openmla.kernels.launch import launch

    rates = CHIPS[item.backend].rates()
    with intercept(schedule="timed", resident=1, rates=rates) as reports:
        launch(item, *operands_of(item.problem, "cpu"))
    (report,) = reports
    report.raise_if_bad()
    timeline = report.timeline
    assert timeline is not None
    # A pair of CTAs is timed by its first one.
    first = timeline.events[0].lane.split(" ")[0]
    bars = [e for e in timeline.events if e.lane == f"{first} {e.kind}" and e.kind in UNITS]
    busy = dict.fromkeys(UNITS, 0.0)
    for bar in bars:
        busy[bar.kind] += bar.end - bar.start
    return max(e.end for e in timeline.events), busy


def _one_item(chosen: Plan, blocks: int, items: int = 1) -> Plan:
    """The plan for one work item, or of a pair for some in a row; its operands will be zeros, so
    that no maximum moves."""
    problem, config = chosen.problem, chosen.config
    small = replace(
        problem,
        batch=1,
        page_size=0,
        table_keys=0,
        has_sink=False,
        has_q_scale=False,
        has_k_scale=False,
        has_topk_lengths=False,
        wants_lse=False,
        wants_max_logits=False,
    )
    shape: dict[str, Any]
    if problem.form != "dense":
        rows, step = _sparse_tile(chosen)
        heads, keys = min(problem.heads, rows), blocks * step
        if chosen.backend == "hopper":
            config = replace(config, heads=heads, cache_read=PLAIN)
        dtypes = dict.fromkeys(("kv_dtype", "v_dtype", "rope_dtype"), problem.q_dtype)
        shape = {"heads": heads, "total_q": items, **dtypes}
        shape["page_size" if problem.form == "latent" else "topk"] = keys
    else:
        keys = blocks * config.BN
        rope_dtype = problem.rope_dtype if problem.rope_dtype in DTYPE_BYTES else "bf16"
        rope = "shared" if problem.d_rope else "none"
        shape = {
            "heads": 1,
            "total_q": config.BM * _ctas(chosen),
            "causal": False,
            "window": 0,
            "rope": rope,
            "rope_dtype": rope_dtype,
        }
        if chosen.backend == "blackwell" and problem.v_dtype == "e4m3":
            shape["v_dtype"] = "bf16"  # as a pass before makes it
        if chosen.backend == "hopper":
            config = replace(config, heads=1, sm_count=1)  # one item, whose keys are not split
    small = replace(small, total_k=keys, self_attention=False, **shape)
    chip = target_by_name(chosen.target)
    target = f"{chip.arch}:2x{chip.smem_per_block}" if _ctas(chosen) == 2 else chosen.target
    return replace(chosen, problem=small, config=config, target=target, passed_over=())


def _lds_clocks(chosen: Plan) -> float:
    """Clocks of the LDS for a block of keys of a CDNA4 block: its copies, and what every wave
    reads, from twice as many banks. Two waves that share rows of scores have half of the keys and
    of V's columns each."""
    config, problem = chosen.config, chosen.problem
    assert chosen.block is not None
    keys = chosen.block.tile_keys
    if problem.form == "dense":
        size = config.config.element_bytes
        copied = problem.d_qk + problem.d_v * config.v_slot.element_bytes / size
        reads = config.NUM_WARPS * copied / config.across
    else:  # scores by 4 x 2 waves, output by 2 x 4
        size, copied = 2, problem.d_qk
        reads = config.num_warps * (problem.d_qk / 2 + problem.d_v / 4)
    wider = target_by_name(chosen.target).smem_banks / BANKS
    return float(keys * size * (copied + reads / wider) / SMEM_BYTES)


def _work_of_waves(chosen: Plan) -> list[int]:
    """Blocks of keys of every CDNA4 work item, of sequences of equal lengths."""
    problem: Problem = chosen.problem
    block = chosen.block
    assert block is not None
    if problem.form == "sparse":
        return [-(-problem.topk // block.tile_keys)] * (problem.total_q * chosen.config.row_blocks)
    batch, per_token = max(problem.batch, 1), problem.heads if problem.form == "latent" else 1
    q_len, k_len = problem.total_q // batch, problem.total_k // batch
    work = []
    for row in range(0, q_len * per_token, block.tile_rows):
        last = min(row + block.tile_rows, q_len * per_token) - 1
        seen = k_len - q_len + last // per_token + 1 if problem.causal else k_len
        work.append(max(-(-seen // block.tile_keys), 1))
    return work * (batch * problem.heads // per_token)


def _one_item_of_waves(chosen: Plan, blocks: int) -> Plan:
    """`_one_item` of a CDNA4 kernel. FP8 rows are dequantized as they are in the kernel."""
    problem, config, block = chosen.problem, chosen.config, chosen.block
    assert block is not None
    shape: dict[str, Any] = {"heads": 1, "total_q": block.tile_rows}
    if problem.form != "dense":
        heads, tokens = min(problem.heads, block.tile_rows), 1
        shape = {"heads": heads, "total_q": tokens}
        config = replace(config, num_heads=heads)
    elif problem.rope == "cache":
        shape |= {"rope": "shared", "rope_dtype": problem.q_dtype, "page_size": 0}
    keys = blocks * block.tile_keys
    small = replace(
        # There are as many keys as blocks, whatever the queries.
        problem,
        batch=1,
        causal=False,
        has_sink=False,
        has_topk_lengths=False,
        wants_lse=False,
        wants_max_logits=False,
        total_k=keys,
        self_attention=False,
        topk=keys if problem.topk else 0,
        **shape,
    )
    return replace(chosen, problem=small, config=config, passed_over=())
