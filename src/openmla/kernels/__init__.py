"""Kernels: one folder per family, one file per form. `launch` is the only way in."""
