"""The loss of an indexer by plain Triton kernels."""
