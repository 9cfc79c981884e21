# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""The values of a block: from e4m3 rows in shared memory to the left operand of wgmma.

V is the first columns of the rows that K is, and they stay as they are. The output is computed
transposed, O^T = V^T P^T: the left operand of a wgmma may come from registers. A thread reads two
neighboring columns of two neighboring keys (ldmatrix transposes pairs of bytes), and makes of the
four bytes two words of two fp16, in which e4m3 is exact, one word per column:

    key 2 t      c0 c1           c0 of both keys | c1 of both keys
    key 2 t + 1  c0 c1    ->     upper row       | lower row of a tile

Keys have their natural order, and which columns a tile of 64 rows of O^T holds is free:

    row 16 w + 8 h + g of tile 2 p + i is column 128 p + 64 i + 16 w + 2 g + h of a warp-group's
    half (w: warp, g: its lane / 4)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from openmla.kernels.gluon.compat import reinterpret
from openmla.kernels.gluon.scores import opaque_zero

PANEL = gl.constexpr(64)  # pairs of columns of a swizzled row


@gluon.constexpr_function
def pairs_layout():
    """[64 keys, 64 pairs of columns]: thread t of a quad has keys 2 t, 2 t + 1 of every 8."""
    return gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0], [0, 32]],
        [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 8], [0, 16]], [], [64, 64],
    )  # fmt: skip


# Of two keys, two bytes each: both first bytes, then both second ones; each two become two fp16.
CONVERT = gl.constexpr(
    "{ .reg .b32 a; .reg .b16 b, c; mov.b32 a, {$2, $3}; prmt.b32 a, a, 0, 0x3120; "
    "mov.b32 {b, c}, a; cvt.rn.f16x2.e4m3x2 $0, b; cvt.rn.f16x2.e4m3x2 $1, c; }"
)


@gluon.jit
def load_pairs(rows, b, NUMBER: gl.constexpr):
    """Columns 128 NUMBER … of block b: for both tiles, pairs of even keys and of odd keys."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WIDTH: gl.constexpr = rows.shape[2] // 2
    pairs = reinterpret(rows.index(opaque_zero() + b), gl.int16, [64, WIDTH], LAYOUT)
    pairs = pairs.slice(NUMBER * PANEL, PANEL, dim=1).load(pairs_layout())
    first, second = gl.split(gl.permute(gl.reshape(pairs, [32, 2, 2, 32]), (0, 3, 1, 2)))
    return gl.split(first), gl.split(second)


@gluon.jit
def operand(pairs, LAYOUT: gl.constexpr):
    """A tile: [64 columns, 64 keys] fp16."""
    even, odd = pairs
    upper, lower = gl.inline_asm_elementwise(
        CONVERT, "=r,=r,h,h", [even, odd], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2; // f16", "=h,=h,r", [gl.join(upper, lower)],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    keys = gl.reshape(gl.join(low, high), [32, 4, 8, 2, 2])  # pair of keys, w, g, h, key of the two
    return gl.convert_layout(
        gl.reshape(gl.permute(keys, (1, 3, 2, 0, 4)), [64, 64]), LAYOUT, assert_trivial=True
    )


@gluon.jit
def issue(A, weights, sums):
    """Start a product; what is in flight: the sums, and the registers that are read."""
    return warpgroup_mma(A, weights, sums, is_async=True), A


@gluon.jit
def wait_sums(PENDING: gl.constexpr, flight):
    """The sums of a product, when at most PENDING later ones are in flight."""
    sums, A = flight
    sums, A = warpgroup_mma_wait(PENDING, deps=(sums, A))
    return sums


@gluon.jit
def add_values(O, pairs, k_smem, p_smem, b, SIDE: gl.constexpr):
    """O + V^T P^T of block b, the product of its last tile in flight. pairs: of the first panel.

    Two tiles are in flight while a third is converted: there are not registers for more.
    """
    OL: gl.constexpr = O[0].type.layout
    VL: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OL, k_width=2)
    weights = p_smem.index(opaque_zero() + b).permute((1, 0))
    f0 = issue(operand(pairs[0], VL), weights, O[0])
    f1 = issue(operand(pairs[1], VL), weights, O[1])
    pairs = load_pairs(k_smem[0], b, 2 * SIDE + 1)
    o0 = wait_sums(1, f0)
    f2 = issue(operand(pairs[0], VL), weights, O[2])
    o1 = wait_sums(1, f1)
    f3 = issue(operand(pairs[1], VL), weights, O[3])
    return (o0, o1, wait_sums(1, f2)), f3


@gluon.jit
def landed(done, flight):
    """All of O, when nothing is in flight."""
    return done[0], done[1], done[2], wait_sums(0, flight)
