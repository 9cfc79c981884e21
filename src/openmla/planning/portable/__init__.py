"""Plans of the plain Triton kernels: tiles, the measured ones among them, and what they serve."""
