"""Every kernel compiled for its target on a machine without a GPU, and what the compiler said."""
