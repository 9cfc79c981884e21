"""The LDS address maps of `MlaMmaOp` and its producers, under the names of that op.

The public entry: `k`, `v`, `v227` and `latent` hold the rules, `shared_bases` makes layouts of the
compiler of them; tests/modular/cdna4/proof.py proves them by enumeration. All results are byte
offsets from the start of the K or V slot.

>>> load_K_frag_addr(lane=0, sub_id=1)                      # two 16-byte reads
(2048, 2064)
>>> load_V_frag_addr(lane=0, i_strip=0, j_depth=1)          # four 8-byte transposing reads
(32, 2080, 4128, 6176)
>>> load_V_frag_addr(lane=0, i_strip=0, j_depth=1, v_full_v227=True)
(32, 288, 544, 800)
>>> v_map(v_full_v227=True).write(warp=0, lane=8, step=1)   # the producer's side of it
Dma(key=5, column=0, lds=1168)
"""

from typing import Any

from openmla.errors import InvalidArgument
from openmla.modular.cdna4.layout.dma import WAVE, Dma, check_index
from openmla.modular.cdna4.layout.k import (
    KSlot,
    load_K_frag_addr,
    swizzle_K_sub,
    swizzle_parameters,
)
from openmla.modular.cdna4.layout.v import DefaultV, VMap, fragment_reads
from openmla.modular.cdna4.layout.v227 import V227

__all__ = [
    "V227",
    "ACC_ROW_OFFSETS_32x32",
    "DefaultV",
    "Dma",
    "KSlot",
    "VMap",
    "accumulator_rows",
    "load_K_frag_addr",
    "load_V_frag_addr",
    "load_V_frag_cell_offset",
    "precompute_v_lane_base",
    "swizzle_K_sub",
    "swizzle_parameters",
    "v_map",
]

#: Rows of a 32×32 accumulator that lanes 0..31 hold: four runs of four rows, eight apart.
ACC_ROW_OFFSETS_32x32: tuple[int, ...] = tuple(8 * (p // 4) + p % 4 for p in range(16))


def accumulator_rows(lane: int) -> tuple[int, ...]:
    """Rows (keys, in the score tile) that a lane holds; its column (query) is lane % 32.

    >>> accumulator_rows(40)[:6]
    (4, 5, 6, 7, 12, 13)
    """
    check_index("lane", lane, WAVE)
    return tuple(row + 4 * (lane // 32) for row in ACC_ROW_OFFSETS_32x32)


def v_map(
    *,
    kv_block: int = 128,
    depth: int = 128,
    element_bytes: int = 1,
    v_full_v227: bool = False,
    v227_layout: bool = False,
    num_threads: int = 512,
) -> VMap:
    """The V slot that these flags ask for. `v227_layout` only counts with `v_full_v227`."""
    if not v_full_v227:
        return DefaultV(kv_block, depth, element_bytes, num_threads)
    asked = {
        "kv_block": (kv_block, V227.kv_block),
        "depth": (depth, V227.depth),
        "element_bytes": (element_bytes, V227.element_bytes),
        "num_threads": (num_threads, V227.num_warps * WAVE),
    }
    for name, (got, only) in asked.items():
        if got != only:
            raise InvalidArgument(
                name, f"{only} with v_full_v227 (16 chunks of 8 keys × 128 fp8)", got
            )
    return V227(v227_layout)


def precompute_v_lane_base(lane: int, **slot: Any) -> int:
    """The lane's share of every V read address, computed once per slot: `slot` is as in `v_map`.

    >>> precompute_v_lane_base(32), precompute_v_lane_base(32, v_full_v227=True)
    (256, 1040)
    """
    return v_map(**slot).lane_base(lane)


def load_V_frag_cell_offset(i_strip: int, j_depth: int, r: int, **slot: Any) -> int:
    """The constant share of read r of fragment (i_strip, j_depth): an immediate offset.

    >>> load_V_frag_cell_offset(1, 1, 1), load_V_frag_cell_offset(1, 1, 1, v_full_v227=True)
    (10272, 8608)
    """
    return v_map(**slot).cell(i_strip, j_depth, r)


def load_V_frag_addr(lane: int, i_strip: int, j_depth: int, **slot: Any) -> tuple[int, ...]:
    """Addresses of the four 8-byte reads of one lane's V fragment."""
    return fragment_reads(v_map(**slot), lane, i_strip, j_depth)
