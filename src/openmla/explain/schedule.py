"""A simple model of one tile's pipeline: who loads, who multiplies, who waits.

Three kinds of workers: a loader that fills the K/V ring in order, a matrix unit that does one
product at a time, and one softmax group per query tile (or per key block). Durations follow from
tile sizes and an architecture's rates. It is a model to look at, not a measurement, and it predicts
no speed: latencies, clocks and the epilogue are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from openmla.plan.blackwell_fa4 import FA4Config
from openmla.plan.blackwell_mla import MLAConfig
from openmla.plan.blackwell_sparse_shape import SparseShape
from openmla.plan.cdna4_16bit import V_RING_DEPTH, MlaPrefill16
from openmla.plan.cdna4_prefill import K_RING_DEPTH, MlaPrefillV2
from openmla.plan.cdna4_sparse import MlaSparse16
from openmla.plan.config import Plan
from openmla.plan.hopper_dense import HopperDenseConfig
from openmla.plan.hopper_sparse import HopperSparseConfig
from openmla.plan.portable import PortableConfig
from openmla.plan.target import target_by_name

# Multiply-adds count as two. bf16 flops per clock and SM: datasheet peak / SMs / boost clock.
_FLOPS_PER_CLOCK = {
    "sm_80": 2048,
    "sm_89": 1024,
    "sm_90": 4096,
    "sm_100": 8192,
    "sm_120": 512,
    "gfx942": 2048,
    "gfx950": 4096,
}
_DEFAULT_FLOPS = 1024
_EXPONENTIALS_PER_CLOCK = 16  # of one SM
_BYTES_PER_CLOCK = 64  # from L2 into one SM
BLOCKS = 6  # key blocks that are modeled


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What the model needs of a config."""

    groups: int
    """Softmax groups."""
    rows: int
    """Query rows of one group."""
    keys: int
    """Keys of one block."""
    d_qk: int
    d_v: int
    element: int
    k_slots: int
    v_slots: int
    """0 when V is part of the row that K is; -1 when K and V take turns in k_slots slots."""
    shares_keys: bool = True
    """Whether all groups work on every block, or take turns."""


@dataclass(frozen=True, slots=True)
class Step:
    """One worker's doing, in clocks of the model. `kind`: load, qk, softmax, pv."""

    worker: str
    kind: str
    block: int
    start: int
    end: int


def pipeline_of(plan: Plan) -> Pipeline | None:
    """The pipeline of a plan; None where there is none to show (CPU, reference)."""
    config = plan.config
    if isinstance(config, MLAConfig):
        config = config.fa4_config
    if isinstance(config, HopperDenseConfig):
        ring = config.num_kv_stages
        return Pipeline(config.num_qo, 64, config.BN, config.d_qk, config.d_v, 2, ring, ring)
    if isinstance(config, HopperSparseConfig):
        slots = 2 * config.num_kv_stages
        return Pipeline(2, 64, 64, config.width, config.latent, 2, slots, 0, shares_keys=False)
    if isinstance(config, PortableConfig):
        widths = config.qk_cols, config.out_cols, config.element
        v_slots = config.buffers if config.v_cols else 0
        return Pipeline(1, config.BM, config.BN, *widths, config.buffers, v_slots)
    return _other_pipeline(config)


def _other_pipeline(config: Any) -> Pipeline | None:
    if isinstance(config, FA4Config):
        widths = config.qk_depth, config.ov_depth, config.qkv_dtype_size
        ring = config.num_kv_stages
        v_slots = -1 if config.use_fused_kv else ring
        groups = 1 if config.single_o else 2
        rows = config.BM // config.num_qo
        return Pipeline(groups, rows, config.BN, *widths, ring, v_slots, config.num_qo == 2)
    if isinstance(config, MlaPrefillV2 | MlaPrefill16):
        deep = V_RING_DEPTH
        if isinstance(config, MlaPrefillV2):
            deep = config.v_ring_bytes // config.v_slot_bytes
        widths = config.D_QK, config.DEPTH, config.config.element_bytes
        return Pipeline(2, config.BM // 2, config.KV_BLOCK, *widths, K_RING_DEPTH, deep)
    if isinstance(config, MlaSparse16):
        widths = config.latent + config.rope, config.latent, 2
        return Pipeline(1, config.BM, config.B_TOPK, *widths, config.num_kv_stages, 0)
    if isinstance(config, SparseShape):
        rows, keys = config.PADDED_HEADS_PER_CTA, config.B_TOPK
        widths = config.qk_depth, config.v_depth, config.qkv_dtype_size
        return Pipeline(1, rows, keys, *widths, config.num_mbars, 0)
    return None


@dataclass
class _Clockwork:
    """The model while it runs: when each worker is free and each thing is done."""

    pipeline: Pipeline
    flops: int
    free: dict[str, int] = field(default_factory=dict)
    done: dict[tuple[str, int, int], int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def put(self, worker: str, kind: str, key: tuple[str, int, int], ready: int, cost: int) -> None:
        start = max(ready, self.free.get(worker, 0))
        self.free[worker] = self.done[key] = start + cost
        self.steps.append(Step(worker, kind, key[2], start, start + cost))

    def when(self, *keys: tuple[str, int, int]) -> int | None:
        """When all of these are done; None while one is unknown."""
        times = [self.done.get(key) for key in keys]
        known = [time for time in times if time is not None]
        return max(known, default=0) if len(known) == len(times) else None


def schedule(plan: Plan) -> list[Step]:
    """The first key blocks of one tile, by worker: "load", "matrix", "softmax 0", ..."""
    pipeline = pipeline_of(plan)
    if pipeline is None:
        return []
    arch = target_by_name(plan.target).arch
    work = _Clockwork(pipeline, _FLOPS_PER_CLOCK.get(arch, _DEFAULT_FLOPS) * 2 // pipeline.element)
    loads, products = _loads(pipeline), {g: _products(pipeline, g) for g in range(pipeline.groups)}
    while loads or any(products.values()):
        if loads and (ready := work.when(*_slot_release(pipeline, loads[0]))) is not None:
            _load(work, loads.pop(0), ready)
            continue
        if not _multiply(work, products):
            raise RuntimeError(f"the pipeline model is stuck: {pipeline}")
    return work.steps


def _blocks_of(pipeline: Pipeline, group: int) -> list[int]:
    return [j for j in range(BLOCKS) if pipeline.shares_keys or j % pipeline.groups == group]


def _groups_of(pipeline: Pipeline, block: int) -> list[int]:
    return [g for g in range(pipeline.groups) if block in _blocks_of(pipeline, g)]


def _loads(pipeline: Pipeline) -> list[tuple[str, int]]:
    kinds = ("k",) if pipeline.v_slots == 0 else ("k", "v")
    return [(kind, block) for block in range(BLOCKS) for kind in kinds]


def _products(pipeline: Pipeline, group: int) -> list[tuple[str, int]]:
    """QK of a block goes before PV of the one before it, where the ring has room for both."""
    blocks = _blocks_of(pipeline, group)
    if not _runs_ahead(pipeline):
        return [(kind, block) for block in blocks for kind in ("qk", "pv")]
    order = [("qk", blocks[0])]
    for before, block in pairwise(blocks):
        order += [("qk", block), ("pv", before)]
    return [*order, ("pv", blocks[-1])]


def _runs_ahead(pipeline: Pipeline) -> bool:
    """Whether the next block's K can arrive while this block's V is still needed."""
    if pipeline.v_slots > 0:
        return True
    if pipeline.v_slots < 0:
        return pipeline.k_slots > 2
    return pipeline.k_slots > (1 if pipeline.shares_keys else pipeline.groups)


def _slot_release(pipeline: Pipeline, load: tuple[str, int]) -> list[tuple[str, int, int]]:
    """What must be over before the load may overwrite its slot."""
    kind, block = load
    if pipeline.v_slots < 0:  # K and V take turns: the item `k_slots` before this one
        item = 2 * block + (kind == "v") - pipeline.k_slots
        user, old = ("pv" if item % 2 else "qk"), item // 2
    elif pipeline.v_slots == 0:
        user, old = "pv", block - pipeline.k_slots
    else:
        slots = pipeline.v_slots if kind == "v" else pipeline.k_slots
        user, old = ("pv" if kind == "v" else "qk"), block - slots
    return [(user, group, old) for group in _groups_of(pipeline, old)] if old >= 0 else []


def _load(work: _Clockwork, load: tuple[str, int], ready: int) -> None:
    kind, block = load
    columns = work.pipeline.d_v if kind == "v" else work.pipeline.d_qk
    size = work.pipeline.keys * columns * work.pipeline.element
    work.put("load", f"load {kind.upper()}", (kind, 0, block), ready, -(-size // _BYTES_PER_CLOCK))


def _multiply(work: _Clockwork, products: dict[int, list[tuple[str, int]]]) -> bool:
    """Issue the product that can start first, and the softmax behind a QK."""
    ready = []
    for group, queue in products.items():
        if queue and (at := work.when(*_needs(work.pipeline, group, queue[0]))) is not None:
            ready.append((at, group))
    if not ready:
        return False
    at, group = min(ready)
    kind, block = products[group].pop(0)
    pipeline = work.pipeline
    columns = pipeline.d_qk if kind == "qk" else pipeline.d_v
    cost = 2 * pipeline.rows * pipeline.keys * columns // work.flops
    work.put("matrix", kind, (kind, group, block), at, cost)
    if kind == "qk":
        cost = pipeline.rows * pipeline.keys // _EXPONENTIALS_PER_CLOCK
        scored = work.done["qk", group, block]
        work.put(f"softmax {group}", "softmax", ("softmax", group, block), scored, cost)
    return True


def _needs(pipeline: Pipeline, group: int, product: tuple[str, int]) -> list[tuple[str, int, int]]:
    kind, block = product
    if kind == "pv":
        v = "v" if pipeline.v_slots else "k"
        return [("softmax", group, block), (v, 0, block)]
    earlier = [j for j in _blocks_of(pipeline, group) if j < block]
    # The scores' registers are free once the softmax before has read them.
    return [("k", 0, block), *(("softmax", group, j) for j in earlier[-1:])]


def busy_share(steps: list[Step], worker: str) -> float:
    """The part of the modeled time in which a worker works."""
    if not steps:
        return 0.0
    span = max(step.end for step in steps) - min(step.start for step in steps)
    return sum(step.end - step.start for step in steps if step.worker == worker) / span
