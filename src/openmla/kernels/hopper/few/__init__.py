"""Lists of rows for few queries on Hopper: scores by blocks of keys, then values by columns."""
