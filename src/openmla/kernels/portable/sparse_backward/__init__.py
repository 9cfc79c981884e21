"""Gradients of the sparse form in plain Triton."""
