"""Compiles a kernel for a target on a machine without a GPU, by Triton alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

TARGETS = {
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


def compiled(
    kernel: Any, types: Mapping[str, str], consts: Mapping[str, Any], target: str, **options: Any
) -> Any:
    """What Triton makes of a kernel whose pointers are divisible by 16."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = GluonASTSource(kernel, signature, dict(consts), aligned)
    return triton.compile(source, target=TARGETS[target], options=options)
