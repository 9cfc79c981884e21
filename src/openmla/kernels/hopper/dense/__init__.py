"""The dense Hopper kernel: MHA form, K and V by TMA, wgmma, warp specialization."""
