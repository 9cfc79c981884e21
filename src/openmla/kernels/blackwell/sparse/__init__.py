"""The sparse Blackwell kernel: listed rows by gather, one CTA per token and 64 heads."""
