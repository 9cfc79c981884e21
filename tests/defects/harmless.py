"""Changes of kernels that cannot matter, and why not: survivors that nobody needs to look at again.

Each is anchored to a file, a function and the text of a statement, so that it does not move when
lines do. An example:

    Harmless(
        "kernels/hopper/dense/producer.py", "produce", "thread_barrier()", "pass",
        "The wait behind it orders the same accesses.",
    )
"""

# ruff: noqa: E501  (statements are quoted in one line)

from __future__ import annotations

from dataclasses import dataclass

from defects.drawing.source import Edit


@dataclass(frozen=True)
class Harmless:
    """One statement, what it becomes, and a sentence that says why nothing depends on that."""

    file: str
    """Below src/openmla."""
    function: str
    """Its dotted name; "(module)" outside of functions."""
    statement: str
    """In one line; of a statement with a body, what stands before the body."""
    becomes: str
    reason: str
    place: int = 1
    """Which of the function's statements with this text it is."""

    def covers(self, edit: Edit) -> bool:
        """Whether an edit is this change."""
        return (self.file, self.function, self.statement, self.becomes, self.place) == (
            edit.file, edit.function, edit.statement, edit.becomes, edit.place,
        )  # fmt: skip


HARMLESS: tuple[Harmless, ...] = (
    Harmless(
        "kernels/blackwell/dense/multiply.py",
        "score",
        "mbarrier.wait(q_wide.index(half), 0, pred=j == first)",
        "mbarrier.wait(q_wide.index(half), 0, pred=True)",
        "Its phase has completed by then and the barrier does not turn again: the wait passes.",
    ),
    Harmless(
        "kernels/blackwell/dense/softmax.py",
        "store_weights",
        "rest = (P - rounded.to(gl.float32)).to(DTYPE)",
        "rest = (P - rounded).to(DTYPE)",
        "The difference of fp32 and a narrower type is made in fp32 all the same.",
    ),
    Harmless(
        "kernels/gluon/compat.py",
        "_reinterpret",
        "if _PUBLIC_REINTERPRET:",
        "if (not _PUBLIC_REINTERPRET):",
        "It chooses between two names of one call, by the version of Triton.",
    ),
    Harmless(
        "kernels/blackwell/dense/softmax.py",
        "start",
        "row_scale = gl.load(q_scale_ptr + (token + row), mask=row < rows, other=0.0)",
        "row_scale = gl.load(q_scale_ptr + (token + row), mask=row < rows, other=(0.0) + 1)",
        "Rows past the last query are not stored.",
    ),
    Harmless(
        "kernels/blackwell/dense/softmax.py",
        "start",
        "VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM[4] // 2, TMEM[6]))",
        "VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, (-(-(TMEM[4]) // (2))), TMEM[6]))",
        "The number of columns is even.",
    ),
    Harmless(
        "kernels/blackwell/dense/launch.py",
        "calls",
        "yield Call(dense_kernel, blocks, arguments)",
        "yield Call(dense_kernel, (blocks) + 1, arguments)",
        "A block more finds no work item and ends.",
    ),
    Harmless(
        "kernels/hopper/few/values.py",
        "multiply",
        "mbarrier.wait(done, 0)",
        "mbarrier.wait(done, 0) mbarrier.wait(done, 0)",
        "The phase that is waited for again has completed.",
    ),
    Harmless(
        "kernels/hopper/few/scores.py",
        "scores_kernel",
        "S, _, _ = warpgroup_mma_wait(0, deps=(S, q_left, k_left))",
        "S, _, _ = warpgroup_mma_wait((0) + 1, deps=(S, q_left, k_left))",
        "The next product adds to the same registers and is waited for; nothing overwrites the tiles.",
    ),
    Harmless(
        "kernels/hopper/few/weights.py",
        "store_weights",
        "P = gl.convert_layout(P.to(weights_ptr.dtype.element_ty), L)",
        "P = gl.convert_layout(P, L)",
        "The store rounds to the type that it points to.",
    ),
    Harmless(
        "kernels/gluon/boxes.py",
        "load_pages",
        "page = gl.load(table + gl.minimum(here // PAGE, entries - 1), mask=keys > 0, other=0)",
        "page = gl.load(table + gl.minimum(here // PAGE, entries - 1), mask=keys > 0, other=(0) + 1)",
        "The page of a block without keys is not copied.",
    ),
    Harmless(
        "kernels/hopper/few/rows.py",
        "copied_rope",
        "cp_async(tile, start[:, None] + column[None, :], mask=(keys >= 0)[:, None])",
        "cp_async(tile, start[:, None] + column[None, :], mask=None)",
        "Scores of rows that are not there are replaced by -inf, whatever rope they were made of.",
    ),
    Harmless(
        "kernels/hopper/few/launch.py",
        "few_calls",
        'launches = ( (scores_kernel, few.score_programs, {"num_warps": SCORE_WARPS}), (weights_kernel, few.weight_programs, {"num_warps": 4, "launch_pdl": few.overlap}), (values_kernel, few.value_programs, {"num_warps": 4, "launch_pdl": few.overlap}), )',
        'launches = ( (scores_kernel, few.score_programs, {"num_warps": SCORE_WARPS}), (weights_kernel, few.weight_programs, { "launch_pdl": few.overlap}), (values_kernel, few.value_programs, {"num_warps": 4, "launch_pdl": few.overlap}), )',
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/indexer/tile.py",
        "over_registers",
        "return gl.convert_layout(upto, x.type.layout, assert_trivial=True) - x",
        "return gl.convert_layout(upto, x.type.layout, assert_trivial=False) - x",
        "It asks the compiler for a check, and changes no value.",
    ),
    Harmless(
        "kernels/hopper/indexer/scores.py",
        "scores_kernel",
        "STAGES: gl.constexpr = CFG[2] * CFG[1] // ROWS",
        "STAGES: gl.constexpr = (-(-(CFG[2] * CFG[1]) // (ROWS)))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/gluon/indexer_work.py",
        "producer",
        "first = gl.min(gl.where(live > 0, start, FAR), 0) // ROWS * ROWS",
        "first = (gl.min(gl.where(live > 0, start, FAR), 0) // ROWS)",
        "Blocks before the first key are looked at in vain.",
    ),
    Harmless(
        "kernels/gluon/indexer_work.py",
        "window_of",
        "own = gl.load(sequences_ptr + query, mask=live, other=-1) == line",
        "own = gl.load(sequences_ptr + query, mask=live, other=(-1) + 1) == line",
        "A query past the last has an empty window whatever sequence it is of.",
    ),
    Harmless(
        "kernels/gluon/indexer_operands.py",
        "_aligned",
        "fits = x.is_contiguous() and x.data_ptr() % 16 == 0",
        "fits = x.is_contiguous() and (x.data_ptr()) == 0",
        "Queries are copied where that is not needed.",
    ),
    Harmless(
        "kernels/gluon/indexer_operands.py",
        "scores_arguments",
        "box, layout = [DIM // heads, heads, DIM], tile_layout(DIM, 3, element=1)",
        "box, layout = [(-(-(DIM) // (heads))), heads, DIM], tile_layout(DIM, 3, element=1)",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/hopper/indexer/launch.py",
        "_scores",
        'arguments = { **scores_arguments(op, out, config.box_rows, config.chunk), "CFG": (config.consumers, config.BN, config.stages, config.query_stages, config.chunk), "REGISTERS": (config.registers.consumer, config.registers.producer), "num_warps": 4, }',
        'arguments = { **scores_arguments(op, out, config.box_rows, config.chunk), "CFG": (config.consumers, config.BN, config.stages, config.query_stages, config.chunk), "REGISTERS": (config.registers.consumer, config.registers.producer), }',
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/sparse_fp8/scores.py",
        "next_reference",
        "return gl.where(reached > row_max + THRESHOLD, reached, row_max)",
        "return gl.where(reached > row_max - THRESHOLD, reached, row_max)",
        "A reference may move earlier than it must: weights are relative to it.",
    ),
    Harmless(
        "kernels/hopper/sparse_fp8/launch.py",
        "constexprs",
        'return { "ST": config.num_kv_stages, "DIMS": (config.latent, config.rope), "REGISTERS": (registers.consumer, registers.scores, registers.producer), "LAYOUTS": (*rows, tile_layout(64)), "num_warps": 4, }',
        'return { "ST": config.num_kv_stages, "DIMS": (config.latent, config.rope), "REGISTERS": (registers.consumer, registers.scores, registers.producer), "LAYOUTS": (*rows, tile_layout(64)), }',
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/sparse_fp8/launch.py",
        "calls",
        "programs = min(rows // WGMMA_ROWS + batch + 1, config.sm_count)",
        "programs = min((-(-(rows) // (WGMMA_ROWS))) + batch + 1, config.sm_count)",
        "A program more finds no work item and ends.",
    ),
)


def reason(edit: Edit, known: tuple[Harmless, ...] = HARMLESS) -> str:
    """Why a change cannot matter; nothing where nobody has said so."""
    return next((each.reason for each in known if each.covers(edit)), "")
