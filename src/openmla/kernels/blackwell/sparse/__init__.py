"""The sparse Blackwell kernel: listed rows by gather, one CTA or a pair."""
