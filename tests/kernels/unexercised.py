"""What no simulated test of a kernel exercises, and why that is so.

`exercise.py` finds what its tests leave out: waits that never had to wait, rings that did not turn
twice, conditions that went one way only. Each is anchored to a kernel, a function and a text of the
source, so that it does not move when lines do. An example:

    Unexercised(
        "hopper.dense", "produce", "mbarrier.wait(k_empty.index(stage), phase)", NEVER_BLOCKS,
        "The wait in front completes with the same arrivals.",
    )
"""

# ruff: noqa: E501  (statements are quoted in one line)

from __future__ import annotations

from dataclasses import dataclass

from gluon_sim import Gap
from gluon_sim.report.gaps import DOES_NOT_TURN, NEVER_BLOCKS, NEVER_FALSE


@dataclass(frozen=True)
class Unexercised:
    """A gap, and a sentence that says why no case can close it, or what closes it elsewhere."""

    kernel: str
    """As `exercise.py` takes it; "shared" for constants in files that several kernels use."""
    function: str
    text: str
    """The wait, the condition or the name of the ring; "" for a whole function."""
    what: str
    reason: str

    def covers(self, kernel: str, gap: Gap) -> bool:
        """Whether a gap of a kernel is this one."""
        return (self.kernel, self.function, self.text, self.what) == (
            kernel,
            gap.function,
            gap.text,
            gap.what,
        )


UNEXERCISED: tuple[Unexercised, ...] = (
    Unexercised(
        "blackwell.dense",
        "dense_kernel",
        "q_tail",
        DOES_NOT_TURN,
        "It is no ring: its tiles hold the columns of Q, which is loaded once for all blocks of keys.",
    ),
    Unexercised(
        "blackwell.pair",
        "wait_for_step",
        "mbarrier.wait(barrier.index(step % NB), step // NB & 1) of valid_full",
        NEVER_BLOCKS,
        "The scores of a step, which are waited for first, take a chain of copies and products, its bits a load; the wait orders the stores of the bits, and without it a race is found (a seeded defect).",
    ),
    Unexercised(
        "shared",
        "dequantize",
        "ROPE.source == 'cache'",
        NEVER_FALSE,
        "FP8 rope beside 16-bit queries comes from the pages of a cache alone; such tensors are refused.",
    ),
    Unexercised(
        "shared",
        "exp2_inplace_range",
        "i >= START and i < STOP",
        NEVER_FALSE,
        "Both kernels ask for all tiles at once.",
    ),
    Unexercised(
        "blackwell.sparse",
        "sparse_kernel",
        "q_smem",
        DOES_NOT_TURN,
        "It is no ring: its tiles hold the columns of Q, which is loaded once and stays for all steps.",
    ),
    Unexercised(
        "blackwell.sparse",
        "wait_for_step",
        "mbarrier.wait(barrier.index(step % NB), step // NB & 1) of k_valid_ready",
        NEVER_BLOCKS,
        "The scores of a step, which are waited for first, take a chain of copies and products, its bits a load; the wait orders the stores of the bits, and without it a race is found (a seeded defect).",
    ),
    Unexercised(
        "hopper.indexer",
        "select_kernel",
        "LONG",
        NEVER_FALSE,
        "It is asked of rows that do not fit the list; without LONG the width does, and a row with what is before its first vector is no longer than that.",
    ),
    Unexercised(
        "hopper.latent_fp8",
        "longest_first",
        "token >= first",
        NEVER_FALSE,
        "The code is the latent kernel's, whose own tests take both ways; 33 work items of 512 columns would take this kernel's 20 s.",
    ),
    Unexercised(
        "hopper.latent",
        "any_missing",
        "mbarrier.wait(valid_ready.index(b), phase)",
        NEVER_BLOCKS,
        "The producer announces a block's validity before it starts to copy the block's tiles, which are waited for first; the wait orders the stores of validity, and without it a race is found (a seeded defect).",
    ),
    Unexercised(
        "hopper.latent",
        "latent_kernel",
        "AFTER",
        NEVER_FALSE,
        "Only launches behind the kernel that counts rows have a count to look at.",
    ),
    Unexercised(
        "hopper.sparse_backward",
        "consumer",
        "mbarrier.wait(bars.valid_ready.index(0), phase)",
        NEVER_BLOCKS,
        "The producer announces what counts before it starts to copy the rows, which are waited for first; the wait orders the stores, and without it a race is found (a seeded defect).",
    ),
    Unexercised(
        "hopper.sparse_backward",
        "entry_pass_kernel",
        "q_latent",
        DOES_NOT_TURN,
        "It is no ring: its tiles hold the columns of Q, which is loaded once for all entries.",
    ),
    Unexercised(
        "hopper.sparse_backward",
        "entry_pass_kernel",
        "smem.d_out",
        DOES_NOT_TURN,
        "It is no ring: its tiles hold the columns of d_out, which is loaded once for all entries.",
    ),
)


def reason(kernel: str, gap: Gap, known: tuple[Unexercised, ...] = UNEXERCISED) -> str:
    """Why a gap stays; nothing where nobody has said so."""
    return next((each.reason for each in known if each.covers(kernel, gap)), "")
