"""Gradients of the sparse form on Hopper: one walk over every list, and ordered sums by row."""
