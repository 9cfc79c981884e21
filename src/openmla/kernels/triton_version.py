"""The version of Triton that is installed. Nothing else works it out."""

import triton

TRITON: tuple[int, ...] = tuple(int(part) for part in triton.__version__.split(".")[:2])
"""Major and minor number."""
