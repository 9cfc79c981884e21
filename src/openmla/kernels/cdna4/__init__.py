"""Kernels for CDNA4 (gfx950: MI350X, MI355X): Gluon, MFMA, copies to LDS, transposing LDS reads."""
