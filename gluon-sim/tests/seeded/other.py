"""Seeded defects of the Blackwell and CDNA4 kernels."""

from gluon_sim import Kind
from seeded.defect import NOTHING, of

BLACKWELL = [
    *of(
        "blackwell_attention",
        ("Q is not waited for", Kind.RACE, "mbarrier.wait(q_full.index(0), 0)", NOTHING),
        ("K is not waited for", Kind.RACE, "mbarrier.wait(k_full.index(stage), phase)", NOTHING),
        ("V is not waited for", Kind.RACE, "mbarrier.wait(v_full.index(stage), phase)", NOTHING),
        ("P is not waited for", Kind.RACE, "mbarrier.wait(p_full.index(0), block & 1)", NOTHING),
        ("S is not waited for", Kind.RACE, "mbarrier.wait(s_full.index(0), block & 1)", NOTHING),
        (
            "S is waited for in the wrong phase",
            Kind.RACE,
            "mbarrier.wait(s_full.index(0), block & 1)",
            "mbarrier.wait(s_full.index(0), (block & 1) ^ 1)",
        ),
        (
            "O is read before the last product",
            Kind.RACE,
            "mbarrier.wait(o_full.index(0), (blocks - 1) & 1)",
            NOTHING,
        ),
        (
            "K is loaded before it is free",
            Kind.RACE,
            "mbarrier.wait(k_empty.index(stage), free)",
            NOTHING,
        ),
        (
            "V is loaded before it is free",
            Kind.RACE,
            "mbarrier.wait(v_empty.index(stage), free)",
            NOTHING,
        ),
        (
            "no commit releases K",
            Kind.DEADLOCK,
            "scored = [s_full.index(0), k_empty.index(stage)]",
            "scored = [s_full.index(0)]",
        ),
        (
            "V is released by the commit of the scores",
            Kind.RACE,
            "scored = [s_full.index(0), k_empty.index(stage)]",
            "scored = [s_full.index(0), k_empty.index(stage), v_empty.index(stage)]",
        ),
        (
            "no commit announces O",
            Kind.DEADLOCK,
            "added = [o_full.index(0), v_empty.index(stage)]",
            "added = [v_empty.index(stage)]",
        ),
        (
            "P is announced before O is rescaled",
            Kind.RACE,
            "        if block > 0:\n            mbarrier.wait(o_full",
            "        mbarrier.arrive(p_full.index(0), count=1)\n"
            "        if block > 0:\n            mbarrier.wait(o_full",
        ),
        (
            "two arrivals are expected for P",
            Kind.DEADLOCK,
            "mbarrier.init(p_full.index(0), count=1)",
            "mbarrier.init(p_full.index(0), count=2)",
        ),
        (
            "the bytes of Q are doubled",
            Kind.BYTES,
            "mbarrier.expect(q_full.index(0), 128 * 64 * 2)",
            "mbarrier.expect(q_full.index(0), 128 * 64 * 4)",
        ),
        (
            "the product reads V of the other stage",
            Kind.RACE,
            "tcgen05_mma(p, v.index(stage), o,",
            "tcgen05_mma(p, v.index((stage + 1) % ST), o,",
        ),
        ("O is not rescaled", None, "o.store(o.load(O_REGS) * factor)", NOTHING),
        (
            "the first product adds to what was there",
            Kind.UNWRITTEN,
            "tcgen05_mma(p, v.index(stage), o, use_acc=block > 0",
            "tcgen05_mma(p, v.index(stage), o, use_acc=True",
        ),
    ),
    *of(
        "blackwell_pair",
        (
            "the halves are not waited for",
            Kind.RACE,
            "mbarrier.wait(loaded.index(stage), phase)",
            NOTHING,
        ),
        (
            "a stage is loaded while the pair reads it",
            Kind.RACE,
            "mbarrier.wait(multiplied.index(stage), phase ^ 1)",
            NOTHING,
        ),
        (
            "the accumulator is read before the last product",
            Kind.RACE,
            "mbarrier.wait(multiplied.index(last & 1), (last >> 1) & 1)",
            NOTHING,
        ),
        (
            "only A is expected",
            Kind.BYTES,
            "128 * 64 * 2 + 64 * 64 * 2",
            "128 * 64 * 2",
        ),
    ),
    *of(
        "tcgen05_copy",
        ("the copy is never committed", Kind.DEADLOCK, "tcgen05_commit(bars.index(0))", NOTHING),
        ("no proxy fence before the copy", Kind.FENCE, "fence_async_shared()", NOTHING, "def copy"),
    ),
    *of(
        "gather4",
        (
            "half the gathered bytes are expected",
            Kind.BYTES,
            "mbarrier.expect(bars.index(0), 32 * 64 * 2)",
            "mbarrier.expect(bars.index(0), 16 * 64 * 2)",
        ),
        ("the scatter is not waited for", Kind.IN_FLIGHT, "tma.store_wait(0)", NOTHING),
    ),
    *of(
        "tcgen05_scaled",
        (
            "operands are not waited for",
            Kind.RACE,
            "mbarrier.wait(bars.index(0), 0)",
            NOTHING,
            "def scaled",
        ),
    ),
]

CDNA4 = [
    *of(
        "cdna4_attention",
        (
            "the wait leaves one group too many",
            Kind.RACE,
            "async_copy.wait_group(1)",
            "async_copy.wait_group(2)",
        ),
        ("there is no wait", Kind.RACE, "async_copy.wait_group(1)", NOTHING),
        ("loads are never committed", Kind.RACE, "    async_copy.commit_group()\n", ""),
        (
            "the next block goes to the stage in use",
            Kind.RACE,
            "fetch(k.index(1 - stage), v.index(1 - stage)",
            "fetch(k.index(stage), v.index(stage)",
        ),
        (
            "V is read from the other stage",
            Kind.RACE,
            "v.index(stage).load(DB)",
            "v.index(1 - stage).load(DB)",
        ),
        (
            "K and V are swapped to different stages",
            Kind.RACE,
            "fetch(k.index(1 - stage), v.index(1 - stage)",
            "fetch(k.index(1 - stage), v.index(stage)",
        ),
        ("the last loads are still in flight", Kind.IN_FLIGHT, "async_copy.wait_group(0)", NOTHING),
        ("the output is not rescaled", None, "acc = acc * alpha[:, None]", NOTHING),
        (
            "keys past the end are loaded",
            Kind.BOUNDS,
            "inside = (keys < k_len)[:, None]",
            "inside = (keys < k_len + 64)[:, None]",
        ),
    ),
    *of(
        "cdna4_mfma",
        ("V is not waited for", Kind.RACE, "async_copy.wait_group(0)", NOTHING),
        (
            "the result is stored one row too low",
            Kind.BOUNDS,
            "out_rows = gl.arange(0, 128, gl.SliceLayout(1, ML))",
            "out_rows = gl.arange(0, 128, gl.SliceLayout(1, ML)) + 1",
        ),
    ),
]
