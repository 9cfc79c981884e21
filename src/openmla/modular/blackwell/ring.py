"""How many K and V tiles shared memory keeps in flight.

The Q tile, the correction strip and the barriers are paid first; the rest is cut into slots, each
as wide as the wider of K-without-rope and V. An odd number of slots becomes one ring that K and V
share in turn, an even number two rings of their own.
"""

from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

from openmla.arithmetic import ceildiv
from openmla.modular.blackwell.tile import FA4Shape
from openmla.modular.blackwell.units import (
    MBAR_BYTES,
    SMEM_CARVEOUT,
    SMEM_PER_SM,
    SMEM_RESERVED,
    TMEM_ADDR_BYTES,
)

CORRECTION_BYTES = 1024  # one fp32 for each of the 256 softmax threads, in 1Q as in 2Q
RING_BARRIERS = 2  # every slot has a barrier for "full" and one for "empty"
CROSS_P_BARRIERS = 10


@dataclass(frozen=True)
class Ring:
    """The K/V pipeline: its stages, and the shared memory of the whole block.

    ``slots`` is what was cut; ``num_kv_stages`` counts slots of a shared ring, or K/V pairs of
    separate ones. ``num_qk_stages`` is how many pieces a K tile arrives in.
    """

    slots: int
    use_fused_kv: bool
    num_kv_stages: int
    num_qk_stages: int
    cross_p: bool
    smem_used: int


def plan_ring(shape: FA4Shape, BN: int) -> Ring:
    """The deepest ring that fits.

    DeepSeek-V3 in bf16, 2Q: 232448 - 98304 (Q) - 1024 - 108 = 133012 bytes are left. A slot takes
    128 x 128 x 2 + 16 = 32784, every other slot is K and brings 16384 bytes of rope, so 3 fit:
    3 x 32784 + 2 x 16384 = 131120. Odd: one shared ring of 3, and 230556 bytes in all.
    """
    base = base_bytes(shape)
    if BN == 0:
        return Ring(0, False, 0, wanted_qk_stages(shape), False, base)
    if shape.packs_rows:
        return _packed_ring(shape, BN, base)
    slot = slot_size(shape, BN)
    slots = count_slots(slot, SMEM_CARVEOUT - base, even=shape.pinned_qk_stages > 1)
    used = base + slot.total(slots)
    if slots % 2 and not shape.single_o:
        return _shared_ring(shape, BN, slots, used)
    return _separate_rings(shape, slots, used)


def base_bytes(shape: FA4Shape) -> int:
    """Bytes that do not depend on the number of slots."""
    return fixed_bytes(shape) + q_bytes(shape) + q_scale_bytes(shape) + CORRECTION_BYTES


def fixed_bytes(shape: FA4Shape) -> int:
    """The tensor-memory address and the barriers outside the ring.

    Scores: a producer and num_pv_stages consumers for each of two tiles. Correction: a pair for
    each. Output: a producer for each. In 2Q the second Q tile signals each of its pieces.
    """
    scores = 2 * (1 + shape.num_pv_stages)
    correction = 4
    output = 2
    second_q = wanted_qk_stages(shape) if shape.num_qo == 2 else 0
    return TMEM_ADDR_BYTES + MBAR_BYTES * (scores + correction + output + second_q)


def q_bytes(shape: FA4Shape) -> int:
    """The Q tile. Its rope columns have their own dtype when one is given."""
    if shape.rope_dtype is None:
        return shape.BM * shape.padded_qk_depth * shape.qkv_dtype_size
    row = shape.padded_nope_depth * shape.qkv_dtype_size
    return shape.BM * (row + shape.rope_depth() * shape.rope_dtype_size)


def q_scale_bytes(shape: FA4Shape) -> int:
    """One scale per query row, when there are scales."""
    return shape.BM * shape.scale_dtype_size


def wanted_qk_stages(shape: FA4Shape) -> int:
    """Pieces of a K tile that may arrive one by one.

    A piece is whole swizzle spans and whole MMA steps. MLA takes K whole: nope and rope already
    come apart.
    """
    if shape.is_mla:
        return 1
    if shape.pinned_qk_stages:
        return shape.pinned_qk_stages
    span = shape.swizzle_mode // shape.qkv_dtype_size
    return gcd(shape.padded_qk_depth // span, shape.padded_qk_depth // shape.MMA_K)


def rows_per_cta(shape: FA4Shape, BN: int) -> int:
    """Keys one CTA loads; a pair splits the tile."""
    return BN // 2 if shape.pair_cta else BN


class SlotSize(NamedTuple):
    """Bytes of one slot with its barriers, and what a K tile brings beyond it."""

    slot: int
    k_extra: int

    def total(self, slots: int) -> int:
        """Slots alternate K, V, K, ...: at most every other one carries K's extra bytes."""
        return slots * self.slot + ceildiv(slots, 2) * self.k_extra


def slot_size(shape: FA4Shape, BN: int) -> SlotSize:
    """A tile per slot, split between the memories of a CTA pair.

    K's rope columns and the scale of each key do not go into the slot: V has neither.
    """
    rows = rows_per_cta(shape, BN)
    row = shape.shared_kv_cols() * shape.qkv_dtype_size
    extra = shape.rope_depth() * shape.rope_dtype_size + shape.scale_dtype_size
    return SlotSize(rows * row + RING_BARRIERS * MBAR_BYTES, rows * extra)


def count_slots(size: SlotSize, room: int, even: bool) -> int:
    """Slots that fit in ``room`` bytes; the average slot carries half of K's extra bytes.

    ``even`` gives up an odd slot: K in pieces cannot share a ring with V.
    """
    slots = max(0, room) // (size.slot + size.k_extra // 2)
    if even:
        slots -= slots % 2
    if slots and size.total(slots) > room:
        slots -= 1  # an odd count has one K more than V, and its extra bytes did not fit
    return slots


def _packed_ring(shape: FA4Shape, BN: int, base: int) -> Ring:
    """Small query tiles: K and V arrive in pieces of one shared ring, a piece to a slot."""
    pieces = wanted_qk_stages(shape)
    slot = packed_slot_bytes(shape, BN) + RING_BARRIERS * MBAR_BYTES
    slots = max(0, SMEM_CARVEOUT - base) // slot
    return Ring(slots, True, slots, pieces, False, base + slots * slot)


def packed_slot_bytes(shape: FA4Shape, BN: int) -> int:
    """One piece of K or V for a small query tile."""
    return BN * (shape.shared_kv_cols() // wanted_qk_stages(shape)) * shape.qkv_dtype_size


def _shared_ring(shape: FA4Shape, BN: int, slots: int, used: int) -> Ring:
    cross_p = _crosses_stages(shape, BN)
    if cross_p:
        used += CROSS_P_BARRIERS * MBAR_BYTES
    return Ring(slots, True, slots, 1, cross_p, used)


def _crosses_stages(shape: FA4Shape, BN: int) -> bool:
    """Whether a shared ring carries the cross-stage barriers: 2Q, one CTA, no rope, whole pages."""
    return (
        shape.cross_stage_p
        and shape.num_qo == 2
        and not shape.pair_cta
        and shape.rope_depth() == 0
        and not 0 < shape.page_size < BN
    )


def _separate_rings(shape: FA4Shape, slots: int, used: int) -> Ring:
    """Rings of their own. K may then arrive in pieces, each with a pair of barriers."""
    stages = slots // 2
    pieces = wanted_qk_stages(shape)
    more = (pieces - 1) * stages * RING_BARRIERS * MBAR_BYTES
    if used + more >= SMEM_CARVEOUT:
        pieces, more = 1, 0
    return Ring(slots, False, stages, pieces, False, used + more)


def explain_ring(shape: FA4Shape, BN: int, ring: Ring) -> list[str]:
    """Lines that account for every byte of shared memory."""
    base = base_bytes(shape)
    lines = [
        f"shared memory: {SMEM_PER_SM} - {SMEM_RESERVED} reserved = {SMEM_CARVEOUT} bytes",
        f"Q tile: {_q_sum(shape)} = {q_bytes(shape)}",
        f"correction {CORRECTION_BYTES}, barriers and tensor-memory address {fixed_bytes(shape)}"
        + (f", Q scales {q_scale_bytes(shape)}" if shape.scale_dtype else ""),
    ]
    if BN == 0:
        return [*lines, "no K/V ring: no key tile fits tensor memory"]
    lines.append(f"left for K and V: {SMEM_CARVEOUT} - {base} = {SMEM_CARVEOUT - base}")
    lines.extend(_slot_lines(shape, BN, ring))
    lines.append(f"used: {ring.smem_used} of {SMEM_CARVEOUT}")
    return lines


def ring_sum(shape: FA4Shape, BN: int) -> str:
    """The division that says how many slots fit."""
    base = base_bytes(shape)
    size = slot_size(shape, BN)
    return (
        f"{SMEM_CARVEOUT} - {base} bytes of Q, correction and barriers = {SMEM_CARVEOUT - base}, "
        f"a K and a V tile of {BN} keys take {size.total(2)}"
    )


def _q_sum(shape: FA4Shape) -> str:
    if shape.rope_dtype is None:
        return f"{shape.BM} rows x {shape.padded_qk_depth} x {shape.qkv_dtype_size}"
    nope = f"{shape.padded_nope_depth} x {shape.qkv_dtype_size}"
    return f"{shape.BM} rows x ({nope} + {shape.rope_depth()} rope x {shape.rope_dtype_size})"


def _slot_lines(shape: FA4Shape, BN: int, ring: Ring) -> list[str]:
    if shape.packs_rows:
        piece = packed_slot_bytes(shape, BN)
        return [f"{ring.slots} slots of {piece} + 16: one ring, a tile in {ring.num_qk_stages}"]
    size = slot_size(shape, BN)
    lines = [
        f"slot: {rows_per_cta(shape, BN)} keys x {shape.shared_kv_cols()} x "
        f"{shape.qkv_dtype_size} + 16 (two barriers) = {size.slot}"
    ]
    if size.k_extra:
        what = "rope and scales" if shape.scale_dtype else "rope"
        lines.append(f"each K tile adds {size.k_extra} bytes ({what})")
    lines.append(_ring_line(shape, ring))
    if ring.cross_p:
        lines.append(f"cross-stage P: {CROSS_P_BARRIERS} barriers more")
    return lines


def _ring_line(shape: FA4Shape, ring: Ring) -> str:
    n = ring.slots
    if ring.use_fused_kv:
        return f"{n} slots, an odd number: K and V share one ring of {n} in turn"
    why = "single output tile" if shape.single_o else "an even number"
    return f"{n} slots, {why}: separate rings of {ring.num_kv_stages} K and {n // 2} V tiles"
