"""Compiling ahead of time, without a GPU, and what the compiler said."""
