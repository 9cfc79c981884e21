"""The scores of DSA's indexer on CDNA4."""
