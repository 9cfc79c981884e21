"""What partitions of the latent FP8 kernel signal each other through named barriers.

| barrier | from | to | says |
|---|---|---|---|
| 5 + 2 slot + side | scores | left (side 0) or right (1) | weights of a step are written |
| 9 + 3 slot + group | left and right | producer | 64, 32, 32 rows of a step are read |

A partition that signals does not wait, nor do its warps for each other, as they would where one
thread arrives at an mbarrier for all. A barrier is signaled again only after it was passed: the one
of weights after `p_empty` completed, for the weights that the slot held before; the ones of rows
when the slot has new rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from openmla.kernels.hopper.latent.signals import signal_at

GROUPS = gl.constexpr(3)  # groups of rows of a step, each of which is freed as a whole


@gluon.jit
def signal_weights(slot):
    """The scores' partition signals after it has written and fenced the weights of a step."""
    signal_at("bar.arrive $1, 256; mov.b32 $0, 0;", 5 + 2 * slot)
    signal_at("bar.arrive $1, 256; mov.b32 $0, 0;", 6 + 2 * slot)


@gluon.jit
def wait_weights(slot, SIDE: gl.constexpr):
    """Left (SIDE 0) or right (1) waits before the products of a step."""
    signal_at("bar.sync $1, 256; mov.b32 $0, 0;", 5 + SIDE + 2 * slot)


@gluon.jit
def signal_read(slot, GROUP: gl.constexpr):
    """Left and right signal when a group of rows is in registers."""
    signal_at("bar.arrive $1, 384; mov.b32 $0, 0;", 9 + GROUP + GROUPS * slot)


@gluon.jit
def wait_read(slot, used, GROUP: gl.constexpr):
    """The producer waits before it copies rows to where others were, if the slot was used."""
    if used:
        signal_at("bar.sync $1, 384; mov.b32 $0, 0;", 9 + GROUP + GROUPS * slot)
