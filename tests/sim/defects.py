"""Seeded synchronization defects: a text change to a kernel file, and what it breaks.

`kind` is what the simulator must report; None means that only the numbers are wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from openmla.sim import Kind


@dataclass(frozen=True)
class Defect:
    """Replace `old` (its first occurrence after `after`) by `new` in the kernel of `case`."""

    name: str
    case: str
    kind: Kind | None
    old: str
    new: str
    after: str = ""

    def apply(self, source: str) -> str:
        start = source.index(self.after)
        at = source.index(self.old, start)
        return source[:at] + self.new + source[at + len(self.old) :]


def load_mutant(defect: Defect, module: ModuleType, folder: Path) -> ModuleType:
    """The kernel module with the defect, as a module of its own."""
    source = defect.apply(Path(str(module.__file__)).read_text())
    name = f"mutant_{abs(hash(defect.name))}"
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[name] = mutant
    spec.loader.exec_module(mutant)
    return mutant


def _of(case: str, *rows: tuple[object, ...]) -> list[Defect]:
    return [Defect(str(name), case, *rest) for name, *rest in rows]  # type: ignore[arg-type]


NOTHING = "pass"

HOPPER_DENSE = _of(
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
    *_of(
        "tma_copy",
        ("a tile is stored before it is loaded", Kind.RACE, "mbarrier.wait(loaded, 0)", NOTHING),
        ("a TMA store is not waited for", Kind.IN_FLIGHT, "tma.store_wait(0)", NOTHING),
    ),
    *_of(
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
    *_of(
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
    *_of(
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
    *_of(
        "publish",
        (
            "no proxy fence before a TMA store",
            Kind.FENCE,
            "fence_async_shared()",
            NOTHING,
            "def fill",
        ),
        (
            "the box is announced before it is written",
            Kind.RACE,
            "    box.store(",
            "    fence_async_shared()\n    mbarrier.arrive(ready, count=1)\n    box.store(",
            "def fill",
        ),
    ),
    *_of(
        "ping_pong",
        (
            "the server does not wait for the reply",
            Kind.RACE,
            'asm_barrier("bar.sync 9, 256; mov.b32 $0, 0;")',
            'asm_barrier("bar.arrive 9, 256; mov.b32 $0, 0;")',
        ),
        (
            "the reader does not wait for the box",
            Kind.RACE,
            'asm_barrier("bar.sync 8, 256; mov.b32 $0, 0;")',
            'asm_barrier("bar.arrive 8, 256; mov.b32 $0, 0;")',
        ),
        (
            "the thread counts of a named barrier differ",
            Kind.ARRIVE,
            "bar.arrive 9, 256",
            "bar.arrive 9, 384",
        ),
        ("a reply is never sent", Kind.DEADLOCK, "bar.arrive 9, 256", "bar.arrive 10, 256"),
    ),
    *_of(
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

BLACKWELL = [
    *_of(
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
    *_of(
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
    *_of(
        "tcgen05_copy",
        ("the copy is never committed", Kind.DEADLOCK, "tcgen05_commit(bars.index(0))", NOTHING),
        ("no proxy fence before the copy", Kind.FENCE, "fence_async_shared()", NOTHING, "def copy"),
    ),
    *_of(
        "gather4",
        (
            "half the gathered bytes are expected",
            Kind.BYTES,
            "mbarrier.expect(bars.index(0), 32 * 64 * 2)",
            "mbarrier.expect(bars.index(0), 16 * 64 * 2)",
        ),
        ("the scatter is not waited for", Kind.IN_FLIGHT, "tma.store_wait(0)", NOTHING),
    ),
    *_of(
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
    *_of(
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
    *_of(
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

DEFECTS = [*HOPPER_DENSE, *HOPPER_FEATURES, *BLACKWELL, *CDNA4]
