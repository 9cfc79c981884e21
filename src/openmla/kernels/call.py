"""One kernel launch as data, shared by all kernel families that Triton compiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.runtime.errors import OutOfResources

from openmla.errors import Unsupported


@dataclass(frozen=True, eq=False)
class Call:
    """One kernel launch: `programs` programs on grid axis 0, which has no limit at 65535."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]

    def run(self) -> Any:
        """Launch it; returns the compiled kernel.

        Where the compiler needs more of the chip than the plan estimated, nothing was launched.
        """
        try:
            return self.kernel[(self.programs,)](**self.arguments)
        except OutOfResources as error:
            raise Unsupported(f"{self.kernel.__name__}: {error}") from error

    def compile(self) -> Any:
        """Compile it for the current GPU, or take it from Triton's cache, without launching."""
        return self.kernel.warmup(grid=(self.programs,), **self.arguments)


def vector(x: Tensor | None) -> Tensor | None:
    """A small operand with contiguous elements."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def scale_arguments(scale: float) -> dict[str, Any]:
    """The kernel multiplies by a positive factor; a scale that vanishes in fp32 makes scores 0.

    A factor of 0, also after rounding to fp32, would turn a masked score into 0 * inf.
    """
    factor = abs(scale) * math.log2(math.e)
    vanishes = factor < 2.0**-149
    return {
        "factor": 1.0 if vanishes else factor,
        "SIGN": 0 if vanishes else 1 if scale > 0 else -1,
    }
