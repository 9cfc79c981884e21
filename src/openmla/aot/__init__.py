"""Compiling a model's kernels ahead of its first call, and for GPUs that are not there."""
