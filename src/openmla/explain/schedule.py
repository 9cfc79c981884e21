"""A simple model of one tile's pipeline: who loads, who multiplies, who waits.

Three kinds of workers: a loader that fills the K/V ring in order, a matrix unit that does one
product at a time, and one softmax group per query tile (or per key block). Durations follow from
tile sizes and an architecture's rates. It is a model to look at, not a measurement, and it predicts
no speed: latencies, clocks and the epilogue are not in it.
"""

from dataclasses import dataclass, field
from itertools import pairwise

from openmla.planning.family import Pipeline
from openmla.planning.registry import Plan
from openmla.planning.target import target_by_name

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
class Step:
    """One worker's doing, in clocks of the model. `kind`: load, qk, softmax, pv."""

    worker: str
    kind: str
    block: int
    start: int
    end: int


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
    pipeline = plan.block.pipeline if plan.block else None
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
    size = work.pipeline.keys * columns * work.pipeline.element_of(kind)
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
    # `flops` are those of K's type; V's may be wider.
    wider = pipeline.element_of(kind[-1]) // pipeline.element
    cost = 2 * pipeline.rows * pipeline.keys * columns * wider // work.flops
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
