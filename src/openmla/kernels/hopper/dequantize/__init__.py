"""FP8 rows on Hopper: what unpacks them, and the pass that dequantizes a cache once."""
