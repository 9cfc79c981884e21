"""An interpreter of the PTX that Triton emits for sm_90 and sm_100: one cluster at a time."""
