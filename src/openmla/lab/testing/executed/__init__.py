"""Compiled kernels of a target, executed on the CPU by gluon_sim.compiled and judged."""
