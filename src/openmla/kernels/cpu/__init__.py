"""CPU kernels: plain torch, blocked, fp32 arithmetic."""
