"""The indexer in plain Triton."""
