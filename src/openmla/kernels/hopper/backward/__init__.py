"""The backward pass of the dense form on Hopper: two kernels that own what they write."""
