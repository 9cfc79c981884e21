"""The products of a CDNA4 prefill block and the fragments they are fed with.

The names are those of MlaMmaOp (openmla.modular.cdna4.mma). K and V are never held in registers
as whole tiles: a fragment is loaded, multiplied, and its registers serve the next one.

| function | gives | LDS reads of a wave, FP8 |
|---|---|---|
| load_K_frag | sub-block SUB_ID of K: 32 keys x 64 bytes of columns | 2 x ds_read_b128 |
| mma_QK | scores of 32 keys, plus one fragment's worth of depth | |
| exp2_inplace_range | weights instead of scores, for some of the tiles | |
| pack_P | weights of one strip of keys as the left operand of PV | |
| precompute_v_lane_base | a V slot as fragments are read from it: the R of the pair (W, R) | |
| load_V_frag | V of a strip of keys x 32 columns, keys along the product | 4 x ds_read_b64_tr_b8 |
| load_V_from_lane_base | all fragments of a strip | |
| mma_PV | the output tile of 32 columns, plus one strip of keys | |

Scores lie in registers as [queries, keys] of the "transposed" product: lane l holds query l % 32
and, of each tile of 32 keys, {0-3, 8-11, 16-19, 24-27} + 4 * (l // 32). The operands of PV take
keys in that very order (k_width 4), so P needs no exchange between lanes. MMA is a MatrixLayouts
(layouts.py).

With two waves side by side (V of 256 columns) tiles have 64 keys and 64 columns, and P passes
through LDS.

A strip is what one PV product reduces over: two tiles of keys for FP8 weights (MMA_K 64), one for
16-bit weights (two products of MMA_K 16). FP8 V with 16-bit weights is dequantized in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

from openmla.kernels.gluon.compat import reinterpret

EDGE = gl.constexpr(32)  # edge of a product: keys of a tile of scores, columns of one of the output


@gluon.jit
def product(a, b, acc):
    """acc + a @ b: v_mfma 32x32x64 for FP8, 32x32x16 for bf16 and fp16."""
    if a.dtype == gl.float8e4nv:
        return cdna4.mfma_scaled(a, None, "e4m3", b, None, "e4m3", acc)
    else:
        return cdna4.mfma(a, b, acc)


@gluon.jit
def load_K_frag(k_subs, SUB_ID: gl.constexpr, MMA: gl.constexpr):
    """One fragment of K, from a slot seen as sub-blocks [number, 32 keys, columns]."""
    return k_subs.index(SUB_ID).permute((1, 0)).load(MMA.k)


@gluon.jit
def mma_QK(att, k, q):
    """Add the part of the scores [queries, 32 keys] that these columns make up."""
    return product(q, k, att)


@gluon.jit
def exp2_inplace_range(
    tiles, shift, factor, START: gl.constexpr, STOP: gl.constexpr, TILES: gl.constexpr
):
    """exp2(factor * score - shift) for score tiles START … STOP - 1; the others stay."""
    done = ()
    for i in gl.static_range(TILES):
        tile = tiles[i]
        if i >= START and i < STOP:
            tile = gl.exp2(tile * factor - shift[:, None])
        done = done + (tile,)  # noqa: RUF005 - the language adds tuples, it does not unpack them
    return done


@gluon.jit
def pack_P(weights, STRIP: gl.constexpr, P_DTYPE: gl.constexpr, MMA: gl.constexpr):
    """Strip STRIP of the weights, as the left operand of the second product."""
    if gl.float8e4nv == P_DTYPE:
        low = weights[2 * STRIP].to(P_DTYPE)
        high = weights[2 * STRIP + 1].to(P_DTYPE)
        pair = gl.permute(gl.join(low, high), (0, 2, 1))
        p = gl.reshape(pair, [low.shape[0], 2 * low.shape[1]])
    else:
        p = weights[STRIP].to(P_DTYPE)
    return gl.convert_layout(p, MMA.p)


@gluon.jit
def precompute_v_lane_base(v_slot, READ: gl.constexpr):
    """The slot through the read map. It must be the map the slot was written through."""
    return reinterpret(v_slot, v_slot.dtype, v_slot.shape, READ)


@gluon.jit
def load_V_frag(
    v_lane_base,
    I_STRIP: gl.constexpr,
    J_DEPTH: gl.constexpr,
    TILE: gl.constexpr,
    P_DTYPE: gl.constexpr,
    MMA: gl.constexpr,
):
    """V of strip I_STRIP and columns TILE x J_DEPTH …, in the type of the weights."""
    KEYS: gl.constexpr = 2 * TILE if gl.float8e4nv == P_DTYPE else TILE
    strip = v_lane_base.slice(KEYS * I_STRIP, KEYS, 0)
    return strip.slice(TILE * J_DEPTH, TILE, 1).load(MMA.v).to(P_DTYPE)


@gluon.jit
def load_V_from_lane_base(
    v_lane_base,
    I_STRIP: gl.constexpr,
    TILES: gl.constexpr,
    TILE: gl.constexpr,
    P_DTYPE: gl.constexpr,
    MMA: gl.constexpr,
):
    """All fragments of a strip: TILES x TILE columns."""
    frags = ()
    for j in gl.static_range(TILES):
        frags = frags + (load_V_frag(v_lane_base, I_STRIP, j, TILE, P_DTYPE, MMA),)  # noqa: RUF005
    return frags


@gluon.jit
def mma_PV(o, v, p):
    """Add the weighted values of a strip to 32 columns of the output."""
    return product(p, v, o)
