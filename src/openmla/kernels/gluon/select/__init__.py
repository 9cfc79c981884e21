"""Selection of the best scores: the indexer's second step on NVIDIA GPUs and on CDNA4."""
