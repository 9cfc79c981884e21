"""The indexer on the CPU."""
