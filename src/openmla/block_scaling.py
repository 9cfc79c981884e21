"""Blocks of numbers with a scale each: how columns of a cache row become e4m3 or e2m1, and back.

The value of an element is bf16(fp32(element) * scale), rounded once; a product of e2m1 and e4m3 is
exact. Quantizing divides by the scale, exactly as IEEE says, and rounds to nearest, ties to even.

    NaN         e4m3: the element is NaN, and its block has scale 1. e2m1 knows none: the scale is
                NaN, and with it the whole block.
    infinity    e4m3: the scale is infinite (ue8m0: NaN), and the block NaN. e2m1: saturates.
    too large   e2m1 with e4m3 scales holds ±2688 at most; what is larger saturates.

>>> block = torch.tensor([[6.0, -0.25, 0.3, 2.5, 5.0, -7.0]])
>>> [E2M1[code] for code in e2m1_codes(block)[0].tolist()]
[6.0, -0.0, 0.5, 2.0, 4.0, -6.0]
"""

from __future__ import annotations

import torch
from torch import Tensor

from openmla.formats import LARGEST, Element, ScaleRule, ScaleType

E4M3_MAX = LARGEST["e4m3"]
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))
"""The values of the codes 0 to 15."""


def quantize(
    values: Tensor,
    block: int,
    rule: ScaleRule,
    element: Element = "e4m3",
    scale: ScaleType = "fp32",
) -> tuple[Tensor, Tensor]:
    """[n, width] -> elements [n, width] and fp32 scales [n, ceil(width/block)] that the type
    `scale` holds. Elements are e4m3, or e2m1 codes in bytes of their own.

    >>> rule = ScaleRule(least=2.0**-126, zero_is_one=True)
    >>> q, s = quantize(torch.tensor([[448.0, 1.0, 0.0, 0.0]]), 2, rule)
    >>> q.float().tolist(), s.tolist()
    ([[448.0, 1.0, 0.0, 0.0]], [[1.0, 1.0]])
    """
    n, width = values.shape
    blocks = -(-width // block)
    padded = torch.nn.functional.pad(values.float(), (0, blocks * block - width))
    grouped = padded.view(n, blocks, block)
    scales = _scales(grouped.abs().amax(dim=-1), rule, LARGEST[element], scale)
    scaled = (grouped / scales.unsqueeze(-1)).view(n, blocks * block)[:, :width]
    if element == "e2m1":
        return e2m1_codes(scaled), scales
    # Dividing by a scale rounded down could land just above 448, which e4m3 turns into NaN.
    return to_e4m3(scaled), scales


def dequantize(elements: Tensor, scales: Tensor, block: int) -> Tensor:
    """Elements [n, width] of e4m3 or fp32 and fp32 scales [n, blocks] -> bf16 [n, width]."""
    values = e4m3_values(elements) if elements.dtype == torch.float8_e4m3fn else elements
    width = values.shape[-1]
    if width == block * scales.shape[-1]:
        products = values.view(*scales.shape, block) * scales.unsqueeze(-1)
        return products.to(torch.bfloat16).flatten(-2)
    return (values * scales.repeat_interleave(block, dim=-1)[:, :width]).to(torch.bfloat16)


def e4m3_values(elements: Tensor) -> Tensor:
    """e4m3 -> fp32.

    torch does it one element at a time on a CPU. The bits of e4m3 are those of an fp16 number that
    is 2^-8 of it, subnormal or not, and fp16 numbers are widened eight or sixteen at a time; only
    NaN is none there.

    >>> e4m3_values(torch.tensor([-448.0, 2.0**-9, -0.0, torch.nan]).to(torch.float8_e4m3fn))
    tensor([-4.4800e+02,  1.9531e-03, -0.0000e+00,         nan])
    """
    if elements.device.type != "cpu" or not elements.numel():
        return elements.float()
    codes = elements.view(torch.uint8)
    if int((codes & 0x7F).amax()) == 0x7F:
        return elements.float()
    # A signed byte has two signs after the shift: the second is where fp16's exponent begins.
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(2.0**8)


def to_e4m3(values: Tensor) -> Tensor:
    """Rounded to e4m3, with ±448 at most; NaN stays."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).contiguous()


def e2m1_codes(values: Tensor) -> Tensor:
    """fp32 -> codes 0 to 15 in uint8: nearest, ties to the even code, ±6 at most; NaN is +6."""
    size = values.abs()
    code = (size > 0.25).to(torch.uint8)
    for over in (size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5):
        code += over
    code += torch.signbit(values).to(torch.uint8) * 8
    return code.masked_fill(values.isnan(), 7)


def pack(codes: Tensor) -> Tensor:
    """e2m1 codes [n, width] -> bytes [n, width/2]: column 2i is the low half of byte i."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Bytes [n, width/2] -> the fp32 values of their e2m1 columns, [n, width].

    >>> unpack(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist()
    [[0.5, 1.0, 0.0, -6.0]]
    """
    # The bits of e2m1 are those of an fp16 number that is 2^-14 of it: a half of a word for each.
    words = packed.int()
    signs = (words * (2**12 + 2**24)).bitwise_and_(-0x7FFF8000)
    words = words.mul_(2**9 + 2**21).bitwise_and_(0x0E000E00).bitwise_or_(signs)
    return words.view(torch.float16).float().mul_(2.0**14)


def exponents_of(scales: Tensor) -> Tensor:
    """Powers of two, fp32 -> ue8m0."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def _scales(amax: Tensor, rule: ScaleRule, largest: float, scale: ScaleType) -> Tensor:
    """The scale of each block, by the rule of a writer."""
    # amax/448 of a tiny block would round to 0 and turn its zeros into 0/0: keep scales normal.
    found = (amax.clamp_min(rule.least_amax) / largest).clamp(rule.least, rule.most)
    if scale == "e4m3":
        return found.to(torch.float8_e4m3fn).float()
    known = amax > 0 if rule.zero_is_one else ~amax.isnan()
    found = torch.where(known, found, torch.ones_like(found))
    if rule.powers_of_two:  # up to the next one: the mantissa carries into the exponent
        found = ((found.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return found
