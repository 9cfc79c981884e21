"""All seeded synchronization defects."""

from sim.defects_hopper import HOPPER_DENSE, HOPPER_FEATURES
from sim.defects_other import BLACKWELL, CDNA4

DEFECTS = [*HOPPER_DENSE, *HOPPER_FEATURES, *BLACKWELL, *CDNA4]
