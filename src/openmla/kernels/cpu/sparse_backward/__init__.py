"""Gradients of the sparse form on the CPU."""
