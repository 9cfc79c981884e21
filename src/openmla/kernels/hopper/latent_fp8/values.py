# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The values of a step: from e4m3 rows in shared memory to the left operand of wgmma.

V is the first columns of the rows that K is, and they stay as they are. The output is computed
transposed, O^T = V^T P^T: the left operand of a wgmma may come from registers. A thread reads two
neighboring columns of two neighboring keys (ldmatrix transposes pairs of bytes), and makes of the
four bytes two words of two fp16, in which e4m3 is exact, one word per column:

    key 2 t      c0 c1           c0 of both keys | c1 of both keys
    key 2 t + 1  c0 c1    ->     upper row       | lower row of a tile

Keys have their natural order, and which columns 64 rows of O^T hold is free: row 16 w + 8 h + g of
number i is column 64 i + 16 w + 2 g + h of a warp-group's half (w: warp, g: its lane / 4). A tile
is 32 keys of 64 columns; a step has 16, in the order 0 0, 0 1, 0 2, 0 3, 1 0, … (keys, columns).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import opaque_zero
from openmla.kernels.hopper.latent.source import STEP
from openmla.kernels.hopper.latent_fp8.signals import signal_read

KEYS = gl.constexpr(32)  # of a tile
PAIRS = gl.constexpr(32)  # of columns of a tile
TILES = gl.constexpr(16)  # of a step


@gluon.constexpr_function
def pairs_layout():
    """Layout of [32 keys, 32 pairs of columns]: thread t of a quad has keys 2 t and 2 t + 1 of
    every 8."""
    return gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16]],
        [],
        [32, 32],
    )


# Two keys with two bytes each become two words: fp16 of both first bytes, and of both second ones.
CONVERT = gl.constexpr(
    "{ .reg .b32 a; .reg .b16 b, c; mov.b32 a, {$2, $3}; prmt.b32 a, a, 0, 0x3120; "
    "mov.b32 {b, c}, a; cvt.rn.f16x2.e4m3x2 $0, b; cvt.rn.f16x2.e4m3x2 $1, c; }"
)


@gluon.jit
def load_pairs(rows, slot, TILE: gl.constexpr, SIDE: gl.constexpr):
    """A tile as it lies: pairs of even keys, and of odd keys."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDTH: gl.constexpr = rows.shape[2] // 2
    COLUMN: gl.constexpr = (SIDE * 4 + TILE % 4) * PAIRS
    pairs = reinterpret(rows.index(opaque_zero() + slot), gl.int16, [STEP, WIDTH], LAYOUT)
    pairs = pairs.slice(TILE // 4 * KEYS, KEYS).slice(COLUMN, PAIRS, dim=1).load(pairs_layout())
    return gl.split(gl.permute(gl.reshape(pairs, [KEYS // 2, 2, PAIRS]), (0, 2, 1)))


@gluon.jit
def operand(pairs, LAYOUT: gl.constexpr):
    """A tile: [64 columns, 32 keys] fp16."""
    even, odd = pairs
    upper, lower = gl.inline_asm_elementwise(
        CONVERT, "=r,=r,h,h", [even, odd], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2; // f16",
        "=h,=h,r",
        [gl.join(upper, lower)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    keys = gl.reshape(
        gl.join(low, high), [KEYS // 2, 4, 8, 2, 2]
    )  # pair of keys, w, g, h, key of the two
    return gl.convert_layout(
        gl.reshape(gl.permute(keys, (1, 3, 2, 0, 4)), [64, KEYS]), LAYOUT, assert_trivial=True
    )


@gluon.jit
def multiply(sums, pairs, p_smem, slot, TILE: gl.constexpr):
    """Start the product of a tile; returns what is in flight: the sums, and the registers that it
    reads."""
    VL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums.type.layout, k_width=2)
    weights = p_smem.index(opaque_zero() + slot).slice(TILE // 4 * KEYS, KEYS, dim=1)
    A = operand(pairs, VL)
    return warpgroup_mma(A, weights.permute((1, 0)), sums, is_async=True), A


@gluon.jit
def wait_sums(PENDING: gl.constexpr, flight):
    """The sums of a product, when at most PENDING later ones are in flight."""
    sums, A = flight
    sums, A = warpgroup_mma_wait(PENDING, deps=(sums, A))
    return sums


@gluon.jit
def add_values(O, rows, p_smem, slot, SIDE: gl.constexpr):
    """O + V^T P^T of a step, tile after tile.

    Two are in flight while a third is read and converted: there are not registers for more.
    """
    o0, o1, o2, o3 = O
    pairs = load_pairs(rows, slot, 0, SIDE)
    f0 = multiply(o0, pairs, p_smem, slot, 0)
    pairs = load_pairs(rows, slot, 1, SIDE)
    f1 = multiply(o1, pairs, p_smem, slot, 1)
    pairs = load_pairs(rows, slot, 2, SIDE)
    sums, later = o2, o3
    for tile in gl.static_range(2, TILES):
        after = wait_sums(1, f0)
        f0, f1 = f1, multiply(sums, pairs, p_smem, slot, tile)
        sums, later = later, after
        if tile + 1 < TILES:
            pairs = load_pairs(rows, slot, tile + 1, SIDE)
        if tile == 6:  # the last of the first 8 tiles is on its way to registers; then of 12, 16
            signal_read(slot, 0)
        elif tile == 10:
            signal_read(slot, 1)
        elif tile == 14:
            signal_read(slot, 2)
    return sums, later, wait_sums(1, f0), wait_sums(0, f1)
