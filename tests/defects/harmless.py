"""Changes of kernels that cannot matter, and why not: survivors that nobody needs to look at again.

Each is anchored to a file, a function and the text of a statement, or of the part of it that
matters, so that it does not move when lines do. An example:

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
    """In one line, all of it or a part that it has once; of a statement with a body, what stands
    before the body."""
    becomes: str
    reason: str
    place: int = 1
    """Which of the function's statements with the text of the whole statement it is."""

    def covers(self, edit: Edit) -> bool:
        """Whether an edit is this change."""
        here = (self.file, self.function, self.place) == (edit.file, edit.function, edit.place)
        once = edit.statement.count(self.statement) == 1
        return (
            here and once and edit.statement.replace(self.statement, self.becomes) == edit.becomes
        )


HARMLESS: tuple[Harmless, ...] = (
    Harmless(
        "kernels/blackwell/dense/multiply.py",
        "score",
        "mbarrier.wait(bars.q_wide.index(half), 0, pred=j == first)",
        "mbarrier.wait(bars.q_wide.index(half), 0, pred=True)",
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
        "scales_of_rows",
        "return gl.load(q_scale_ptr + (work.token + row), mask=row < work.rows, other=0.0)",
        "return gl.load(q_scale_ptr + (work.token + row), mask=row < work.rows, other=(0.0) + 1)",
        "Rows past the last query are not stored.",
    ),
    Harmless(
        "kernels/blackwell/dense/softmax.py",
        "start",
        "VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, TMEM.keys // 2, TMEM.ctas))",
        "VECTOR: gl.constexpr = gl.SliceLayout(1, row_registers(gl.float32, (((TMEM.keys) + (2) - 1) // (2)), TMEM.ctas))",
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
        "mbarrier.wait(bars.done, 0)",
        "mbarrier.wait(bars.done, 0) mbarrier.wait(bars.done, 0)",
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
        'few.weight_programs, {"num_warps": 4, "launch_pdl"',
        'few.weight_programs, { "launch_pdl"',
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
        "kernels/gluon/indexer_work.py",
        "allocate_tiles",
        "STAGES: gl.constexpr = CFG.key_stages * CFG.block_keys // ROWS",
        "STAGES: gl.constexpr = (((CFG.key_stages * CFG.block_keys) + (ROWS) - 1) // (ROWS))",
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
        "own = gl.load(windows.sequences_ptr + query, mask=live, other=-1) == line",
        "own = gl.load(windows.sequences_ptr + query, mask=live, other=(-1) + 1) == line",
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
        '"num_warps": 4, }',
        "}",
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/scores.py",
        "next_reference",
        "return gl.where(reached > row_max + THRESHOLD, reached, row_max)",
        "return gl.where(reached > row_max - THRESHOLD, reached, row_max)",
        "A reference may move earlier than it must: weights are relative to it.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/launch.py",
        "constexprs",
        '"num_warps": 4, }',
        "}",
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/launch.py",
        "calls",
        "programs = min(total // WGMMA_ROWS + batch + 1, config.sm_count)",
        "programs = min((-(-(total) // (WGMMA_ROWS))) + batch + 1, config.sm_count)",
        "A program more finds no work item and ends.",
    ),
    Harmless(
        "kernels/hopper/dense/scheduler.py",
        "scheduler",
        "mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1)",
        "mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1) mbarrier.wait(bars.t_empty.index(slot), ((turn >> 1) & 1) ^ 1)",
        "Nobody arrives there before the next work item is announced: the phase has completed.",
    ),
    Harmless(
        "kernels/hopper/dense/launch.py",
        "fixed_of",
        "config.d_rope > 0",
        "config.d_rope >= 0",
        "Without columns of rope nothing is read from pages, whatever their size is.",
    ),
    Harmless(
        "kernels/hopper/dense/producer.py",
        "load_keys",
        "tiles.rope.dtype.primitive_bitwidth // 8",
        "(((tiles.rope.dtype.primitive_bitwidth) + (8) - 1) // (8))",
        "Types of rope have 8 or 16 bits.",
    ),
    Harmless(
        "kernels/hopper/dense_fp8/correction.py",
        "per_word",
        "assert_trivial=True",
        "assert_trivial=False",
        "It asks the compiler for a check, and changes no value.",
    ),
    Harmless(
        "kernels/hopper/dense_fp8/launch.py",
        "_upcast",
        '"num_warps": 4, }',
        "}",
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/latent/kernel.py",
        "left_step",
        "O_next = warpgroup_mma(A, k_left.index(z + b), O, is_async=True)",
        "O_next = warpgroup_mma(A, k_left.index(z + b), O, is_async=False)",
        "The product is waited for where it is issued, one statement before its own wait.",
    ),
    Harmless(
        "kernels/hopper/latent/launch.py",
        "_merge",
        "config.latent // columns), shared",
        "(-(-(config.latent) // (columns)))), shared",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/hopper/latent/launch.py",
        "constexprs",
        '"num_warps": 4, }',
        "}",
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "claim_kernel",
        "let_next_begin()",
        "pass",
        "The next launch begins when this one has ended: later, with the same results.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "claim_kernel",
        "let_next_begin()",
        "let_next_begin() let_next_begin()",
        "The next launch has been let begin already.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "dequantize_kernel",
        "let_next_begin()",
        "pass",
        "The next launch begins when this one has ended: later, with the same results.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "dequantize_kernel",
        "let_next_begin()",
        "let_next_begin() let_next_begin()",
        "The next launch has been let begin already.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "place_kernel",
        "wait_for_kernel_before()",
        "wait_for_kernel_before() wait_for_kernel_before()",
        "The launch before has ended: the second wait passes.",
    ),
    Harmless(
        "kernels/gluon/dequantize/kernels.py",
        "dequantize_kernel",
        "wait_for_kernel_before()",
        "wait_for_kernel_before() wait_for_kernel_before()",
        "The launch before has ended: the second wait passes.",
    ),
    Harmless(
        "kernels/gluon/dequantize/rows.py",
        "dequantized",
        "is_pure=True",
        "is_pure=False",
        "The text reads and writes registers alone; the compiler may move it less.",
    ),
    Harmless(
        "kernels/gluon/dequantize/launch.py",
        "rows_of",
        "data.shape[0] > 1 and",
        "data.shape[0] >= 1 and",
        "The rows of a single page are found by its number 0 as well as without it.",
    ),
    Harmless(
        "kernels/gluon/dequantize/launch.py",
        "_named",
        'placing |= {"launch_pdl": True}',
        'placing |= {"launch_pdl": False}',
        "The launches begin when the ones before have ended, and find nothing to wait for.",
    ),
    Harmless(
        "kernels/portable/indexer/scores.py",
        "key_tile",
        "at = key.to(tl.int64)",
        "at = key",
        "The offset of a scale is the key itself, a number of 32 bits.",
    ),
    Harmless(
        "kernels/portable/indexer/launch.py",
        "_select",
        '"pages": 0 if table is None',
        '"pages": 1 if table is None',
        "Without a table the kernel does not look at how long it is.",
    ),
    Harmless(
        "kernels/portable/indexer/launch.py",
        "_scores",
        '"num_warps": config.num_warps, ',
        "",
        "The number of warps is a matter of speed.",
    ),
    Harmless(
        "kernels/blackwell/sparse/load.py",
        "load_q",
        "SPLIT.smem // GATHERED",
        "(((SPLIT.smem) + (GATHERED) - 1) // (GATHERED))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/gluon/compat.py",
        "_tmem_reg_layout",
        'getattr(layout, "two_ctas", False)',
        'getattr(layout, "two_ctas", True)',
        "The layouts of tensor memory have this field in every Triton from 3.6 to 3.9.",
    ),
    Harmless(
        "kernels/blackwell/sparse/launch.py",
        "rows_of",
        "data.stride(1) // stride",
        "(-(-(data.stride(1)) // (stride)))",
        "The stride of a descriptor row divides that of a row.",
    ),
    Harmless(
        "kernels/blackwell/sparse/launch.py",
        "constexprs_of",
        '"num_warps": 4, }',
        "}",
        "Four warps are what a launch has unless it says otherwise.",
    ),
    Harmless(
        "kernels/hopper/dense/plan.py",
        "deepest_ring",
        "deeper.smem_used <= SMEM_PER_BLOCK",
        "deeper.smem_used < SMEM_PER_BLOCK",
        "No widths, tiles and stages take shared memory to its last byte.",
    ),
    Harmless(
        "kernels/hopper/chip.py",
        "accumulator_registers",
        "ceildiv(WGMMA_M * columns, WARPGROUP)",
        "((WGMMA_M * columns) // (WARPGROUP))",
        "Tiles have an even number of columns.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/plan.py",
        "(module)",
        "7 * accumulator_registers(16) // 2",
        "(-(-(7 * accumulator_registers(16)) // (2)))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/plan.py",
        "HopperLatentFp8Config",
        "scaled: bool = False",
        "scaled: bool = True",
        "The planner says of every plan whether rows have scales.",
    ),
    Harmless(
        "kernels/gluon/indexer_work.py",
        "producer",
        "mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)",
        "mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1) mbarrier.wait(bars.q_empty.index(slot), ((turn // QS) & 1) ^ 1)",
        "Nobody arrives there before the slot is filled again: the phase has completed.",
    ),
    Harmless(
        "kernels/hopper/dense_fp8/correction.py",
        "correct",
        "left = gl.convert_layout(left, L, assert_trivial=True)",
        "left = gl.convert_layout(left, L, assert_trivial=False)",
        "It asks the compiler for a check, and changes no value.",
    ),
    Harmless(
        "kernels/hopper/indexer/tile.py",
        "over_registers",
        ", assert_trivial=True), ",
        ", assert_trivial=False), ",
        "It asks the compiler for a check, and changes no value.",
    ),
    Harmless(
        "kernels/hopper/dense/softmax.py",
        "hide",
        "scores = gl.reshape(S, [64, BN // 8, 4, 2])",
        "scores = gl.reshape(S, [64, (((BN) + (8) - 1) // (8)), 4, 2])",
        "A tile of keys is a multiple of 8.",
    ),
    Harmless(
        "kernels/hopper/latent/kernel.py",
        "right_step",
        "O_next = warpgroup_mma(A, k_right.index(z + b + 1), O, is_async=True)",
        "O_next = warpgroup_mma(A, k_right.index(z + b + 1), O, is_async=False)",
        "The product is waited for where it is issued, one statement before its own wait.",
    ),
    Harmless(
        "kernels/hopper/latent/kernel.py",
        "column_tiles",
        "HALF: gl.constexpr = DIMS.latent // 2",
        "HALF: gl.constexpr = (((DIMS.latent) + (2) - 1) // (2))",
        "The width of the latent part is even.",
    ),
    Harmless(
        "kernels/hopper/latent_fp8/scores.py",
        "exponents",
        "return (x.to(gl.int32, bitcast=True) >> 23 & 255).to(gl.float32)",
        "return (x.to(gl.int32, bitcast=True) >> 23 & 255)",
        "An integer that is added to fp32 numbers becomes one of them.",
    ),
    Harmless(
        "kernels/hopper/indexer/cut.py",
        "kth",
        "stuck = (step >= HALVES) & ((step & 3) == 3)",
        "stuck = (step >= HALVES) & ((step | 3) == 3)",
        "Which key is tried next decides how soon the search ends, not where.",
    ),
    Harmless(
        "kernels/hopper/few/rows.py",
        "words",
        ":, None, None], other=0)",
        ":, None, None], other=(0) + 1)",
        "Scales of rows that are not there are 0, whatever they are multiplied with.",
    ),
    Harmless(
        "kernels/hopper/few/rows.py",
        "write_stat",
        " + query.to(gl.int64) * output",
        " + query * output",
        "The stride has 64 bits, and so has the product.",
    ),
    Harmless(
        "kernels/hopper/latent/merge.py",
        "load_parts",
        "sums = gl.load(here, mask=ok[:, :, None], other=0.0)",
        "sums = gl.load(here, mask=ok[:, :, None], other=(0.0) + 1)",
        "Ranges that are not there have a maximum of -inf, so their weight is 0.",
    ),
    Harmless(
        "kernels/hopper/latent/launch.py",
        "calls",
        'after = {"AFTER": True, "launch_pdl": True}',
        'after = {"AFTER": True, "launch_pdl": False}',
        "The launch begins when the one before has ended, and finds nothing to wait for.",
    ),
    Harmless(
        "kernels/blackwell/pair/softmax.py",
        "softmax",
        "wait_for_step(bars.o_done, step - 1, 1)",
        "wait_for_step(bars.o_done, step - 1, 1) wait_for_step(bars.o_done, step - 1, 1)",
        "The phase that is waited for again has completed, and the next one needs the weights of this step.",
    ),
    Harmless(
        "kernels/blackwell/dense/softmax.py",
        "weigh",
        " HOW.scale_buffers) & 1)",
        " HOW.scale_buffers) & 1) mbarrier.wait(bars.scales.full.index(place), (j // HOW.scale_buffers) & 1)",
        "The phase that is waited for again has completed, and the next one needs this step's arrival.",
    ),
    Harmless(
        "kernels/blackwell/indexer/scores.py",
        "sums",
        "QUERIES: gl.constexpr = COLUMNS // HEADS",
        "QUERIES: gl.constexpr = (((COLUMNS) + (HEADS) - 1) // (HEADS))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/blackwell/sparse/softmax.py",
        "softmax",
        "grew = gl.max(gl.where(here > row_max + THRESHOLD, 1, 0), 0)",
        "grew = gl.max(gl.where(here >= row_max + THRESHOLD, 1, 0), 0)",
        "A reference may move earlier than it must: weights are relative to it.",
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "walk",
        "async_copy.wait_group(0)",
        "async_copy.wait_group(0) async_copy.wait_group(0)",
        "The groups that are waited for again have completed.",
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "walk",
        "async_copy.wait_group(2)",
        "async_copy.wait_group(2) async_copy.wait_group(2)",
        "The groups that are waited for again have completed.",
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "walk",
        "async_copy.wait_group(2)",
        "async_copy.wait_group(2) async_copy.wait_group(2)",
        "The groups that are waited for again have completed.",
        place=2,
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "dense_kernel",
        "async_copy.wait_group(2)",
        "async_copy.wait_group(2) async_copy.wait_group(2)",
        "The groups that are waited for again have completed.",
    ),
    Harmless(
        "kernels/cdna4/sparse/kernel.py",
        "sparse_kernel",
        "async_copy.wait_group(0)",
        "async_copy.wait_group(0) async_copy.wait_group(0)",
        "The groups that are waited for again have completed.",
    ),
    Harmless(
        "kernels/cdna4/sparse/rows.py",
        "clear_rows",
        "thread_barrier()",
        "thread_barrier() thread_barrier()",
        "The second barrier orders nothing that the first does not.",
    ),
    Harmless(
        "kernels/cdna4/softmax.py",
        "opaque_zero",
        "int32, is_pure=False, pack=",
        "int32, is_pure=True, pack=",
        "The text writes 0 whether the compiler may move it or not.",
    ),
    Harmless(
        "kernels/cdna4/indexer/scores.py",
        "load_keys",
        "[:, None], other=0.0), )",
        "[:, None], other=(0.0) + 1), )",
        "Scores of keys past the last are not stored.",
    ),
    Harmless(
        "kernels/cdna4/indexer/scores.py",
        "load_keys",
        "None], other=0.0), high=gl",
        "None], other=(0.0) + 1), high=gl",
        "Scores of keys past the last are not stored.",
    ),
    Harmless(
        "kernels/portable/launch.py",
        "_common",
        'num_warps": config.num_warps, "num_stages',
        "num_stages",
        "The number of warps is a matter of speed.",
    ),
    Harmless(
        "kernels/portable/quantize.py",
        "quantize",
        "(tile.heads * tile.columns // (32 * VALUES_PER_THREAD)",
        "((-(-(tile.heads * tile.columns) // (32 * VALUES_PER_THREAD)))",
        "Heads and columns are padded to powers of two, so that the quotient has no remainder unless it is 0.",
    ),
    Harmless(
        "kernels/portable/quantize.py",
        "quantize",
        "VALUES_PER_THREAD), 1), MOST_WARPS",
        "VALUES_PER_THREAD), 2), MOST_WARPS",
        "The number of warps is a matter of speed.",
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "load_Q",
        "async_copy.commit_group()",
        "async_copy.commit_group() async_copy.commit_group()",
        "The empty group is older than those of keys and values; waits count from the newest.",
    ),
    Harmless(
        "kernels/cdna4/sparse/kernel.py",
        "slot_at",
        "latent = rings.latent.index(number)",
        "latent = rings.latent.index((number) ^ 1)",
        "All accesses to the ring go through here: its two slots change places.",
    ),
    Harmless(
        "kernels/cdna4/sparse/rows.py",
        "copy_block",
        "async_copy.commit_group()",
        "async_copy.commit_group() async_copy.commit_group()",
        "The newest group is empty, so that the wait behind it waits for more.",
    ),
    Harmless(
        "kernels/cdna4/dense/kernel.py",
        "walk",
        "DEPTHS: gl.constexpr = BLOCK.d_v // TILE",
        "DEPTHS: gl.constexpr = (((BLOCK.d_v) + (TILE) - 1) // (TILE))",
        "The width of V is a multiple of a tile.",
    ),
    Harmless(
        "kernels/cdna4/lds.py",
        "LatentSlot.passes",
        "return self.rows // self.num_warps",
        "return (-(-(self.rows) // (self.num_warps)))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/cdna4/layouts.py",
        "matrix_layouts",
        "warps_per_cta=[num_warps // across, across",
        "warps_per_cta=[(-(-(num_warps) // (across))), across",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/cdna4/sparse/kernel.py",
        "blocks_seen",
        "blocks = (gl.maximum(stop, 0) + KV - 1) // KV",
        "blocks = (gl.maximum(stop, 0) + KV + 1) // KV",
        "One block more may be visited, in which no row sees a key.",
    ),
    Harmless(
        "kernels/gluon/indexer_work.py",
        "producer",
        "total = (total_q + QB - 1) // QB * chunks",
        "total = (((total_q + QB - 1) + (QB) - 1) // (QB)) * chunks",
        "One block more may be visited, which has no query.",
    ),
    Harmless(
        "kernels/gluon/indexer_work.py",
        "producer",
        "live, other=0), columns)",
        "live, other=(0) + 1), columns)",
        "Lanes without a query are not live, whatever their window is.",
    ),
    Harmless(
        "modular/blackwell/sparse/shape.py",
        "SparseShape.V_BMN_PER_ATOM",
        "return self.SV_ATOM_MMA_N // self.cta_group",
        "return (-(-(self.SV_ATOM_MMA_N) // (self.cta_group)))",
        "The division has no remainder.",
    ),
    Harmless(
        "kernels/portable/launch.py",
        "_bulk_copied",
        " and all(n * 2 % 16 == 0",
        " and all((n * 2) == 0",
        "Tensors are read by pointers instead of bulk copies: the same values.",
    ),
    Harmless(
        "kernels/portable/formats.py",
        "row_constants",
        "anywhere = any(n % 4 for n in",
        "anywhere = any((n) for n in",
        "Rows are read byte by byte where whole words would do: the same values.",
    ),
    Harmless(
        "kernels/portable/quantize.py",
        "(module)",
        "NATIVE = (8, 9)",
        "NATIVE = (8, 10)",
        "Both conversions to e4m3 round alike; the other one needs more instructions.",
    ),
    Harmless(
        "kernels/cdna4/sparse/rows.py",
        "clear_rows",
        "thread_barrier()",
        "pass",
        "The compiler itself orders stores to LDS and the loads behind them, as the simulator assumes.",
    ),
    Harmless(
        "kernels/cdna4/indexer/scores.py",
        "scores_kernel",
        "mine = (left > 0) & (lines == line)",
        "mine = (left > 0) | (lines == line)",
        "More keys are scored; those outside of a query's window are not stored, and every line of a table has entries for the longest.",
    ),
    Harmless(
        "kernels/hopper/indexer/select.py",
        "sample_pivot",
        "return gl.where(pivot == 0, -2, pivot - 1)",
        "return gl.where(pivot == 0, -1, pivot - 1)",
        "Scores of 0 are then not listed; where that leaves too few the row is walked again.",
    ),
    Harmless(
        "kernels/cdna4/indexer/launch.py",
        "_layouts",
        ", transposed=True, warps_per_cta",
        ", transposed=False, warps_per_cta",
        "Which lane holds which product: all layouts of the kernel follow from this one, and no value depends on it.",
    ),
    Harmless(
        "kernels/cdna4/dense/launch.py",
        "dense_constexprs",
        "fp8 = size == 1",
        "fp8 = size == 0",
        "Queries of 8 bits go to registers without LDS between, as those of 16 bits do.",
    ),
    Harmless(
        "kernels/hopper/few/values.py",
        "load_sums",
        "factor1 = gl.load(written.factors + HEADS + row, mask=row < stop, other=1.0)",
        "factor1 = gl.load(written.factors + HEADS + row, mask=row < ((stop) - 1), other=1.0)",
        "A row of block 0 of a step is below stop - HEADS, or the step is past the last one.",
    ),
    Harmless(
        "modular/cdna4/prefill.py",
        "MlaPrefillV2",
        "v_full_v227: bool = True",
        "v_full_v227: bool = False",
        "The constructor sets the field, whatever its default in the class is.",
    ),
)


def reason(edit: Edit, known: tuple[Harmless, ...] = HARMLESS) -> str:
    """Why a change cannot matter; nothing where nobody has said so."""
    return next((each.reason for each in known if each.covers(edit)), "")
