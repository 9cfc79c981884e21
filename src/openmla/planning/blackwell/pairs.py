"""Pairs of CTAs: the first Triton that compiles each kernel of one."""

FIRST_DENSE_PAIR = (3, 8)
"""The first Triton with the dense kernel of a CTA pair: 3.6 has no barrier of two CTAs, and a pair
that 3.7 compiles gives wrong numbers when it is executed."""
FIRST_ROWS_PAIR = (3, 8)
"""The first Triton with the latent-row kernel of a CTA pair: 3.7 refuses its one-CTA barriers."""
