"""The dense Blackwell kernel: MHA form, K and V by TMA, tcgen05, tensor memory."""
