"""Kernels for Blackwell (B200): Gluon, TMA, tcgen05, tensor memory, warp specialization."""
