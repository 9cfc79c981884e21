"""Plain Triton kernels for any CUDA or ROCm GPU. Imported only when such a kernel is launched."""
