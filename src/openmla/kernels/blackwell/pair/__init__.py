"""Latent MLA prefill on Blackwell with a pair of CTAs per token."""
