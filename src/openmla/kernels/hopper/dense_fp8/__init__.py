"""The dense Hopper kernel for FP8 queries and keys: the bf16 kernel's structure, FP8 products."""
