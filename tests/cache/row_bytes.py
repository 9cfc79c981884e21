"""Cache rows written in plain Python, number by number, as their formats are published.

Nothing here comes from openmla: `encode` and `decode` are what the package is compared with.
Every row has 512 columns; `nvfp4_352` has 64 of rope more.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence


def _e4m3(code: int) -> float:
    exponent, fraction = code >> 3, code & 7
    if exponent:
        return math.ldexp(1 + fraction / 8, exponent - 7)
    return math.ldexp(fraction / 8, -6)


E4M3 = [_e4m3(code) for code in range(127)]  # 0x7F is NaN
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROW_BYTES = {
    "fp8_528_v32": 528,
    "fp8_528_v41": 528,
    "fp8_528_v41_split": 528,
    "fp4_288": 288,
    "fp4_288_split": 288,
    "nvfp4_352": 352,
}
BEHIND = {"fp8_528_v41_split": 16, "fp4_288_split": 32}
"""Bytes of a row's scales where these lie behind all rows of a page."""
PAGE_MULTIPLE = {"fp8_528_v41_split": 512, "fp4_288_split": 256}


def fp32(x: float) -> float:
    """The nearest fp32, as a Python number."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def bf16(x: float) -> float:
    """The nearest bf16 of an fp32, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def nearest(x: float, table: Sequence[float], sign: int) -> int:
    """The code of the nearest number of a table, ties to the even code; past its end, the last."""
    size = abs(x)
    above = bisect_left(table, size)
    if above == len(table):
        code = len(table) - 1
    elif above == 0:
        code = 0
    else:
        down, up = size - table[above - 1], table[above] - size
        code = above - 1 if down < up or (down == up and above % 2) else above
    return code | (sign if math.copysign(1.0, x) < 0 else 0)


def power_of_two_above(x: float) -> float:
    """2^ceil(log2 x), exactly."""
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, exponent - 1 if fraction == 0.5 else exponent)


def fp8_scale(block: Sequence[float], exponent: bool, writer: str) -> float:
    """By the rules that writers have for small blocks."""
    amax = max(abs(x) for x in block)
    if writer == "flash_mla":
        return power_of_two_above(max(fp32(amax / 448), fp32(1e-4)))
    if writer == "vllm":
        scale = fp32(max(amax, fp32(1e-4)) / 448) if exponent else max(fp32(amax / 448), 2.0**-126)
    else:
        scale = max(fp32(amax / 448), 2.0**-126) if amax else 1.0
    return power_of_two_above(scale) if exponent else scale


def fp4_scale(block: Sequence[float]) -> int:
    """The e4m3 code of clamp(amax / 6, 2^-9, 448)."""
    amax = max(abs(x) for x in block)
    return nearest(min(max(fp32(amax / 6), 2.0**-9), 448.0), E4M3, 128)


def encode(row: Sequence[float], format: str, writer: str = "openmla") -> tuple[bytes, bytes]:
    """A row of fp32 numbers as (bytes of the row, bytes that lie behind the rows of its page)."""
    latent, rope = row[:512], row[512:]
    if format.startswith("fp8"):
        exponent = format != "fp8_528_v32"
        size = 32 if exponent else 128
        codes, scales = bytearray(), bytearray()
        for first in range(0, 512, size):
            block = latent[first : first + size]
            scale = fp8_scale(block, exponent, writer)
            codes += bytes(nearest(fp32(x / scale), E4M3, 128) for x in block)
            power = math.frexp(scale)[1] - 1 + 127
            scales += bytes([power]) if exponent else struct.pack("<f", scale)
        columns = bytes(codes)
    else:
        nibbles, scales = [], bytearray(32)
        for b in range(32):
            block = latent[16 * b : 16 * b + 16]
            code = fp4_scale(block)
            scales[8 * (b % 4) + b // 4 if format == "nvfp4_352" else b] = code
            nibbles += [nearest(fp32(x / E4M3[code]), E2M1, 8) for x in block]
        columns = bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 512, 2))
        columns += bytes(nearest(x, E4M3, 128) for x in rope)
    if format in BEHIND:
        return columns, bytes(scales)
    return columns + bytes(scales), b""


def decode(stored: bytes, behind: bytes, format: str) -> list[float]:
    """The bf16 values of a row that has no NaN."""
    if format.startswith("fp8"):
        scales = behind or stored[512:]
        if format == "fp8_528_v32":
            steps = [x for x in struct.unpack("<4f", scales) for _ in range(128)]
        else:
            steps = [math.ldexp(1.0, e - 127) for e in scales for _ in range(32)]
        return [bf16(fp32(_signed(stored[i], E4M3, 7) * steps[i])) for i in range(512)]
    found = []
    for i in range(512):
        b = i // 16
        at = 320 + 8 * (b % 4) + b // 4 if format == "nvfp4_352" else 256 + b
        scale = behind[b] if behind else stored[at]
        nibble = stored[i // 2] >> 4 if i % 2 else stored[i // 2] & 15
        found.append(bf16(_signed(nibble, E2M1, 3) * E4M3[scale]))
    if format == "nvfp4_352":
        found += [bf16(_signed(stored[256 + i], E4M3, 7)) for i in range(64)]
    return found


def _signed(code: int, table: Sequence[float], bits: int) -> float:
    value = table[code & ((1 << bits) - 1)]
    return -value if code >> bits else value


def place(format: str, page_size: int, row: int, page_stride: int) -> tuple[int, int]:
    """Where a physical row begins in a pool, and where its scales do if they lie behind rows."""
    page, offset = divmod(row, page_size)
    start, behind = page * page_stride, BEHIND.get(format, 0)
    each = ROW_BYTES[format] - behind
    return start + offset * each, start + page_size * each + offset * behind


def page_stride(format: str, page_size: int) -> int:
    """Bytes from page to page."""
    multiple = PAGE_MULTIPLE.get(format, 1)
    return -(-page_size * ROW_BYTES[format] // multiple) * multiple
