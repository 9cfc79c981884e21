"""What the dense Blackwell kernel asks for besides what its plan does.

The plan counts bytes and columns; the kernel also has to cut them into tiles and copies.
"""

from __future__ import annotations

from openmla.plan.blackwell_mla import MLAConfig
from openmla.problem import CACHE_FORMATS, Problem

LEAST_COLUMNS = 64  # a row of 64 or 128 bytes, which is what tiles are swizzled by


def why_no_kernel(problem: Problem, config: MLAConfig) -> str:
    """The first thing the kernel cannot do; empty when it can run the plan.

    >>> glm = Problem(form="dense", heads=64, d_nope=192, d_rope=64, d_v=192)
    >>> from openmla.plan.blackwell_mla import select_mla_prefill_config
    >>> config = select_mla_prefill_config(
    ...     qkv_dtype="bfloat16", rope_gmem_dtype="bfloat16", rope_mma_dtype="bfloat16",
    ...     num_q_heads=64, group=64, depth=256, page_size=0, v_depth=192)
    >>> why_no_kernel(glm, config)
    'V of 192 columns: the width of a tile is a power of two'
    """
    return _widths(config) or _rope(problem, config)


def _widths(config: MLAConfig) -> str:
    nope, v = config.nope_depth, config.v_depth
    main = 1 << (nope.bit_length() - 1)
    tail = nope - main
    for name, width in (("V", v), ("K", main), ("K's second part", tail)):
        if width & (width - 1) or 0 < width < LEAST_COLUMNS:
            return f"{name} of {width} columns: the width of a tile is a power of two"
    if config.BN & (config.BN - 1):
        return f"tiles of {config.BN} keys: their number is a power of two"
    if tail and config.use_fused_kv:
        return f"K of {main} + {tail} columns: in a ring that V shares, K is one tile"
    return ""


def _rope(problem: Problem, config: MLAConfig) -> str:
    if problem.rope_dtype == "fp8_656":
        stored = "bfloat16"  # whatever its latent part is
    else:
        stored = config.rope_gmem_dtype
    used = config.rope_mma_dtype
    in_cache = problem.rope_dtype in CACHE_FORMATS and problem.rope_dtype != "bf16"
    if in_cache and problem.rope_dtype != "fp8_656" and used != "bfloat16":
        return f"rope from an FP8 cache beside {problem.q_dtype} queries: its values are bf16"
    if stored != used and stored != "float8_e4m3fn":
        return f"rope stored as {stored} and multiplied as {used}: the kernel only widens FP8"
    return ""
