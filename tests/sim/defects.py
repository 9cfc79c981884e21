"""All seeded synchronization defects."""

from sim.defects_handover import HANDOVER
from sim.defects_hopper import HOPPER_DENSE, HOPPER_FEATURES
from sim.defects_other import BLACKWELL, CDNA4

DEFECTS = [*HOPPER_DENSE, *HOPPER_FEATURES, *HANDOVER, *BLACKWELL, *CDNA4]
