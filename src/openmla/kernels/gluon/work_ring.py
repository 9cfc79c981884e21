"""A ring in shared memory by which one warp tells the others of a block what they work on.

`info` is int32 [slots * FIELDS, 1]; numbers of work items come from a counter in global memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FIELDS = gl.constexpr(16)
# One atomic add per warp, its result given to every lane.
DRAW = gl.constexpr(
    "{ .reg .pred p; .reg .b32 t; mov.u32 t, %laneid; setp.eq.u32 p, t, 0; mov.b32 t, 0; "
    "@p atom.global.add.u32 t, [$1], 1; shfl.sync.idx.b32 $0, t, 0, 31, -1; }"
)


@gluon.jit
def draw(counter):
    """The next number of the launch."""
    return gl.inline_asm_elementwise(
        DRAW, "=r,l,~{memory}", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put(info, slot, FIELD: gl.constexpr, value):
    """Write one field; by the one warp of the scheduler."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    info.index(slot * FIELDS + FIELD).store(gl.full([1], 0, gl.int32, ONE) + value)


@gluon.jit
def get(info, slot, FIELD: gl.constexpr, NW: gl.constexpr):
    """Read one field in a partition of NW warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    return gl.max(info.index(slot * FIELDS + FIELD).load(ONE), 0)
