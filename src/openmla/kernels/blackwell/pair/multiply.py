# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The products of a pair, all issued by one warp of CTA 0.

Step k multiplies Q with the keys of step k, then the weights of step k - 1 with their V: the
softmax of a step runs under the products of the next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    mbarrier,
    tcgen05_commit,
    tcgen05_mma,
)

from openmla.kernels.blackwell.pair.items import KEYS, after, item_of, items_of
from openmla.kernels.blackwell.pair.load import GATHERED
from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import opaque_zero


@gluon.jit
def multiply(smem, tmem, bars, lists, INDEXING: gl.constexpr, V_TILE: gl.constexpr):
    """The multiply partition, for all items of a pair.

    Tiles `smem`, TensorMemory `tmem`, Barriers `bars`, TokenLists `lists`.
    """
    q_smem, ring, p_smem = smem.q, smem.ring, smem.p
    full, empty = bars.full, bars.empty
    TILES: gl.constexpr = q_smem.shape[0]
    SLOTS: gl.constexpr = ring.shape[0]
    PARTS: gl.constexpr = p_smem.shape[1] // KEYS
    values = reinterpret(ring, ring.dtype, [SLOTS, GATHERED, 256], V_TILE)
    slot = gl.program_id(0) * 0
    phase = slot
    turn = slot
    done = slot  # steps of the items before
    for number in range(gl.program_id(0), items_of(lists), gl.num_programs(0)):
        steps = item_of(number, lists, INDEXING).steps
        mbarrier.wait(bars.q_full.index(0), turn & 1)
        for k in range(0, steps + 1):
            step = done + k
            if k < steps:
                scores = tmem.scores.index(step % 2)
                for t in gl.static_range(TILES):
                    mbarrier.wait(full.index(slot), phase)
                    q = q_smem.index(opaque_zero() + t)
                    tcgen05_mma(q, ring.index(slot).permute((1, 0)), scores, use_acc=t > 0)
                    tcgen05_commit(empty.index(slot))
                    slot, phase = after(slot, phase, SLOTS)
                tcgen05_commit(bars.s_full.index(step % 2))
                if k == steps - 1:
                    tcgen05_commit(bars.q_free.index(0))
            if k > 0:
                mbarrier.wait(bars.p_full.index(0), (step - 1) & 1)
                for part in gl.static_range(KEYS // GATHERED):
                    for atom in gl.static_range(2):
                        mbarrier.wait(full.index(slot), phase)
                        for i in gl.static_range(PARTS):
                            weights = p_smem.slice(i * KEYS + part * GATHERED, GATHERED, dim=1)
                            kept = (k > 1) | (part > 0) | (i > 0)
                            O = tmem.outputs[atom]
                            tcgen05_mma(weights, values.index(slot), O, use_acc=kept)
                        tcgen05_commit(empty.index(slot))
                        slot, phase = after(slot, phase, SLOTS)
                tcgen05_commit(bars.o_done.index(0))
        done += steps
        turn += 1
