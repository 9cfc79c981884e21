"""V of 8 bits as bf16, before a dense kernel whose values have 16 bits."""
