"""Plans of the Blackwell kernels over latent rows, which lists or pages name.

kernel     SparseConfig, SparseKernel: one CTA, 64 heads
pair       PairConfig, PairKernel: a pair of CTAs
family     what the kernels serve
"""
