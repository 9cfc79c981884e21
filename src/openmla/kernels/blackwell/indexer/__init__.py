"""The scores of DSA's indexer on Blackwell."""
