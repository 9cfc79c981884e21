"""What the merge of ranges takes of an SM, for the compile jobs of the families that launch it."""

from openmla.kernels.call import Call
from openmla.kernels.gluon.ranges.launch import MERGED_TOGETHER
from openmla.kernels.jobs import Predicted

SLOTS_OF_WARPS = 16 * 32 * 4  # bytes in which they exchange the slots of a row, 32 columns at once


def merge_memory(call: Call) -> Predicted | None:
    """What a launch of the merge takes; None for another kernel."""
    if call.kernel.__name__ != "merge_kernel":
        return None
    shared = call.arguments["TOGETHER"] == MERGED_TOGETHER
    return Predicted(shared=SLOTS_OF_WARPS if shared else 0, tmem=0)
