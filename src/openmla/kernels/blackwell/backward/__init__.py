"""The backward pass of the dense form on Blackwell: two kernels that own what they write."""
