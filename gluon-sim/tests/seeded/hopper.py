"""Seeded defects of the Hopper kernels."""

from gluon_sim import Kind
from seeded.defect import NOTHING, of

HOPPER_DENSE = of(
    "hopper_dense",
    ("Q is not waited for", Kind.RACE, "mbarrier.wait(q_full.index(WHO), visit & 1)", NOTHING),
    (
        "Q is waited for in the wrong phase",
        Kind.RACE,
        "q_full.index(WHO), visit & 1",
        "q_full.index(WHO), (visit & 1) ^ 1",
    ),
    ("K is not waited for", Kind.RACE, "mbarrier.wait(k_full.index(stage), phase)", NOTHING),
    (
        "K is waited for in the wrong phase",
        Kind.RACE,
        "mbarrier.wait(k_full.index(stage), phase)",
        "mbarrier.wait(k_full.index(stage), phase ^ 1)",
    ),
    ("V is not waited for", Kind.RACE, "mbarrier.wait(v_full.index(stage), phase)", NOTHING),
    (
        "the wait for V names the other stage",
        Kind.RACE,
        "mbarrier.wait(v_full.index(stage), phase)",
        "mbarrier.wait(v_full.index((stage + 1) % ST), phase)",
    ),
    (
        "Q is loaded before it is free",
        Kind.RACE,
        "mbarrier.wait(q_empty.index(w), (visit & 1) ^ 1)",
        NOTHING,
    ),
    (
        "K is loaded before it is free",
        Kind.RACE,
        "mbarrier.wait(k_empty.index(stage), phase ^ 1)",
        NOTHING,
    ),
    (
        "V is loaded before it is free",
        Kind.RACE,
        "mbarrier.wait(v_empty.index(stage), phase ^ 1)",
        NOTHING,
    ),
    (
        "the producer waits for the phase that is in progress",
        Kind.DEADLOCK,
        "mbarrier.wait(k_empty.index(stage), phase ^ 1)",
        "mbarrier.wait(k_empty.index(stage), phase)",
    ),
    (
        "K is released before its product is done",
        Kind.RACE,
        "S = warpgroup_mma_wait(0, deps=(S2,))\n"
        "                mbarrier.arrive(k_empty.index(stage), count=1)",
        "mbarrier.arrive(k_empty.index(stage), count=1)\n"
        "                S = warpgroup_mma_wait(0, deps=(S2,))",
    ),
    # Triton 3.6 adds no barrier to an arrive that follows one, whatever was waited for between.
    (
        "the warps meet and then wait for the product",
        Kind.RACE,
        "S = warpgroup_mma_wait(0, deps=(S2,))\n",
        "gl.thread_barrier()\n                S = warpgroup_mma_wait(0, deps=(S2,))\n",
    ),
    (
        "V is released before its product is done",
        Kind.RACE,
        "acc = warpgroup_mma_wait(0, deps=(acc_next,))\n"
        "                mbarrier.arrive(v_empty.index(stage), count=1)",
        "mbarrier.arrive(v_empty.index(stage), count=1)\n"
        "                acc = warpgroup_mma_wait(0, deps=(acc_next,))",
    ),
    (
        "Q is released in the middle of a tile",
        Kind.RACE,
        "mbarrier.wait(q_full.index(WHO), visit & 1)",
        "mbarrier.wait(q_full.index(WHO), visit & 1)\n"
        "            mbarrier.arrive(q_empty.index(WHO), count=1)",
    ),
    (
        "K is never released",
        Kind.DEADLOCK,
        "mbarrier.arrive(k_empty.index(stage), count=1)",
        NOTHING,
    ),
    (
        "V is never released",
        Kind.DEADLOCK,
        "mbarrier.arrive(v_empty.index(stage), count=1)",
        NOTHING,
    ),
    (
        "only one consumer is counted for K",
        Kind.RACE,
        "mbarrier.init(k_empty.index(i), count=2)",
        "mbarrier.init(k_empty.index(i), count=1)",
    ),
    (
        "three consumers are counted for V",
        Kind.ARRIVE,
        "mbarrier.init(v_empty.index(i), count=2)",
        "mbarrier.init(v_empty.index(i), count=3)",
    ),
    (
        "K is released with two arrivals",
        Kind.ARRIVE,
        "mbarrier.arrive(k_empty.index(stage), count=1)",
        "mbarrier.arrive(k_empty.index(stage), count=3)",
    ),
    (
        "the rope part of K is not expected",
        Kind.BYTES,
        "k_full.index(stage), BN * 192 * 2",
        "k_full.index(stage), BN * 128 * 2",
    ),
    (
        "more of V is expected than comes",
        Kind.BYTES,
        "v_full.index(stage), BN * 128 * 2",
        "v_full.index(stage), BN * 192 * 2",
    ),
    (
        "more of Q is expected than comes",
        Kind.BYTES,
        "q_full.index(w), 64 * 192 * 2",
        "q_full.index(w), 64 * 256 * 2",
    ),
    (
        "V is loaded and never expected",
        Kind.BYTES,
        "mbarrier.expect(v_full.index(stage), BN * 128 * 2)",
        NOTHING,
    ),
    (
        "scores are used while their product is in flight",
        Kind.ACCUMULATOR,
        "S = warpgroup_mma_wait(0, deps=(S2,))",
        "S = warpgroup_mma_wait(1, deps=(S2,))",
    ),
    (
        "the output is used while its product is in flight",
        Kind.ACCUMULATOR,
        "acc = warpgroup_mma_wait(0, deps=(acc_next,))",
        "acc = warpgroup_mma_wait(1, deps=(acc_next,))",
    ),
    (
        "the output is not rescaled",
        None,
        "acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OL))[:, None]",
        NOTHING,
    ),
    ("the sum is not rescaled", None, "denom * alpha + gl.sum(P, 1)", "denom + gl.sum(P, 1)"),
    (
        "the rope part of K goes to the other stage",
        Kind.RACE,
        "k_full.index(stage), k_rope.index(stage))",
        "k_full.index(stage), k_rope.index((stage + 1) % ST))",
    ),
    (
        "the product reads V of the other stage",
        Kind.RACE,
        "warpgroup_mma(Pb, v.index(stage), acc, is_async=True)",
        "warpgroup_mma(Pb, v.index((stage + 1) % ST), acc, is_async=True)",
    ),
    (
        "the producer stops one block early",
        Kind.DEADLOCK,
        "for block in range(0, blocks):",
        "for block in range(0, blocks - 1):",
        "def producer",
    ),
    (
        "the producer loads one block too many",
        Kind.IN_FLIGHT,
        "for block in range(0, blocks):",
        "for block in range(0, blocks + 1):",
        "def producer",
    ),
    (
        "rows past the end of a sequence are stored",
        Kind.BOUNDS,
        "result, mask=(rows < rows_left)[:, None])",
        "result, mask=(rows < rows_left + 1)[:, None])",
    ),
    (
        "the last row of a sequence is not stored",
        Kind.OUTPUT,
        "result, mask=(rows < rows_left)[:, None])",
        "result, mask=(rows < rows_left - 1)[:, None])",
    ),
    (
        "the phase of K is not advanced after the ring wraps",
        Kind.DEADLOCK,
        "phase = (it // ST) & 1",
        "phase = 0",
        "def producer",
    ),
)

HOPPER_FEATURES = [
    *of(
        "tma_copy",
        ("a tile is stored before it is loaded", Kind.RACE, "mbarrier.wait(loaded, 0)", NOTHING),
        ("a TMA store is not waited for", Kind.IN_FLIGHT, "tma.store_wait(0)", NOTHING),
    ),
    *of(
        "wgmma_bf16_registers",
        (
            "a product is stored without a wait",
            Kind.ACCUMULATOR,
            "acc = warpgroup_mma_wait(0, deps=(acc,))",
            NOTHING,
        ),
        (
            "registers are loaded before the tile",
            Kind.RACE,
            "mbarrier.wait(loaded, 0)",
            NOTHING,
            "def wgmma",
        ),
    ),
    *of(
        "gather_cp_async",
        (
            "no proxy fence after cp.async",
            Kind.FENCE,
            "fence_async_shared()",
            NOTHING,
            "def gather",
        ),
        (
            "half the threads are counted",
            Kind.ARRIVE,
            "mbarrier.init(landed, count=128)",
            "mbarrier.init(landed, count=64)",
        ),
        ("gathered rows are not waited for", Kind.RACE, "mbarrier.wait(landed, 0)", NOTHING),
        (
            "negative indices are gathered",
            Kind.BOUNDS,
            "valid = (index >= 0) & (index < count)",
            "valid = index < count",
        ),
    ),
    *of(
        "grouped_cp_async",
        (
            "the wait leaves one group too many",
            Kind.RACE,
            "async_copy.wait_group(1)",
            "async_copy.wait_group(2)",
        ),
        (
            "copies are never committed",
            Kind.RACE,
            "    async_copy.commit_group()\n",
            "",
            "def fetch",
        ),
        (
            "the next block goes to the stage in use",
            Kind.RACE,
            "ring.index((block + 1) % 2)",
            "ring.index(block % 2)",
        ),
    ),
    *of(
        "publish",
        (
            "no proxy fence before a TMA store",
            Kind.FENCE,
            "fence_async_shared()",
            NOTHING,
            "def fill",
        ),
        (
            "the box is fenced before it is written",
            Kind.FENCE,
            "    box.store((rows[:, None] * 2 + columns[None, :]).to(gl.bfloat16))\n"
            "    fence_async_shared()\n",
            "    fence_async_shared()\n"
            "    box.store((rows[:, None] * 2 + columns[None, :]).to(gl.bfloat16))\n",
        ),
        (
            "the box is announced before it is written",
            Kind.RACE,
            "    box.store(",
            "    fence_async_shared()\n    mbarrier.arrive(ready, count=1)\n    box.store(",
            "def fill",
        ),
    ),
    *of(
        "pipeline",
        (
            "a stage is released before it is read",
            Kind.RACE,
            "        total += ring.index(stage).load(BL).to(gl.float32)\n"
            "        mbarrier.arrive(empty.index(stage), count=1)\n",
            "        mbarrier.arrive(empty.index(stage), count=1)\n"
            "        total += ring.index(stage).load(BL).to(gl.float32)\n",
        ),
        (
            "a barrier is never initialized",
            Kind.BARRIER,
            "mbarrier.init(empty.index(i), count=1)",
            NOTHING,
            "def pipeline",
        ),
    ),
]
