"""What a compute unit of an MI350X or MI355X offers one block. Pure integers.

`openmla.modular.cdna4` has what the original's blocks have too: the LDS, waves, copies to LDS.
"""

LANE_REGISTERS = 256
"""Registers of a lane: two threads of a block's 512 share the 512 registers of each SIMD lane."""
LONE_LANE_REGISTERS = 512
"""Registers of a lane whose wave is alone on its SIMD, as in a block of four waves. Half of them
hold sums of products alone."""
FIRST_TRITON = (3, 8)
"""Before it, copies to LDS take their addresses only in layouts that cannot describe the slots of K
and V."""
