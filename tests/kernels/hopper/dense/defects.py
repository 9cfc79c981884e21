"""Seeded defects of the dense Hopper kernel: a text change to one of its files."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gluon_sim import Kind
from kernels.hopper.dense.setups import Setup
from kernels.hopper.dense.test_kernel import EDGES, FULL_TABLE, MASKED, ONE_BLOCK, PAGED, PEAKY, V3
from kernels.mutants import NOTHING, Defect

# Every block of keys raises the maximum: they are walked from the last to the first.
FALLING = replace(V3, heads=3, values="rising", scale=-0.2, q_lens=(70,), k_lens=(390,), spare=0)
# In ranges of at least 256 keys: the first request is cut into 3, the last of one key, the second
# into 2 for each of 2 tiles, the third not at all.
SPLIT = replace(
    V3, heads=1, d_nope=64, d_rope=32, d_v=64, q_lens=(20, 65, 5), k_lens=(769, 513, 300), seed=1
)
GROUPS = replace(SPLIT, rope="cache", kv="bf16", page_size=64)
SETUPS = {
    "work items": Setup(V3),
    "edges": Setup(EDGES),
    "empty rows": Setup(replace(V3, d_nope=192, d_v=256, q_lens=(129,), k_lens=(66,))),
    "one block": Setup(replace(V3, heads=1, q_lens=(5, 0), k_lens=(20, 0), spare=0)),
    "one request": Setup(ONE_BLOCK),
    "one key too many": Setup(replace(ONE_BLOCK, k_lens=(129,), spare=0, causal=False)),
    "falling": Setup(FALLING),
    "peaky": Setup(replace(PEAKY, heads=1)),
    "full table": Setup(FULL_TABLE),
    "pages": Setup(PAGED),
    "32 requests": Setup(replace(V3, heads=1, q_lens=(1,) * 32, k_lens=(3,) * 32)),
    "split": Setup(SPLIT, short_ranges=True),
    "groups": Setup(GROUPS, short_ranges=True, group=2),
    "strided": Setup(replace(V3, q_lens=(70, 5), k_lens=(70, 130)), strided=True),
    "strided, split": Setup(replace(SPLIT, heads=2), short_ranges=True, strided=True),
    "two launches": Setup(V3, launches=2),
    "mask": Setup(MASKED),
    "last word": Setup(replace(MASKED, k_lens=(300, 129), spare=0)),
    "few keys": Setup(replace(MASKED, key_mask="few", causal=False, q_lens=(99,), k_lens=(520,))),
    "mask, split": Setup(replace(SPLIT, key_mask="half"), short_ranges=True),
}


@dataclass(frozen=True)
class DenseDefect(Defect):
    """With a setup that most of them show in."""

    case: str = "work items"


SCHEDULER = [
    DenseDefect(
        "the work counter is not put back", Kind.OUTPUT, "scheduler",
        "gl.store(counter, 0)", NOTHING, "two launches",
    ),
    DenseDefect(
        "the work counter is put back one draw early", Kind.RACE, "scheduler",
        "base + size - 1", "base + size - 2", "two launches",
    ),
    DenseDefect(
        "a work item is overwritten while it is read", Kind.RACE, "scheduler",
        "mbarrier.wait(t_empty.index(slot), ((turn >> 1) & 1) ^ 1)", NOTHING,
    ),
    DenseDefect(
        "a work item is told and then written", Kind.RACE, "scheduler",
        "            put_work_item(", "            mbarrier.arrive(t_ready.index(slot), count=1)\n"
        "            put_work_item(",
    ),
    DenseDefect(
        "the end is not told", Kind.DEADLOCK, "scheduler",
        "mbarrier.arrive(t_ready.index(slot), count=1)", NOTHING, after="static_range(SLOT + 1)",
    ),
    DenseDefect(
        "rows after 32 requests are nobody's", Kind.OUTPUT, "scheduler",
        "first + CHUNK <= batch", "first + CHUNK < batch", "32 requests",
    ),
    DenseDefect(
        "slots of split requests begin at 0 in every request", None, "scheduler",
        "before = slots + sum_before(lane, split, 1)", "before = slots", "split",
    ),
]  # fmt: skip
TILES = [
    DenseDefect(
        "one key into a block is not a block", None, "tiles",
        "(stop + BN - 1) // BN", "(stop + BN - 2) // BN", "edges",
    ),
    DenseDefect(
        "the last row's last key is not visited", None, "tiles",
        "gl.minimum(rows, BM) - 1)", "gl.minimum(rows, BM) - 2)", "edges",
    ),
    DenseDefect(
        "a block but for one key needs no mask", None, "tiles",
        "gl.maximum(gl.minimum(seen, keys), 0) // BN",
        "(gl.maximum(gl.minimum(seen, keys), 0) + 1) // BN", "edges",
    ),
    DenseDefect(
        "one query into a tile is not a tile", Kind.OUTPUT, "tiles",
        "(q_len + BM - 1) // BM, 0)", "(q_len + BM - 2) // BM, 0)", "edges",
    ),
    DenseDefect(
        "likewise, for one consumer", Kind.OUTPUT, "tiles",
        "(q_len + BM - 1) // BM, 0)", "(q_len + BM - 2) // BM, 0)", "edges", 1,
    ),
    DenseDefect(
        "one key into a range is not a range", None, "tiles",
        "gl.maximum((k_len + keys - 1) // keys, 1)", "gl.maximum((k_len + keys - 2) // keys, 1)",
        "split",
    ),
    DenseDefect(
        "rows of a range see keys as if it were the first", None, "tiles",
        "+ row + 1 - skipped", "+ row + 1", "split",
    ),
    DenseDefect(
        "the last range reads on into the next request", None, "tiles",
        "keys = gl.minimum(keys, k_len - skipped)", NOTHING, "split",
    ),
    DenseDefect(
        "causal rows start at the row_max left", None, "tiles", "seen = k_len - q_len", "seen = 0",
    ),
]  # fmt: skip
PRODUCER = [
    DenseDefect(
        "K is overwritten while it is read", Kind.RACE, "producer",
        "mbarrier.wait(k_empty.index(stage), phase)", NOTHING,
    ),
    DenseDefect(
        "V is overwritten while it is read", Kind.RACE, "producer",
        "mbarrier.wait(v_empty.index(stage), phase)", NOTHING,
    ),
    DenseDefect(
        "Q is overwritten while it is read", Kind.RACE, "producer",
        "mbarrier.wait(empty.index(w), phase)", NOTHING,
    ),
    DenseDefect(
        "K's bytes are announced without rope", Kind.BYTES, "producer",
        "BN * (DIMS[0] + DIMS[1] + DIMS[2]) * 2", "BN * (DIMS[0] + DIMS[1]) * 2",
    ),
    DenseDefect(
        "Q's bytes are announced without the tail", Kind.BYTES, "producer",
        "WGMMA_ROWS * (DIMS[0] + DIMS[1] + DIMS[2]) * 2", "WGMMA_ROWS * (DIMS[0] + DIMS[2]) * 2",
        "empty rows",
    ),
    DenseDefect(
        "V's bytes are announced as 4 each", Kind.BYTES, "producer",
        "BN * DIMS[3] * 2", "BN * DIMS[3] * 4",
    ),
    DenseDefect(
        "an empty stage is waited for in the wrong phase", Kind.DEADLOCK, "producer",
        "phase = ((it // ST) & 1) ^ 1", "phase = (it // ST) & 1",
    ),
    DenseDefect(
        "work items of one block do not ask for the next", Kind.DEADLOCK, "producer",
        "gl.maximum(blocks - 2, 0)", "(blocks - 2)",
    ),
    DenseDefect(
        "V of the next request is loaded", None, "producer",
        "load_ragged(v_desc, start, keys,", "load_ragged(v_desc, start, keys + BN,",
    ),
    DenseDefect(
        "the tail of Q is its first columns", None, "producer",
        "load_rows(q_tail, row, head, DIMS[0],", "load_rows(q_tail, row, head, 0,", "empty rows",
    ),
    DenseDefect(
        "the second consumer gets the rows of the first", None, "producer",
        "row = token + w * WGMMA_ROWS", "row = token + 0 * w",
    ),
    DenseDefect(
        "a work item is released before it is read", Kind.RACE, "producer",
        "        head = get(info, slot, HEAD, 1)\n",
        "        mbarrier.arrive(t_empty.index(slot), count=1)\n"
        "        head = get(info, slot, HEAD, 1)\n",
    ),
]  # fmt: skip
CONSUMER = [
    DenseDefect(
        "K is not waited for", Kind.RACE, "dense",
        "mbarrier.wait(k_ready.index(stage), (it // ST) & 1)", NOTHING,
    ),
    DenseDefect(
        "V is not waited for", Kind.RACE, "dense",
        "mbarrier.wait(v_ready.index(before), ((it - 1) // ST) & 1)", NOTHING,
    ),
    DenseDefect(
        "the last V is waited for in the phase of the next", Kind.DEADLOCK, "dense",
        "((it - 1) // ST) & 1", "(it // ST) & 1", after="The last PV",
    ),
    DenseDefect(
        "Q of the next work item is not waited for", Kind.RACE, "dense",
        "mbarrier.wait(q_ready.index(WHO), turn & 1, pred=blocks > 0)", NOTHING,
    ),
    DenseDefect(
        "scores are read while they are made", Kind.ACCUMULATOR, "dense",
        "warpgroup_mma_wait(1, deps=(S_next,))", "warpgroup_mma_wait(2, deps=(S_next,))",
    ),
    DenseDefect(
        "the output is read while it is made", Kind.ACCUMULATOR, "dense",
        "warpgroup_mma_wait(QK_GROUPS,", "warpgroup_mma_wait(QK_GROUPS + 1,",
    ),
    DenseDefect(
        "V is released under its product", Kind.RACE, "dense",
        "        O, P = warpgroup_mma_wait(0, deps=(O_next, P))\n"
        "        mbarrier.arrive(v_empty.index(before), count=1)\n",
        "        mbarrier.arrive(v_empty.index(before), count=1)\n"
        "        O, P = warpgroup_mma_wait(0, deps=(O_next, P))\n",
    ),
    DenseDefect(
        "Q is released a block early", Kind.RACE, "dense",
        "if c == blocks - 1:", "if c == blocks - 2:", "falling", 1,
    ),
    DenseDefect(
        "Q is not released by a work item of one block", Kind.DEADLOCK, "dense",
        "mbarrier.arrive(q_empty.index(WHO), count=1, pred=blocks == 1)", NOTHING,
    ),
    DenseDefect(
        "a stage is free when one consumer has read it", Kind.DEADLOCK, "dense",
        "k_empty = barriers(ST, NC)", "k_empty = barriers(ST, 1)",
    ),
    DenseDefect(
        "a work item is free when one reader is missing", Kind.DEADLOCK, "dense",
        "t_empty = barriers(2, NC + 1)", "t_empty = barriers(2, NC)",
    ),
    DenseDefect(
        "the product after the last work item reads a stage nobody filled", Kind.UNWRITTEN, "dense",
        "gl.where(blocks > 0, it % ST, before)", "it % ST", "one block",
    ),
    DenseDefect(
        "the second consumer is masked as the first", None, "dense", "seen += WHO * 64", NOTHING,
    ),
    DenseDefect(
        "only the first block is masked", None, "dense",
        "S = hide(S, seen - skip, keys - skip, HOW[0])", NOTHING, "edges",
    ),
    DenseDefect(
        "threads of a quad hide the same columns", None, "softmax",
        "2 * gl.arange(0, 4, TL)", "0 * gl.arange(0, 4, TL)",
    ),
    DenseDefect(
        "O is not rescaled inside the walk", None, "dense",
        "        O = rescale_rows(O, rescale)\n", "", "peaky",
    ),
    DenseDefect(
        "O is not rescaled before its last product", None, "dense",
        "        O = rescale_rows(O, rescale)\n", "", "falling", after="The last PV",
    ),
    DenseDefect(
        "the row sum is not rescaled", None, "softmax", "row_sum * old + ", "row_sum + ", "falling",
    ),
    DenseDefect(
        "the reference does not move", None, "softmax",
        "gl.constexpr(RESCALE_THRESHOLD)", "gl.constexpr(1e9)", "falling",
    ),
    DenseDefect(
        "a row that sees nothing is shifted by -inf", None, "softmax",
        "gl.where(new_max == MINUS_INF, 0.0, new_max)", "new_max", "empty rows",
    ),
]  # fmt: skip
RESULTS = [
    DenseDefect(
        "rows past the request are stored", Kind.BOUNDS, "epilogue",
        "mask=((row < rows) & whole)[:, None]", "mask=((row < rows + 1) & whole)[:, None]",
    ),
    DenseDefect(
        "lse of rows past the request is stored", Kind.BOUNDS, "epilogue",
        "mask=(row < rows) & whole", "mask=(row < rows + 1) & whole",
    ),
    DenseDefect(
        "a range is stored as if it were the whole request", Kind.OUTPUT, "epilogue",
        "whole = slot < 0", "whole = slot < 1", "split",
    ),
    DenseDefect(
        "requests that are not split have sums in the workspace", Kind.BOUNDS, "epilogue",
        "(row + WHO * 64 < rows) & (slot >= 0))[:, None]", "row + WHO * 64 < rows)[:, None]",
        "split",
    ),
    DenseDefect(
        "both consumers' sums in one place", None, "epilogue",
        "slot.to(gl.int64) * NC + WHO", "slot.to(gl.int64) * NC", "split",
    ),
    DenseDefect(
        "heads of out lie end to end", Kind.OUTPUT, "epilogue",
        "head * (wide(stride_h) * VECTOR)", "head * O.shape[1]", "strided",
    ),
    DenseDefect(
        "the merge adds what it has as it is", None, "merge",
        "acc * mine[:, None] + ", "acc + ", "split",
    ),
    DenseDefect(
        "the merge weighs ranges by their sums alone", None, "merge",
        "sums * theirs[:, None]", "sums", "split",
    ),
    DenseDefect(
        "the merge takes tiles from the first to the last", None, "merge",
        "(tiles - 1 - number) * HG", "number * HG", "split", 1,
    ),
    DenseDefect(
        "the merge drops the last range", None, "merge",
        "in range(0, parts)", "in range(0, parts - 1)", "split",
    ),
    DenseDefect(
        "the merge takes heads of out to lie end to end", Kind.OUTPUT, "merge",
        "head * (out_stride_h.to(gl.int64) * VECTOR)", "head * D_V", "strided, split",
    ),
]  # fmt: skip
ONE_REQUEST = [
    DenseDefect(
        "rows after the last query see keys", None, "one_block",
        "gl.where((row < q_len)[:, None], sums, 0.0)", "sums", "one request",
    ),
    DenseDefect(
        "the second tile is masked as the first", None, "one_block",
        "keys - q_len + first + 1", "keys - q_len + 1", "one request",
    ),
    DenseDefect(
        "values are not waited for", Kind.RACE, "one_block",
        "mbarrier.wait(ready.index(2), 0)", NOTHING, "one request",
    ),
]  # fmt: skip
HOST = [
    DenseDefect(
        "129 keys are taken for one block", None, "launch",
        "op.cu_seqlens_q.shape[0] - 1, op.k_nope.shape[0])",
        "op.cu_seqlens_q.shape[0] - 1, op.k_nope.shape[0] - 1)", "one key too many",
    ),
    DenseDefect(
        "the host takes heads of out to lie end to end", Kind.OUTPUT, "launch",
        '**strides("lse"', '"out_stride_h": out.shape[2] // VECTOR, **strides("lse"', "strided",
    ),
    DenseDefect(
        "the host takes rows of out to lie end to end", Kind.RACE, "launch",
        '**strides("lse"', '"out_stride_t": out.shape[1] * out.shape[2] // VECTOR, **strides("lse"',
        "strided",
    ),
    DenseDefect(
        "the host takes lse to be [tokens, heads]", Kind.BOUNDS, "launch",
        '**strides("lse", lse)', '**strides("lse", lse), "lse_stride_t": lse.shape[1]', "strided",
    ),
    DenseDefect(
        "V's heads lie end to end", None, "descriptors",
        "strides = [RAGGED_STRIDE - stride_t, stride_t, stride_t, stride_h, 1]",
        "strides = [RAGGED_STRIDE - stride_t, stride_t, stride_t, x.shape[2], 1]", "strided",
    ),
    DenseDefect(
        "V's rows lie end to end", None, "descriptors",
        "    shape = [UNBOUNDED,",
        "    stride_t = x.shape[1] * x.shape[2]\n    shape = [UNBOUNDED,",
        "strided",
    ),
    DenseDefect(
        "every group takes the first lines of the block table", None, "launch",
        "table[first:]", "table", "groups",
    ),
    DenseDefect(
        "every group owns the rows after the last request", Kind.OUTPUT, "launch",
        "op.q.shape[0] if stop == batch else 0", "op.q.shape[0]", "groups",
    ),
    DenseDefect(
        "only the first group is launched", Kind.OUTPUT, "launch",
        "range(0, batch, group)", "range(0, group, group)", "groups",
    ),
    DenseDefect(
        "a group of requests ends one early", Kind.OUTPUT, "launch",
        "first, min(first + group, batch))", "first, min(first + group, batch - 1))", "groups",
    ),
    DenseDefect(
        "table entries after the last one are read", Kind.BOUNDS, "boxes",
        "gl.minimum(here // PAGE, entries - 1)", "gl.minimum(here // PAGE, entries - 1) + 1",
        "full table",
    ),
    DenseDefect(
        "rows after the last request have a line of the table", Kind.BOUNDS, "boxes",
        "mask=keys > 0", "mask=keys >= 0", "pages",
    ),
]  # fmt: skip
MASK = [
    DenseDefect(
        "words of a mask are those of the next 32 keys", None, "producer",
        "key // WORD_BITS]", "key // WORD_BITS + 1]", "mask",
    ),
    DenseDefect(
        "the last word of a mask is dropped", None, "descriptors",
        "return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 4], layout)",
        "return TensorDescriptor(x, [x.shape[0], x.shape[1] - 1], list(x.stride()), [rows, 4], "
        "layout)",
        "last word",
    ),
    DenseDefect(
        "a range's words are those of the first keys", None, "producer",
        "token, skipped + row, NC", "token, row, NC", "mask, split",
    ),
    DenseDefect(
        "both consumers have the same rows of a mask", None, "producer",
        "[token + w * WGMMA_ROWS, key", "[token, key", "mask",
    ),
    DenseDefect(
        "a mask's bytes are not announced", Kind.BYTES, "producer", "* 2 + MORE)", "* 2)", "mask",
    ),
    DenseDefect(
        "words are those of the block before", None, "dense",
        "mask_smem.index(stage * NC", "mask_smem.index(before * NC", "mask",
    ),
    DenseDefect(
        "the first block of a work item has no mask", None, "dense",
        "            S = keep_bits(S, bits)\n        weights, row_max, row_sum = softmax_first",
        "            S = S\n        weights, row_max, row_sum = softmax_first", "mask",
    ),
    DenseDefect(
        "bits are taken one column to the right", None, "softmax",
        "bit = 1 << (eights + ", "bit = 1 << (eights + 1 - ", "mask",
    ),
    DenseDefect(
        "threads of a quad take the same bits", None, "softmax", "(2 * thread)", "(0 * thread)",
        "mask",
    ),
    DenseDefect(
        "a row whose bits are all 0 is shifted by -inf", None, "dense",
        "MASKED or HOW[3], BN", "MASKED, BN", "few keys",
    ),
]  # fmt: skip
DEFECTS = [*ONE_REQUEST, *SCHEDULER, *TILES, *PRODUCER, *CONSUMER, *RESULTS, *HOST, *MASK]
