"""The indexer on Hopper, in Gluon."""
