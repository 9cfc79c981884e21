"""The loss of an indexer, on the CPU."""
