"""The sparse CDNA4 kernel."""
