"""Plans that need no GPU: the float64 reference and the CPU kernels."""
