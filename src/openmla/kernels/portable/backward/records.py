"""Records of the portable backward kernels."""

from typing import Any, NamedTuple


class RowStatistics(NamedTuple):
    """What a backward pass knows of a block of query rows, all [rows], fp32."""

    seeing: Any
    """Whether a row sees a key at all; rows past the sequence see none."""
    lse: Any
    """Natural log; -inf where no key is seen."""
    total: Any
    """What exponents of weights are relative to, log2: lse and the sink; +inf where no key is."""
    alone: Any
    """What weights without the sink are relative to, log2; the gradient of lse goes by these."""
