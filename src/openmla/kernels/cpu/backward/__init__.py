"""Gradients on the CPU."""
