"""Plans of the Blackwell kernels: what each runs on, takes of an SM and is compiled with.

    dense       DenseConfig: the dense kernel's numbers, and how they follow from the original's
    kernel      DenseKernel: what it takes of an SM
    pairs       the first Triton with pairs of CTAs
    partitions  what Triton makes of a kernel in partitions
    indexer     scores of the indexer
    family      what the kernels serve
    sparse/     the same for latent rows, by lists or pages

`openmla.modular` has the original's plans, which are called where a kernel follows them.
"""
