"""Lists of rows for few queries on Hopper: scores and weights by blocks of keys, then values by
columns."""
