"""Shape configurations of the CDNA4 (gfx950) prefill kernels: what a caller chooses.

Everything else follows: `mma` derives the products and register tiles, `prefill` the
block and its LDS.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from openmla.arithmetic import require_int
from openmla.errors import InvalidArgument

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_OUTPUT_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class MhaConfigV2:
    """Shape of one prefill block with equal Q/K and V depth."""

    q_block_size: int
    """Query rows per warp."""
    kv_block: int
    """Keys per tile."""
    depth: int
    """Head depth of V and the output."""
    num_heads: int
    num_kv_heads: int
    """1 (all query heads share K and V) up to num_heads (one each)."""
    num_warps: int = 8
    rescale_threshold: float = 8.0
    """How far, in log2 units, the running max may grow before the output is rescaled."""
    dtype: str = "bfloat16"
    """Element of Q, K and V."""
    output_dtype: str = "float32"
    fp8_mma_k_128: bool = False
    """Use the 16×16×128 fp8 product instead of 32×32×64. bf16 ignores it."""

    def __post_init__(self) -> None:
        for name in ("q_block_size", "kv_block", "depth", "num_heads", "num_kv_heads", "num_warps"):
            require_int(name, getattr(self, name), 1)
        if self.dtype not in _ELEMENT_BYTES:
            raise InvalidArgument("dtype", f"one of {', '.join(_ELEMENT_BYTES)}", repr(self.dtype))
        if self.output_dtype not in _OUTPUT_DTYPES:
            expected = f"one of {', '.join(_OUTPUT_DTYPES)}"
            raise InvalidArgument("output_dtype", expected, repr(self.output_dtype))
        if not isinstance(self.fp8_mma_k_128, bool):
            raise InvalidArgument("fp8_mma_k_128", "True or False", repr(self.fp8_mma_k_128))
        if not self.rescale_threshold >= 0:  # also refuses NaN
            raise InvalidArgument("rescale_threshold", "0 or more", self.rescale_threshold)

    @cached_property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V."""
        return _ELEMENT_BYTES[self.dtype]

    @cached_property
    def is_fp8(self) -> bool:
        return self.element_bytes == 1


@dataclass(frozen=True, kw_only=True)
class MlaConfigV2(MhaConfigV2):
    """Shape of one MLA prefill block: Q and K are wider than V by the rope columns.

    A row of the latent cache holds k_nope in columns 0..depth-1 and k_rope in d_rope columns from
    `rope_cache_offset` on. What lies between is never read but counts in the row stride. V is the
    nope part, without rope.

    DeepSeek-V3: columns 0..127 nope (and V), 128..511 skipped, 512..575 rope.

    >>> config = MlaConfigV2(
    ...     q_block_size=32, kv_block=128, depth=128, num_heads=128, num_kv_heads=1,
    ...     d_qk=192, d_rope=64, cache_depth=576, rope_cache_offset=512, dtype="float8_e4m3fn")
    >>> config.d_nope(), config.mha().depth
    (128, 128)
    """

    d_qk: int
    """Depth of Q and K: depth + d_rope."""
    d_rope: int
    cache_depth: int
    """Width of a latent cache row."""
    rope_cache_offset: int
    """First rope column of a cache row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("d_qk", 1),
            ("d_rope", 0),
            ("cache_depth", 1),
            ("rope_cache_offset", 0),
        ):
            require_int(name, getattr(self, name), least)

    def d_nope(self) -> int:
        """Depth of the part of Q and K without rope: V's depth."""
        return self.depth

    def mha(self) -> MhaConfigV2:
        """The part that MLA shares with plain attention; depth stays V's."""
        shared = {field.name: getattr(self, field.name) for field in fields(MhaConfigV2)}
        return MhaConfigV2(**shared)


def given_or_made(config: MhaConfigV2 | None, shape: dict[str, Any]) -> Any:
    """The config, or an `MlaConfigV2` of these fields: whichever a caller has at hand."""
    if config is None:
        return MlaConfigV2(**shape)
    if type(config) not in (MhaConfigV2, MlaConfigV2):
        raise InvalidArgument("config", "an MhaConfigV2 or MlaConfigV2", repr(config))
    if shape:
        raise InvalidArgument("config", "alone, or else the fields of one", ", ".join(shape))
    return config
