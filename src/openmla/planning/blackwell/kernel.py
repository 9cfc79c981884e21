"""What the dense Blackwell kernel asks for besides what its plan does.

The plan counts bytes and columns; the kernel also has to cut them into tiles and copies.
"""

from __future__ import annotations

from openmla.planning.blackwell.mla import MLAConfig

LEAST_COLUMNS = 64  # a row of 64 or 128 bytes, which is what tiles are swizzled by


def why_no_kernel(config: MLAConfig) -> str:
    """The first thing the kernel cannot do; empty when it can run the plan.

    >>> from openmla.planning.blackwell.mla import select_mla_prefill_config
    >>> config = select_mla_prefill_config(
    ...     qkv_dtype="bfloat16", rope_gmem_dtype="bfloat16", rope_mma_dtype="bfloat16",
    ...     num_q_heads=64, group=64, depth=256, page_size=0, v_depth=192)
    >>> why_no_kernel(config)
    'V of 192 columns: a tile has a power of two of them, 64 or more'
    """
    nope, v = config.nope_depth, config.v_depth
    main = 1 << (nope.bit_length() - 1)
    tail = nope - main
    for name, width in (("V", v), ("K", main), ("K's second part", tail)):
        if width & (width - 1) or 0 < width < LEAST_COLUMNS:
            return f"{name} of {width} columns: a tile has a power of two of them, 64 or more"
    if config.BN & (config.BN - 1):
        return f"tiles of {config.BN} keys: their number is a power of two"
    if tail and config.use_fused_kv:
        return f"K of {main} + {tail} columns: in a ring that V shares, K is one tile"
    return ""
