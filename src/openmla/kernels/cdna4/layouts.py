"""Layouts of the CDNA4 kernels, built from the maps of modular.cdna4.layout.

The compiler is given the bases of the very maps that the proofs and pictures use. Memory that is
filled with a swizzle has two layouts, because a copy to LDS writes lane after lane and cannot
swizzle: `write` is the same memory unswizzled (the kernel permutes the source instead), `read` has
the swizzle.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import AMDMFMALayout

from openmla.kernels.cdna4.lds import (
    CopyBases,
    LatentSlot,
    SharedBases,
    copy_bases,
    k_nope_bases,
    k_sub_bases,
    latent_bases,
    v_bases,
)
from openmla.modular.cdna4.layout.k import K_SUB_ROWS, KSlot
from openmla.modular.cdna4.layout.v import VMap

CDNA4_MFMA = 4
#: Keys of the second product are taken four at a time, as a lane holds the scores of the first.
ACCUMULATOR_RUN = 4


class TileLayouts(NamedTuple):
    """A tile in LDS: how it is filled, how it is read, and which lane copies what."""

    write: Any
    read: Any
    copy: Any


class MatrixLayouts(NamedTuple):
    """Register layouts of the two products (MMA), scores = Q K and output = P V."""

    scores: Any
    output: Any
    q: Any
    """Left operand of the first product."""
    k: Any
    """Right operand of the first product."""
    p: Any
    """Left operand of the second product."""
    v: Any
    """Right operand of the second product."""


def shared_layout(bases: SharedBases) -> Any:
    """The compiler's layout of shared memory with these bases."""
    if bases.interval_padding_pairs:
        return gl.PaddedSharedLayout(
            bases.interval_padding_pairs, bases.offset_bases, [], bases.shape
        )
    return gl.SharedLinearLayout(bases.offset_bases)


def register_layout(copy: CopyBases) -> Any:
    """The compiler's layout of the addresses that waves copy from."""
    return gl.DistributedLinearLayout(copy.registers, copy.lanes, copy.warps, [], copy.shape)


@lru_cache(maxsize=64)
def k_layouts(rows: int, width: int, element_bytes: int, num_warps: int, strip: int) -> TileLayouts:
    """`width` columns of a K slot; fragments are read from strips of so many rows: one sub-block
    wide if there are as many rows in one, else as wide as the part."""
    slot = KSlot(rows, width, width, element_bytes, num_warps)
    bases = k_nope_bases(slot)
    copy = copy_bases(bases, slot.write, slot.passes // 2, num_warps, element_bytes)
    if strip == K_SUB_ROWS:
        read = k_sub_bases(slot)
    else:
        waves = num_warps * strip // rows
        read = k_nope_bases(KSlot(strip, width, width, element_bytes, waves))
    return TileLayouts(shared_layout(bases.plain), shared_layout(read), register_layout(copy))


def q_layouts(rows: int, num_warps: int) -> TileLayouts:
    """A tile of 64 FP8 columns of the Q slab: the same sub-blocks as K, read as one tile."""
    return k_layouts(rows, 64, 1, num_warps, rows)


@lru_cache(maxsize=64)
def v_layouts(slot: VMap, element_bytes: int) -> TileLayouts:
    """A V slot of either kind."""
    return _one_map(v_bases(slot), slot, element_bytes)


@lru_cache(maxsize=64)
def latent_layouts(slot: LatentSlot) -> TileLayouts:
    """A slot of latent rows."""
    return _one_map(latent_bases(slot), slot, slot.element_bytes)


def _one_map(bases: SharedBases, slot: VMap | LatentSlot, element_bytes: int) -> TileLayouts:
    """Layouts of a padded tile, which is not swizzled: it is filled and read through one map."""
    copy = copy_bases(bases, slot.write, slot.passes, slot.num_warps, element_bytes)
    layout = shared_layout(bases)
    return TileLayouts(layout, layout, register_layout(copy))


def matrix_layouts(
    num_warps: int, across: int, qk_depth: int, pv_depth: int, k_width: int
) -> MatrixLayouts:
    """Products of 32 x 32 x depth, a row block of 32 queries per wave, or for `across` waves that
    share keys and columns among them.

    `k_width`: consecutive columns of Q and K that one lane holds.
    """
    scores, output = (
        AMDMFMALayout(
            version=CDNA4_MFMA,
            instr_shape=[32, 32, depth],
            transposed=True,
            warps_per_cta=[num_warps // across, across],
        )
        for depth in (qk_depth, pv_depth)
    )
    return MatrixLayouts(
        scores,
        output,
        gl.DotOperandLayout(0, scores, k_width),
        gl.DotOperandLayout(1, scores, k_width),
        gl.DotOperandLayout(0, output, ACCUMULATOR_RUN),
        gl.DotOperandLayout(1, output, ACCUMULATOR_RUN),
    )


@lru_cache(maxsize=64)
def rope_layouts(rows: int, num_warps: int) -> TileLayouts:
    """The 64 rope columns of latent rows, 16 bits each: swizzled sub-blocks, read by 32 rows."""
    slot = KSlot(32, 64, 64, 2, num_warps // 2)
    read = shared_layout(k_nope_bases(slot))
    return k_layouts(rows, 64, 2, num_warps, rows)._replace(read=read)


def sparse_matrix_layouts() -> MatrixLayouts:
    """Products of 64 heads by 8 waves: scores 16 x 16 x 32 by 4 x 2 waves, output 32 x 32 x 16 by
    2 x 4 waves, so that a lane holds 64 values of the output and 16 rows of Q."""
    scores = AMDMFMALayout(
        version=CDNA4_MFMA, instr_shape=[16, 16, 32], transposed=True, warps_per_cta=[4, 2]
    )
    output = AMDMFMALayout(
        version=CDNA4_MFMA, instr_shape=[32, 32, 16], transposed=True, warps_per_cta=[2, 4]
    )
    return MatrixLayouts(
        scores,
        output,
        gl.DotOperandLayout(0, scores, 8),
        gl.DotOperandLayout(1, scores, 8),
        gl.DotOperandLayout(0, output, 8),
        gl.DotOperandLayout(1, output, 8),
    )
