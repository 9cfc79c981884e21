"""The latent Hopper kernel for FP8 queries: FP8 scores, values converted in registers."""
