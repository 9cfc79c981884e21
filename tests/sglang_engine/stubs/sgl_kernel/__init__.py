"""In the place of sglang-kernel, of which there is no build for CPUs."""

from absent import fill

__version__ = "0.4.10"
fill(
    "sgl_kernel",
    """kvcacheio flash_mla flash_attn scalar_type quantization elementwise gemm moe sampling
    speculative memory sparse_flash_attn top_k utils allreduce attention grammar mamba hadamard""",
)
