"""An interpreter of the gfx950 assembly that Triton emits: one workgroup at a time."""
