"""The asynchronous units: TMA, wgmma, tcgen05, and how they see shared memory."""
