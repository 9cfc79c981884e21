"""Calls that once gave wrong results or crashed on a GPU: right by default, or refused by name.

Without a named backend something must serve them. A kernel family that is named may refuse, but
only with a typed error.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu.on_device import on, on_gpu
from openmla import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge

pytestmark = on_gpu

DENSE = Case("dense", 3, 128, 64, 128, q_lens=(129, 7), k_lens=(129, 200))
LATENT = Case("latent", 16, 512, 64, 512, q_lens=(20,), k_lens=(150,), scale=0.05, dtype="fp16")


def dense(d_nope: int, d_rope: int, d_v: int, dtype: str = "bf16") -> Case:
    """DENSE in other widths."""
    rope = "shared" if d_rope else "none"
    return replace(DENSE, d_nope=d_nope, d_rope=d_rope, d_v=d_v, dtype=dtype, rope=rope)


# d_nope that needs more than two column parts.
PARTS = [
    dense(d_nope, d_rope, d_v)
    for d_nope in (112, 176, 208, 224, 240)
    for d_rope, d_v in ((64, 128), (0, 64))
]
# V narrower than what the warps of a product share.
NARROW = [
    dense(*widths, dtype)
    for widths in (
        (17, 8, 10),
        (24, 8, 10),
        (52, 64, 24),
        (136, 64, 24),
        (156, 0, 1),
        (220, 0, 32),
        (128, 64, 6),
        (128, 64, 7),
        (64, 0, 12),
        (192, 64, 20),
        (128, 64, 8),
    )
    for dtype in ("bf16", "fp16")
]
# fp16 queries over bf16 or FP8 rows, which take more shared memory.
FP16_ROWS = [
    replace(LATENT, kv=kv, d_nope=width, d_v=width, d_rope=rope)
    for kv in ("plain", "bf16", "fp8_block64")
    for width, rope in ((512, 64), (512, 0), (448, 64), (256, 64), (96, 16))
]
# Rows whose scales are exponents: 512 columns, rope and all, or V without it.
EXPONENTS = [
    replace(LATENT, kv="fp8_584", d_nope=width, d_v=width, d_rope=512 - width)
    for width in (512, 448)
]
# Rope of more than 256 columns, whose FP8 scales are of blocks that begin before it.
WIDE_ROPE = [
    replace(dense(61, rope, 112), rope="cache", kv=kv, page_size=3)
    for rope in (288, 400)
    for kv in ("fp8_block64", "fp8_block128")
]
SCALES = [replace(DENSE, scale=scale) for scale in (0.0, -0.0, 1e-46, -0.5)]


@pytest.mark.parametrize("backend", ["auto", "hopper", "portable"])
@pytest.mark.parametrize(
    "case", [*PARTS, *NARROW, *FP16_ROWS, *EXPONENTS, *WIDE_ROPE, *SCALES], ids=str
)
def test_right_or_refused(case: Case, backend: str):
    built = on(case)
    try:
        outcome = built.run(backend)
    except Unsupported:
        assert backend != "auto"
        return
    verdict = judge(built, outcome)
    assert verdict.ok, verdict.report()
