"""Small Gluon kernels for the tests of compiled code, right and with a planted fault."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def previous_tiles(out_ptr, n):
    """Stores for every step the tile of the step before; step 0 has its own.

    `last` begins as the value that it ends the first walk of the loop's body as, so Triton's front
    end does not hand it on: it stays tile 0 for ever. Python's meaning is another.
    """
    tile = gl.program_id(0)
    last = tile
    step = 0
    while step < n:
        gl.store(out_ptr + step, last)
        last = tile
        tile = tile + 1
        step += 1


@gluon.jit
def through_shared(x_ptr, out_ptr, BLOCK: gl.constexpr):
    """Reverse a vector through shared memory: every warp reads what another one wrote."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    x = gl.load(x_ptr + gl.arange(0, BLOCK, layout))
    memory = gl.allocate_shared_memory(gl.float32, [BLOCK], shared, x)
    gl.store(out_ptr + BLOCK - 1 - gl.arange(0, BLOCK, pairs), memory.load(pairs))
