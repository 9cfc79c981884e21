"""V transposed before the kernel: FP8 wgmma takes its right operand along the keys only.

| | |
|---|---|
| a program copies | KEYS keys of one head, all their columns |
| from | v [tokens, heads, d_v], bytes |
| to | [heads, d_v, columns], keys in the order of words.py within every 16 |
| threads | read 4 bytes of 32 keys each and write 32 keys of 4 columns each: no shared memory |

Every request begins at a multiple of GROUP columns, and the rest of its last group is zeros:

    first column of request r = round_up(cu_seqlens_k[r], 16) + 16 r

cu_seqlens_k [0, 20, 25]: request 0 has columns 0 … 31, request 1 columns 48 … 63. Two requests
never share a group, because round_up(a) + round_up(b) <= round_up(a + b) + 16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.boxes import RAGGED
from openmla.kernels.gluon.compat import reinterpret, tma_load

GROUP = gl.constexpr(16)  # keys that trade places, and the step of a ragged descriptor in bytes
WARPS = gl.constexpr(4)
THREAD_KEYS = gl.constexpr(32)  # a whole sector of the copy


@gluon.jit
def column_of(key, request):
    """The first column of a request whose keys begin at row `key`."""
    return (key + (GROUP - 1)) // GROUP * GROUP + request * GROUP


@gluon.jit
def load_transposed(desc, column, keys, row, head, barrier, tile):
    """Keys row … of a range of `keys` keys that begins at `column`, with zeros after its last
    group: a [d_v, BN] box. See `ragged_columns` in launch.py."""
    BOX: gl.constexpr = desc.block_shape
    LAYOUT: gl.constexpr = desc.layout
    box = reinterpret(tile, desc.dtype, BOX, LAYOUT)
    groups = (keys + (GROUP - 1)) // GROUP
    last = column // GROUP + groups
    coordinates = [RAGGED // GROUP, last, head, 0, RAGGED - groups * GROUP + row]
    tma_load(desc, coordinates, barrier, box)


@gluon.jit
def request_of(column, cu_ptr, batch, reach):
    """The last request that begins at or before each column; `reach`: a power of two, and twice
    it is at least the number of requests."""
    request = column * 0
    while reach > 0:
        tried = request + reach
        start = gl.load(cu_ptr + gl.minimum(tried, batch))
        begun = (tried < batch) & (column_of(start, tried) <= column)
        request = gl.where(begun, tried, request)
        reach = reach // 2
    return request


COUNTS = ["tokens", "heads", "batch", "reach", "groups", "v_stride_t", "v_stride_h"]


@gluon.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=["cu_k_ptr"])
def transpose_kernel(
    v_ptr, out_ptr, cu_k_ptr, tokens, heads, batch, reach, groups, v_stride_t, v_stride_h,
    D_V: gl.constexpr,
):  # fmt: skip
    """One tile; see the head of this file. `groups` are those of a row of the copy, and strides
    are in units of 16 bytes, so that the compiler knows where rows may begin."""
    BYTES: gl.constexpr = max(4, D_V // 32)
    LANES: gl.constexpr = D_V // BYTES
    KEYS: gl.constexpr = WARPS * THREAD_KEYS * (32 // LANES)
    FROM: gl.constexpr = gl.BlockedLayout(
        [THREAD_KEYS, BYTES], [32 // LANES, LANES], [WARPS, 1], [1, 0]
    )
    TO: gl.constexpr = gl.BlockedLayout(
        [BYTES, THREAD_KEYS], [LANES, 32 // LANES], [1, WARPS], [1, 0]
    )
    program = gl.program_id(0)
    head = (program % heads).to(gl.int64)
    first = program // heads * KEYS
    column = first + gl.arange(0, KEYS, gl.SliceLayout(1, FROM))
    request = request_of(column, cu_k_ptr, batch, reach)
    start = gl.load(cu_k_ptr + request)
    stop = gl.minimum(gl.load(cu_k_ptr + gl.minimum(request + 1, batch)), tokens)
    place = column - column_of(start, request)
    # Place 4 t + 2 g + e of a group holds key 8 g + 2 t + e.
    key = (place // GROUP) * GROUP + ((place >> 1) & 1) * 8 + ((place >> 2) & 3) * 2 + (place & 1)
    row = start + key
    own = (place >= 0) & (row < stop)
    d = gl.arange(0, D_V, gl.SliceLayout(0, FROM))
    at = (head * v_stride_h + row.to(gl.int64) * v_stride_t) * GROUP
    here = v_ptr + at[:, None] + d[None, :]
    x = gl.load(here, mask=own[:, None], other=0)
    x = gl.convert_layout(gl.permute(x, (1, 0)), TO)
    to_d = gl.arange(0, D_V, gl.SliceLayout(1, TO)).to(gl.int64)
    to_column = first + gl.arange(0, KEYS, gl.SliceLayout(0, TO))
    there = out_ptr + ((head * D_V + to_d) * groups * GROUP)[:, None] + to_column[None, :]
    gl.store(there, x, mask=(to_column < groups * GROUP)[None, :])
