"""All seeded synchronization defects."""

from defects_handover import HANDOVER
from defects_hopper import HOPPER_DENSE, HOPPER_FEATURES
from defects_other import BLACKWELL, CDNA4

DEFECTS = [*HOPPER_DENSE, *HOPPER_FEATURES, *HANDOVER, *BLACKWELL, *CDNA4]
