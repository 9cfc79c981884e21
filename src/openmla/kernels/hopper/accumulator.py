# ruff: noqa: E741  (O is the output accumulator, as everywhere in attention)
"""A wgmma accumulator of 64 rows: its partial row sums, its rescaling, and strides of its outputs.

Four neighboring threads, a quad, share a row; a thread holds two neighboring columns of every
eight, of two rows that are eight apart.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.gluon.scores import opaque_zero

# Out's head and token strides come in units of 8 elements: the compiler then knows that rows begin
# at multiples of 16 bytes, whatever the strides are.
VECTOR = gl.constexpr(8)


@gluon.jit
def wide(stride):
    """A stride as int64, made where it is used: kept over the key loop it would be spilled."""
    return (stride + opaque_zero()).to(gl.int64)


@gluon.jit
def quad_sums(P, BN: gl.constexpr):
    """Row sums without shuffles: [64, BN] to [64, 4], one per thread of a quad."""
    return gl.sum(gl.sum(gl.reshape(P, [64, BN // 8, 4, 2]), 3), 1)


def _rescale_asm(values: int) -> tuple[str, str]:
    """Multiply `values` registers of two rows, under a branch that all lanes of a warp take alike.

    Outputs $0 …, then O, then the factors; in wgmma's layout elements 0, 1, 4, 5 … are of the upper
    row and 2, 3, 6, 7 … of the lower.
    """
    text = "{ .reg .pred p; "
    text += "".join(f"mov.f32 ${i}, ${values + i}; " for i in range(values))
    text += f"setp.neu.f32 p, ${2 * values}, 0f3F800000; "
    text += f"setp.neu.or.f32 p, ${2 * values + 2}, 0f3F800000, p; "
    text += "vote.sync.any.pred p, p, -1; @!p bra.uni DONE; "
    text += "".join(
        f"mul.f32 ${i}, ${values + i}, ${2 * values + (i & 2)}; " for i in range(values)
    )
    return text + "DONE: }", ",".join(["=f"] * values + ["f"] * (2 * values))


RESCALE_32, RESCALE_32_TYPES = (gl.constexpr(x) for x in _rescale_asm(32))
RESCALE_64, RESCALE_64_TYPES = (gl.constexpr(x) for x in _rescale_asm(64))


@gluon.jit
def rescale_rows(O, rescale):
    """O times rescale, row by row; nothing is multiplied where a whole warp's factors are 1."""
    OL: gl.constexpr = O.type.layout
    factors = gl.convert_layout(rescale, gl.SliceLayout(1, OL))[:, None]
    O, factors = gl.broadcast(O, factors)
    if O.shape[1] == 64:
        return gl.inline_asm_elementwise(
            RESCALE_32, RESCALE_32_TYPES, [O, factors], dtype=gl.float32, is_pure=True, pack=32
        )
    else:
        return gl.inline_asm_elementwise(
            RESCALE_64, RESCALE_64_TYPES, [O, factors], dtype=gl.float32, is_pure=True, pack=64
        )
