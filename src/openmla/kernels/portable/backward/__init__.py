"""Gradients by plain Triton kernels."""
