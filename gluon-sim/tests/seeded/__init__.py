"""All seeded synchronization defects."""

from seeded.handover import HANDOVER
from seeded.hopper import HOPPER_DENSE, HOPPER_FEATURES
from seeded.other import BLACKWELL, CDNA4

DEFECTS = [*HOPPER_DENSE, *HOPPER_FEATURES, *HANDOVER, *BLACKWELL, *CDNA4]
