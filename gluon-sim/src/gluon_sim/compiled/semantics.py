"""What the meaning of every group of instructions rests on, and whether a chip has confirmed it.

`confirmed` names the chip whose results agree with programs that use the group; empty: none has.
"probes" are small programs of one instruction each, "cases" whole kernels on the same inputs: their
results are recorded beside the tests that compare.
What no source says, or what is left out on purpose, is in `NOT_MODELED`.

>>> {row.confirmed for row in TABLE if row.instructions.startswith("tcgen05")}
{''}
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Semantics:
    """A group of instructions: where its meaning was taken from."""

    instructions: str
    meaning: str
    source: str
    confirmed: str = ""


_PROBES = "H200: probes, every bit"
_CASES = "H200: cases of the dense, latent and sparse kernels"

TABLE: tuple[Semantics, ...] = (
    Semantics(
        "integer, logic, float32, cvt, shfl, vote, redux, prmt, ldmatrix",
        "as documented",
        "PTX ISA",
        "H200: probes, every bit but those of a NaN",
    ),
    Semantics(
        "ex2, lg2, rcp",
        "rounded once; an H200 is off by up to 2, 2 and 1 ulps",
        "PTX ISA",
        "H200: probes, so near",
    ),
    Semantics("v_exp, v_log, v_rcp", "rounded once; the chip is some ulps off", "CDNA4 ISA"),
    Semantics(
        "cp.async.bulk.tensor, 2D to 5D",
        "boxes, zeros outside, 64-bit addresses that wrap; "
        "columns begin at 16 bytes, or the instruction is illegal",
        "CUDA driver API, cuTensorMapEncodeTiled; Triton's ragged descriptors",
        _PROBES,
    ),
    Semantics(
        "cp.async.bulk.tensor gather4, scatter4",
        "column, then four rows; a row outside is zeros; all bytes count",
        "PTX ISA; Triton",
    ),
    Semantics("swizzles", "chunks of 16 bytes xor bits 7 to 9 of the address", "CUTLASS", _PROBES),
    Semantics(
        "mbarrier", "arrivals and bytes per phase; parity of the phase before", "PTX ISA", _CASES
    ),
    Semantics(
        "cp.async, mbarrier.arrive.noinc",
        "bytes past the source size are zeros",
        "PTX ISA",
        _PROBES,
    ),
    Semantics(
        "cp.async read by wgmma without a fence",
        "seen once it was waited for (counted as a note)",
        "kernels that run on an H200",
        _CASES,
    ),
    Semantics("fence.proxy.async", "joins the views of ordinary accesses and of units", "PTX ISA"),
    Semantics("wgmma", "16 rows a warp; accumulators and A by lane", "PTX ISA; CUTLASS", _PROBES),
    Semantics(
        "sums of wgmma",
        "aligned to the largest, cut off 25 places below it (13 with FP8)",
        "an H200 (gluon_sim.values.fp8_sums)",
        _PROBES,
    ),
    Semantics(
        "matrix descriptors of sm_90",
        "canonical K- and MN-major layouts, all swizzles",
        "CUTLASS mma_sm90_desc",
        _PROBES,
    ),
    Semantics(
        "matrix descriptors of sm_100", "the same with another encoding", "CUTLASS mma_sm100_desc"
    ),
    Semantics(
        "tcgen05.mma",
        "D by lane for 128 and 64 rows and for pairs; A in tensor memory",
        "CUTLASS mma_sm100_desc, mma_traits_sm100_frag",
    ),
    Semantics(
        "tcgen05.ld, st",
        "32x32b, and 16x32bx2 whose upper lanes read the second column",
        "PTX ISA; CUTLASS copy_traits_sm100",
    ),
    Semantics("tcgen05.cp 128x256b", "row r to lane r, 32 bytes to 8 columns", "PTX ISA; Triton"),
    Semantics(
        "tcgen05.commit",
        "an arrival after all earlier tcgen05 work of its block, in order",
        "PTX ISA; CUTLASS",
    ),
    Semantics(
        "tcgen05.ld without a wait",
        "complete at the first use of its registers",
        "scoreboards in the control bits of ptxas' output",
    ),
    Semantics("setmaxnreg", "registers come from the pool of the block", "PTX ISA", _CASES),
    Semantics(
        "gfx950 scalar and vector arithmetic",
        "as documented; 120 opcodes agree with another emulator",
        "CDNA4 ISA; tinygrad's emulator",
    ),
    Semantics(
        "dpp row_shr, row_bcast, wave_shl, row_ror, row_half_mirror, quad_perm",
        "another lane's first operand; where there is none 0 with bound_ctrl, else nothing is "
        "written; rows of 16 lanes that the masks leave out keep what they had",
        "CDNA4 ISA",
    ),
    Semantics(
        "ds_permute_b32",
        "the value of the last lane that names a lane, 0 where none does",
        "CDNA4 ISA; Triton",
    ),
    Semantics(
        "gfx950 global atomics",
        "lane by lane; plain stores of the same workgroup before a barrier come first",
        "LLVM's memory model of a workgroup that is not split over CUs",
    ),
    Semantics(
        "v_mfma 16x16, 32x32",
        "rows 8*(r/4) + 4*(lane/32) + r%4 of a 32 x 32 tile",
        "AMD matrix instruction calculator; Triton",
    ),
    Semantics("v_mfma_scale", "one e8m0 factor per lane and 32 elements of K", "CDNA4 ISA; Triton"),
    Semantics(
        "ds_read_b64_tr_b16, b8",
        "transposed in groups of 16 lanes",
        "Triton; AMD aiter's MLA kernels",
    ),
    Semantics("v_permlane16_swap, v_permlane32_swap", "odd groups for even groups", "CDNA4 ISA"),
    Semantics(
        "v_cvt_scalef32_pk", "OCP e4m3, nearest even, saturating with MODE.FP16_OVFL", "CDNA4 ISA"
    ),
    Semantics(
        "copies to LDS",
        "byte M0 + offset + lane * size; lanes out of range of a buffer "
        "write zeros, lanes that are off nothing",
        "CDNA4 ISA; Triton",
    ),
    Semantics("s_waitcnt", "loads and copies in order of issue, per counter", "CDNA4 ISA"),
)

NOT_MODELED: tuple[str, ...] = (
    "rounding inside tcgen05 and MFMA: products are summed in float64 and rounded once",
    "the bits of a NaN",
    "tcgen05.fence, and the visibility of mbarrier.init without a fence",
    "reordering of ordinary memory accesses, caches, timing",
    "ptxas and the assembler: PTX is executed, not SASS, and gfx950 assembly, not its encoding",
    "hazards of gfx950 that s_nop covers; blocks other than one after another",
    "races between the lanes of a warp, and races in global memory",
)
