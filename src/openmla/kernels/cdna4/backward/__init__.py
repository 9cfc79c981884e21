"""Gradients of the dense form on CDNA4."""
