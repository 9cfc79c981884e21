"""The latent Hopper kernel: absorbed queries over listed or paged rows, bf16, fp16 or FP8."""
