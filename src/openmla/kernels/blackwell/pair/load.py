"""The load partition: Q of a token, then K and V of every step, in the order of the products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from openmla.kernels.blackwell.pair.items import KEYS, ROWS, after, item_of
from openmla.kernels.blackwell.sparse.load import offsets_layout
from openmla.kernels.blackwell.sparse.rows import descriptor_rows
from openmla.kernels.gluon.boxes import load_rows
from openmla.kernels.gluon.compat import reinterpret

GATHERED = gl.constexpr(64)  # columns of a tile of Q and K, keys of a tile of V


@gluon.jit
def load(
    descs, smem, bars, work, pool, HOW: gl.constexpr, V_TILE: gl.constexpr
):  # fmt: skip
    """All items of a pair."""
    q_desc, k_desc, v_desc = descs
    q_smem, ring = smem
    q_full, q_free, full, empty = bars
    rows, page_step, row_step = pool
    DTYPE: gl.constexpr = ring.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    TILES: gl.constexpr = q_smem.shape[0]
    SLOTS: gl.constexpr = ring.shape[0]
    SLOT_BYTES: gl.constexpr = KEYS // 2 * GATHERED * BYTES
    DIVIDED: gl.constexpr = offsets_layout(gl.num_warps(), 2, True)
    ALL: gl.constexpr = offsets_layout(gl.num_warps(), 2)
    values = reinterpret(ring, DTYPE, [SLOTS, GATHERED, 256], V_TILE)
    slot = gl.program_id(0) * 0
    phase = slot + 1
    turn = slot
    for number in range(gl.program_id(0), work[5], gl.num_programs(0)):
        token, line, count, steps = item_of(number, work, HOW)
        keys = (line, count, rows, page_step, row_step)
        mbarrier.wait(q_free.index(0), (turn & 1) ^ 1)
        mbarrier.expect(q_full.index(0), ROWS // 2 * TILES * GATHERED * BYTES)
        for t in gl.static_range(TILES):
            load_rows(q_desc, token, 0, t * GATHERED, q_full.index(0), q_smem.index(t))
        for k in range(0, steps + 1):
            if k < steps:
                here = descriptor_rows(keys, k * KEYS, KEYS, DIVIDED, HOW)
                for t in gl.static_range(TILES):
                    mbarrier.wait(empty.index(slot), phase)
                    mbarrier.expect(full.index(slot), SLOT_BYTES)
                    tma.async_gather(k_desc, here, t * GATHERED, full.index(slot), ring.index(slot))
                    slot, phase = after(slot, phase, SLOTS)
            if k > 0:
                for part in gl.static_range(KEYS // GATHERED):
                    first = (k - 1) * KEYS + part * GATHERED
                    here = descriptor_rows(keys, first, GATHERED, ALL, HOW)
                    for atom in gl.static_range(2):
                        mbarrier.wait(empty.index(slot), phase)
                        mbarrier.expect(full.index(slot), SLOT_BYTES)
                        tma.async_gather(
                            v_desc, here, atom * 256, full.index(slot), values.index(slot)
                        )
                        slot, phase = after(slot, phase, SLOTS)
        turn += 1
