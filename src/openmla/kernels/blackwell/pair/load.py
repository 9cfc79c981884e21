"""The load partition: Q of a token, then K and V of every step, in the order of the products.

Q of the next token comes among the last V of this one, when all products with Q are done: its
tiles at once, before the next K, would keep that K waiting.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import mbarrier, tma

from openmla.kernels.blackwell.pair.items import (
    KEYS,
    ROWS,
    after,
    item_of,
    items_of,
    step_rows,
    token_of,
)
from openmla.kernels.blackwell.sparse.load import offsets_layout
from openmla.kernels.gluon.boxes import load_rows
from openmla.kernels.gluon.compat import reinterpret

GATHERED = gl.constexpr(64)  # columns of a tile of Q and K, keys of a tile of V


@gluon.jit
def load_q(desc, q_smem, bar, token, QUARTER: gl.constexpr):
    """A quarter of a token's Q: two tiles, and a ninth in the last one. The caller has announced
    the bytes."""
    NINTH: gl.constexpr = q_smem.shape[0] % 8 if QUARTER == 3 else 0
    for t in gl.static_range(2 + NINTH):
        tile = q_smem.index(2 * QUARTER + t)
        load_rows(desc, token, 0, (2 * QUARTER + t) * GATHERED, bar, tile)


@gluon.jit
def load(sources, smem, bars, lists, pool, INDEXING: gl.constexpr, V_TILE: gl.constexpr):
    """The load partition, for all items of a pair.

    Sources `sources`, Tiles `smem`, Barriers `bars`; TokenLists `lists` and Pool `pool` as in
    sparse/records.py.
    """
    q_smem, ring = smem.q, smem.ring
    q_full, full, empty = bars.q_full, bars.full, bars.empty
    DTYPE: gl.constexpr = ring.dtype
    BYTES: gl.constexpr = DTYPE.primitive_bitwidth // 8
    TILES: gl.constexpr = q_smem.shape[0]
    SLOTS: gl.constexpr = ring.shape[0]
    PARTS: gl.constexpr = KEYS // GATHERED
    SLOT_BYTES: gl.constexpr = KEYS // 2 * GATHERED * BYTES
    DIVIDED: gl.constexpr = offsets_layout(gl.num_warps(), 2, True)
    ALL: gl.constexpr = offsets_layout(gl.num_warps(), 2)
    values = reinterpret(ring, DTYPE, [SLOTS, GATHERED, 256], V_TILE)
    slot = gl.program_id(0) * 0
    phase = slot + 1
    turn = slot
    Q_BYTES: gl.constexpr = ROWS // 2 * TILES * GATHERED * BYTES
    total = items_of(lists)
    if gl.program_id(0) < total:
        mbarrier.expect(q_full.index(0), Q_BYTES)
        first_token = token_of(gl.program_id(0), lists, INDEXING)
        for quarter in gl.static_range(4):
            load_q(sources.q, q_smem, q_full.index(0), first_token, quarter)
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        item = item_of(number, lists, INDEXING)
        steps = item.steps
        following = number + gl.num_programs(0)
        next_token = item.token
        for k in range(0, steps + 1):
            if k < steps:
                here = step_rows(item, lists, pool, k, 0, KEYS, DIVIDED, INDEXING)
                for t in gl.static_range(TILES):
                    mbarrier.wait(empty.index(slot), phase)
                    mbarrier.expect(full.index(slot), SLOT_BYTES)
                    tma.async_gather(
                        sources.k, here, t * GATHERED, full.index(slot), ring.index(slot)
                    )
                    slot, phase = after(slot, phase, SLOTS)
            if k == 0:  # the next item is looked for while copies are in flight
                next_token = token_of(following, lists, INDEXING)
            if k > 0:
                last = (k == steps) & (following < total)
                for part in gl.static_range(PARTS):
                    if part == PARTS // 2:  # noqa: SIM102 - decided when compiled
                        if last:
                            mbarrier.wait(bars.q_free.index(0), turn & 1)
                            mbarrier.expect(q_full.index(0), Q_BYTES)
                    here = step_rows(
                        item, lists, pool, k - 1, part * GATHERED, GATHERED, ALL, INDEXING
                    )
                    for atom in gl.static_range(2):
                        mbarrier.wait(empty.index(slot), phase)
                        mbarrier.expect(full.index(slot), SLOT_BYTES)
                        tma.async_gather(
                            sources.v, here, atom * 256, full.index(slot), values.index(slot)
                        )
                        slot, phase = after(slot, phase, SLOTS)
                        if part >= PARTS // 2:  # noqa: SIM102 - decided when compiled
                            if last:
                                q_bar = q_full.index(0)
                                load_q(sources.q, q_smem, q_bar, next_token, 2 * part + atom - 4)
        turn += 1
