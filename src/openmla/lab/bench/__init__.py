"""Benchmarks: speed claims are ratios against named peers, measured in the same run."""
