"""The dense CDNA4 kernel."""
