"""Kernels for Hopper (H100, H200): Gluon, TMA, wgmma, warp specialization."""
