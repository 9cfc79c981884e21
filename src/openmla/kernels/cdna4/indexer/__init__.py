"""DSA's indexer on CDNA4: its scores, and the plan of its selection."""
