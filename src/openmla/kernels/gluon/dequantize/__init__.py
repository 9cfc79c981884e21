"""FP8 rows: what unpacks them, and the pass that dequantizes a cache once."""
