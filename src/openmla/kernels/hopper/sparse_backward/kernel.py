"""Gradients of the sparse form on Hopper: one walk over a list makes all of them. bf16.

A program has 64 heads of a query and walks the query's list, 64 entries at a time. Five products:

    S = Q K^T    dP = d_out V^T    d_q += dS K    part = dS^T Q + P^T d_out

V is the first columns of K. What an entry gives to its row, `part`, is complete in a step, because
the heads of the program are all summed by its products: it is rounded and written to a workspace,
where row_sum.py adds the entries of a row in the order of queries. d_q stays in registers.

| partition | warps | does |
|---|---|---|
| left (default) | 4 | S, dP, P and dS of entries 0 … 31; d_q and parts of the left half of columns |
| right | 4 | the same of entries 32 … 63, and of the right half: of latent and of rope columns |
| producer | 4 | loads Q and d_out, gathers rows (gather.py) |

| barrier | number | completed by (count) | waited for by |
|---|---|---|---|
| q_ready | 1 | TMA bytes of Q and d_out (1) | left, right |
| k_ready | 2 | threads of the producer: left latent columns, then right and rope columns (128) | left, right |
| k_empty | 2 | left, right: the last product with its columns has ended (1) | producer |
| valid_ready | 1 | producer: the validity of a block is written (1) | left, right |
| bar 8 (named) | | both: the products that read P and dS have ended; P and dS are written | both |

| shared memory | bytes (512 + 64) |
|---|---|
| Q, d_out, K | 64 x (576 + 512 + 576) x 2 = 212992 |
| P, dS | 2 x 64 x 64 x 2 = 16384 |
| bias | 256 |

Rows are given back before the products of `part`, which do not read them: the next block is gathered
meanwhile, so one block of rows is enough. dS has the scale in it: d_q and part are right as summed.

The columns of a part are in the order of registers: a thread has 8 of every 32 columns, two of
every eight, and writes them side by side, 16 bytes. row_sum.py puts them back.
"""

# ruff: noqa: E501  (rows of tables)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from openmla.kernels.gluon.barriers import barriers
from openmla.kernels.gluon.scores import opaque_zero, signed
from openmla.kernels.hopper.accumulator import VECTOR, wide
from openmla.kernels.hopper.latent.signals import signal, wait_tile
from openmla.kernels.hopper.sparse_backward.gather import producer
from openmla.kernels.hopper.sparse_backward.records import (
    Barriers,
    ColumnTiles,
    Descriptors,
    How,
    Lists,
    Parts,
    Queries,
    QueryGradient,
    Rows,
    RowStatistics,
    Smem,
    Sources,
    Statistics,
    WorkItem,
)

ENTRIES = gl.constexpr(64)  # of a step
OWN = gl.constexpr(32)  # entries whose scores a warp-group computes
CHUNK = gl.constexpr(64)  # columns of a panel of Q and d_out, and of a part in registers
PLUS_INF = gl.constexpr(float("inf"))
SIDE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
# A part's rows as they are written: 8 neighboring columns of a thread, 4 threads side by side.
WRITTEN = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
WRITTEN_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)


@gluon.jit
def meet():
    """Both warp-groups wait for each other."""
    signal("bar.sync 8, 256; mov.b32 $0, 0;")


@gluon.jit
def statistics_of(stats, item):
    """RowStatistics of 64 heads; weights of heads that there are not are 0. stats: Statistics."""
    RL: gl.constexpr = gl.SliceLayout(1, SIDE_LAYOUT)
    head = item.head_block * 64 + gl.arange(0, 64, RL)
    here = item.token.to(gl.int64) * item.heads + head
    total = gl.load(stats.total + here, mask=head < item.heads, other=PLUS_INF)
    delta = gl.load(stats.delta + here, mask=head < item.heads, other=0.0)
    return RowStatistics(total=total, delta=delta)


@gluon.jit
def own_keys(tile, PANEL: gl.constexpr, SIDE: gl.constexpr):
    """64 columns of the rows of a warp-group's own entries as a right operand: [64, OWN]."""
    panel = tile.index(opaque_zero()).slice(PANEL * CHUNK, CHUNK, dim=1)
    return panel.slice(SIDE * OWN, OWN, dim=0).permute((1, 0))


@gluon.jit
def score_half(S, dP, k, smem, FIRST: gl.constexpr, PANELS: gl.constexpr, SIDE: gl.constexpr):
    """S and dP with the products of half of the latent columns, in flight. FIRST: panel of Q and
    d_out that the columns begin with."""
    for i in gl.static_range(PANELS):
        panel = opaque_zero() + (FIRST + i)
        keys = own_keys(k, i, SIDE)
        S = warpgroup_mma(smem.q.latent.index(panel), keys, S, is_async=True)
        dP = warpgroup_mma(smem.d_out.index(panel), keys, dP, is_async=True)
    return S, dP


@gluon.jit
def score(smem, bars, phase, SIDE: gl.constexpr, DIMS: gl.constexpr):
    """S and dP of a warp-group's own entries, in flight: half by half as columns arrive."""
    PANELS: gl.constexpr = DIMS.latent // 2 // CHUNK
    S = gl.zeros([64, OWN], gl.float32, SIDE_LAYOUT)
    dP = gl.zeros([64, OWN], gl.float32, SIDE_LAYOUT)
    wait_tile(bars.k_ready.index(0), phase, True)
    S, dP = score_half(S, dP, smem.k.left, smem, 0, PANELS, SIDE)
    wait_tile(bars.k_ready.index(1), phase, True)
    if DIMS.rope > 0:
        rope = own_keys(smem.k.rope, 0, SIDE)
        S = warpgroup_mma(smem.q.rope.index(opaque_zero()), rope, S, is_async=True)
    return score_half(S, dP, smem.k.right, smem, PANELS, PANELS, SIDE)


@gluon.jit
def put(tile, x, SIDE: gl.constexpr):
    """Write a warp-group's own columns of P or dS."""
    tile.index(opaque_zero()).slice(SIDE * OWN, OWN, dim=1).store(x.to(tile.dtype))


@gluon.jit
def rope_columns(tile, SIDE: gl.constexpr):
    """A warp-group's half of the rope columns of a tile."""
    HALF: gl.constexpr = tile.shape[2] // 2
    return tile.index(opaque_zero()).slice(SIDE * HALF, HALF, dim=1)


@gluon.jit
def query_gradient(d_q, smem, SIDE: gl.constexpr, DIMS: gl.constexpr):
    """d_q += dS K of the columns of a warp-group; d_q: QueryGradient."""
    z = opaque_zero()
    d_s = smem.d_s.index(z)
    k = smem.k.left if SIDE == 0 else smem.k.right
    half, rope = d_q
    half_next = warpgroup_mma(d_s, k.index(z), half, is_async=True)
    if DIMS.rope > 0:
        rope_next = warpgroup_mma(d_s, rope_columns(smem.k.rope, SIDE), rope, is_async=True)
        half, rope = warpgroup_mma_wait(0, deps=(half_next, rope_next))
    else:
        half = warpgroup_mma_wait(0, deps=(half_next,))
    return QueryGradient(half=half, rope=rope)


@gluon.jit
def write_part(acc, part, item, first, COLUMN, WIDTH: gl.constexpr):
    """Round and store columns COLUMN … of 64 entries from `first` on. part: Parts, item: WorkItem."""
    COLUMNS: gl.constexpr = acc.shape[1]
    LAYOUT: gl.constexpr = WRITTEN if COLUMNS == 64 else WRITTEN_32
    # Columns 8 j + 2 t + e of a thread t go to 8 t + 2 j + e, in every 32 columns.
    mine = gl.reshape(acc.to(part.base.dtype.element_ty), [64, COLUMNS // 32, 4, 4, 2])
    mine = gl.reshape(gl.permute(mine, (0, 1, 3, 2, 4)), [64, COLUMNS])
    mine = gl.convert_layout(mine, LAYOUT)
    place = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)) + (opaque_zero() + first)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)) + COLUMN
    line = (part.first + place) * part.blocks + item.head_block
    at = (part.base + line * WIDTH)[:, None] + column[None, :]
    gl.store(at, mine, mask=(place < item.count)[:, None])


@gluon.jit
def row_parts(smem, part, item, first, SIDE: gl.constexpr, DIMS: gl.constexpr):
    """What the entries of a step give to a warp-group's columns of their rows, and its way out.

    smem: Smem, part: Parts, item: WorkItem.
    """
    HALF: gl.constexpr = DIMS.latent // 2
    WIDTH: gl.constexpr = DIMS.latent + DIMS.rope
    PANELS: gl.constexpr = HALF // CHUNK
    # A loop that stays one: unrolled, accumulators of several panels would be alive at a time.
    for c in range(opaque_zero(), PANELS):
        z = opaque_zero()
        panel = SIDE * PANELS + c
        acc = gl.zeros([64, CHUNK], gl.float32, PART_LAYOUT)
        d_s = smem.d_s.index(z).permute((1, 0))
        acc = warpgroup_mma(d_s, smem.q.latent.index(panel), acc, use_acc=False, is_async=True)
        p = smem.p.index(z).permute((1, 0))
        acc = warpgroup_mma(p, smem.d_out.index(panel), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        write_part(acc, part, item, first, panel * CHUNK, WIDTH)
    if DIMS.rope > 0:
        ROPE: gl.constexpr = DIMS.rope // 2
        acc = gl.zeros([64, ROPE], gl.float32, SIDE_LAYOUT)
        d_s = smem.d_s.index(opaque_zero()).permute((1, 0))
        columns = rope_columns(smem.q.rope, SIDE)
        acc = warpgroup_mma(d_s, columns, acc, use_acc=False, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        write_part(acc, part, item, first, DIMS.latent + SIDE * ROPE, WIDTH)


@gluon.jit
def write_query_gradient(acc, total, rows, item, COLUMN: gl.constexpr):
    """Store columns of d_q as they lie in registers; +0 in rows that see no key. rows: Rows, with
    strides in units of 8 elements."""
    L: gl.constexpr = acc.type.layout
    seeing = gl.convert_layout(total, gl.SliceLayout(1, L)) != PLUS_INF
    head = item.head_block * 64 + gl.arange(0, 64, gl.SliceLayout(1, L))
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, L)) + COLUMN
    first = rows.base + item.token * (wide(rows.stride_t) * VECTOR)
    at = (first + head * (wide(rows.stride_h) * VECTOR))[:, None] + column[None, :]
    kept = gl.where(seeing[:, None], acc, 0.0).to(rows.base.dtype.element_ty)
    gl.store(at, kept, mask=(head < item.heads)[:, None])


@gluon.jit
def consumer(
    item,
    smem,
    bars,
    stats,
    part,
    d_q_rows,
    factor,
    scale,
    SIDE: gl.constexpr,
    HOW: gl.constexpr,
    DIMS: gl.constexpr,
):
    """A warp-group's share of a work item.

    item: WorkItem, smem: Smem, bars: Barriers, stats: Statistics, part: Parts, d_q_rows: Rows.
    """
    HALF: gl.constexpr = DIMS.latent // 2
    HALF_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    rows = statistics_of(stats, item)
    half = gl.zeros([64, HALF], gl.float32, HALF_LAYOUT)
    rope = rows.total  # anything small, where there are no rope columns
    if DIMS.rope > 0:
        ROPE: gl.constexpr = DIMS.rope // 2
        rope = gl.zeros([64, ROPE], gl.float32, SIDE_LAYOUT)
    mbarrier.wait(bars.q_ready.index(0), 0)
    for first in range(0, item.count, ENTRIES):
        phase = first // ENTRIES & 1
        S_next, dP_next = score(smem, bars, phase, SIDE, DIMS)
        mbarrier.wait(bars.valid_ready.index(0), phase)
        own = smem.bias.slice(SIDE * OWN, OWN)
        bias = own.load(gl.SliceLayout(0, SIDE_LAYOUT))
        S, dP = warpgroup_mma_wait(0, deps=(S_next, dP_next))
        P = gl.exp2(signed(S, HOW.sign) * factor - rows.total[:, None] + bias[None, :])
        dS = P * (dP - rows.delta[:, None]) * scale
        meet()  # nobody reads P and dS of the step before
        put(smem.p, P, SIDE)
        put(smem.d_s, dS, SIDE)
        fence_async_shared()
        meet()  # both halves are written
        half, rope = query_gradient(QueryGradient(half=half, rope=rope), smem, SIDE, DIMS)
        mbarrier.arrive(bars.k_empty.index(SIDE), count=1)
        if HOW.wants_rows:
            row_parts(smem, part, item, first, SIDE, DIMS)
    write_query_gradient(half, rows.total, d_q_rows, item, SIDE * HALF)
    if DIMS.rope > 0:
        write_query_gradient(rope, rows.total, d_q_rows, item, DIMS.latent + SIDE * ROPE)


@gluon.jit
def column_tiles(DIMS: gl.constexpr, LAYOUTS: gl.constexpr, DTYPE: gl.constexpr):
    """`ColumnTiles` of 64 rows, without rope columns where DIMS has none."""
    HALF: gl.constexpr = DIMS.latent // 2
    left = gl.allocate_shared_memory(DTYPE, [1, 64, HALF], LAYOUTS.half)
    right = gl.allocate_shared_memory(DTYPE, [1, 64, HALF], LAYOUTS.half)
    rope = left
    if DIMS.rope > 0:
        rope = gl.allocate_shared_memory(DTYPE, [1, 64, DIMS.rope], LAYOUTS.narrow)
    return ColumnTiles(left=left, right=right, rope=rope)


COUNTS = ["factor", "scale", "topk", "rows", "heads", "head_blocks", "first_token"]
STRIDES = ["rows_stride", "indices_stride", "d_q_stride_t", "d_q_stride_h"]
# Vectors of 4-byte elements, read one by one: a slice of a tensor is as good as all.
VECTORS = ["indices_ptr", "lengths_ptr", "total_ptr", "delta_ptr"]


@gluon.jit(do_not_specialize=COUNTS + STRIDES, do_not_specialize_on_alignment=VECTORS)
def entry_pass_kernel(  # noqa: PLR0913
    q_panel_desc,
    q_rope_desc,
    d_out_desc,
    rows_ptr,
    indices_ptr,
    lengths_ptr,
    total_ptr,
    delta_ptr,
    d_q_ptr,
    part_ptr,
    factor,
    scale,
    topk,
    rows,
    heads,
    head_blocks,
    first_token,
    rows_stride,
    indices_stride,
    d_q_stride_t,
    d_q_stride_h,
    DIMS: gl.constexpr,
    SIGN: gl.constexpr,
    REGISTERS: gl.constexpr,
    LAYOUTS: gl.constexpr,
):
    """64 heads of one query of a launch, whose first is `first_token`; see the top of the file.

    part_ptr None: rows have no gradients. DIMS: Columns, REGISTERS: Registers, LAYOUTS:
    TileLayouts. factor: |scale| in log2 units.
    """
    DTYPE: gl.constexpr = q_panel_desc.dtype
    HOW: gl.constexpr = How(sign=SIGN, wants_rows=part_ptr is not None)
    local = gl.program_id(0) // head_blocks
    token = local + first_token
    count = topk
    if lengths_ptr is not None:
        count = gl.minimum(gl.maximum(gl.load(lengths_ptr + token), 0), topk)
    item = WorkItem(
        token=token, head_block=gl.program_id(0) % head_blocks, heads=heads, count=count
    )
    vector: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    PANELS: gl.constexpr = DIMS.latent // CHUNK
    k = column_tiles(DIMS, LAYOUTS, DTYPE)
    q_latent = gl.allocate_shared_memory(DTYPE, [PANELS, 64, CHUNK], LAYOUTS.panel)
    q_rope = q_latent
    if DIMS.rope > 0:
        q_rope = gl.allocate_shared_memory(DTYPE, [1, 64, DIMS.rope], LAYOUTS.narrow)
    smem = Smem(
        q=Queries(latent=q_latent, rope=q_rope),
        d_out=gl.allocate_shared_memory(DTYPE, [PANELS, 64, CHUNK], LAYOUTS.panel),
        k=k,
        p=gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUTS.narrow),
        d_s=gl.allocate_shared_memory(DTYPE, [1, 64, 64], LAYOUTS.narrow),
        bias=gl.allocate_shared_memory(gl.float32, [64], vector),
    )
    bars = Barriers(
        q_ready=barriers(1, 1),
        k_ready=barriers(2, 128),
        k_empty=barriers(2, 1),
        valid_ready=barriers(1, 1),
    )
    lists = Lists(
        indices=indices_ptr,
        stride=indices_stride,
        rows=rows_ptr,
        row_stride=rows_stride,
        row_count=rows,
    )
    sources = Sources(q=Descriptors(panel=q_panel_desc, rope=q_rope_desc), d_out=d_out_desc)
    stats = Statistics(total=total_ptr, delta=delta_ptr)
    part = Parts(base=part_ptr, first=local.to(gl.int64) * topk, blocks=head_blocks)
    d_q = Rows(d_q_ptr, d_q_stride_t, d_q_stride_h)
    gl.warp_specialize(
        [
            (consumer, (item, smem, bars, stats, part, d_q, factor, scale, 0, HOW, DIMS)),
            (consumer, (item, smem, bars, stats, part, d_q, factor, scale, 1, HOW, DIMS)),
            (producer, (lists, sources, item, smem, bars, DIMS)),
        ],
        [4, 4],
        [REGISTERS.consumer, REGISTERS.producer],
    )
