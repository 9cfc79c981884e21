"""What the latent Hopper kernel and the kernels that dequantize are compiled for without a GPU."""

from __future__ import annotations

from dataclasses import replace

from openmla.formats import NVFP4, V4, V32, V41, V41_FP4, V41_FP4_SPLIT, V41_SPLIT
from openmla.kernels.call import Call
from openmla.kernels.gluon.ranges.jobs import merge_memory
from openmla.kernels.jobs import SUMS_OF_WARPS, Jobs, Predicted, block_memory, typed
from openmla.planning import Plan
from openmla.problem import Problem, RowSource

_V32 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    total_q=4096,
    total_k=8192,
    topk=2048,
    wants_lse=True,
)
# With 128 heads, requests of more than 8192 keys may be split.
_PAGES = replace(_V32, form="latent", topk=0, page_size=64, has_sink=True)
_SPLIT = replace(_PAGES, total_k=32768)
# Lists so short that rows are dequantized where they are read.
_FP8 = replace(_V32, kv_dtype=V32.name, page_size=64, total_q=64, total_k=1_000_000, topk=128)
_LONG = replace(_FP8, topk=2048)
_MORE_THAN_FIT = 4_000_000  # rows: a workspace may be too small
PROBLEMS = {
    "512+64": _V32,
    "512+64 fp16 sink lengths": replace(typed(_V32, "fp16"), has_sink=True, has_topk_lengths=True),
    "512+64 pages with gaps, max logits": replace(_V32, page_size=64, wants_max_logits=True),
    "512+0": replace(_V32, d_rope=0, rope="none"),
    "256+64": replace(_V32, d_nope=256, d_v=256),
    "256+32": replace(_V32, d_nope=256, d_v=256, d_rope=32),
    "128+32": replace(_V32, d_nope=128, d_v=128, d_rope=32),
    "512+64 few, lengths": replace(_V32, total_q=1, has_topk_lengths=True, wants_max_logits=True),
    "256+32 few, 20 heads": replace(_V32, total_q=1, heads=20, d_nope=256, d_v=256, d_rope=32),
    "512+64 sequences": _PAGES,
    "512+64 sequences, split": _SPLIT,
    "512+64 sequences, split, not causal, no sink": replace(_SPLIT, causal=False, has_sink=False),
    "512+64 many sequences, split": replace(_SPLIT, batch=128, total_q=128),
    "512+64 sequences, invariant": replace(_SPLIT, total_q=64, invariant=True),
    "512+64 windows": replace(_SPLIT, window=128),
    "512+0 windows, 16 heads": replace(
        _SPLIT, heads=16, batch=128, total_q=128, d_rope=0, rope="none", window=128
    ),
    # Pages whose blocks are not boxes, and more ranges than the merge has slots.
    "128+32 sequences, split": replace(
        _SPLIT, heads=16, d_nope=128, d_v=128, d_rope=32, page_size=48
    ),
    V32.name: _FP8,
    f"{V32.name} few": replace(_LONG, total_q=1),
    f"{V32.name} few, 64 columns": replace(_LONG, total_q=8),
    f"{V32.name} few, 128 columns": replace(_LONG, total_q=12),
    "fp8_block64 128+32 few": replace(
        _LONG, kv_dtype="fp8_block64", d_nope=128, d_v=128, d_rope=32, total_q=20, heads=64
    ),
    f"{V32.name} workspace": replace(_LONG, total_q=4096, total_k=_MORE_THAN_FIT),
    f"{V32.name} whole pool": replace(_LONG, total_q=4096, total_k=8192),
    NVFP4.name: replace(_LONG, kv_dtype=NVFP4.name, total_q=4096, total_k=8192),
    "fp8_block32": replace(_FP8, kv_dtype="fp8_block32"),
    "fp8_token 512+0": replace(_FP8, kv_dtype="fp8_token", d_rope=0, rope="none"),
    "fp8_block64 256+32 workspace": replace(
        _LONG,
        kv_dtype="fp8_block64",
        d_nope=256,
        d_v=256,
        d_rope=32,
        total_q=4096,
        total_k=_MORE_THAN_FIT,
    ),
    f"{V32.name} sequences": replace(_FP8, form="latent", topk=0, total_q=1),
    f"{V32.name} windows": replace(_FP8, form="latent", topk=0, window=128),
    "fp8_block128 128+32": replace(_FP8, kv_dtype="fp8_block128", d_nope=128, d_v=128, d_rope=32),
}
_V4 = replace(_FP8, kv_dtype=V4.name, d_rope=0, rope="none")
PROBLEMS |= {
    V4.name: _V4,
    f"{V4.name} windows": replace(_V4, form="latent", topk=0, window=128),
    f"{V4.name} few": replace(_V4, total_q=1, topk=640),
    f"{V4.name} whole pool": replace(_V4, topk=2048, total_q=4096, total_k=8192),
    V41.name: replace(_V4, kv_dtype=V41.name),
    V41_FP4.name: replace(_V4, kv_dtype=V41_FP4.name),
    f"{V41.name} sequences": replace(_V4, kv_dtype=V41.name, form="latent", topk=0, total_q=1),
    f"{V41_FP4_SPLIT.name} windows": replace(
        _V4, kv_dtype=V41_FP4_SPLIT.name, form="latent", topk=0, window=128
    ),
}
# DeepSeek-V4's layers: a window, by a list as engines have it or as a span, and rows that stand for
# several tokens, a list of them or all.
_WINDOW = replace(_V4, total_q=2048, topk=128, has_sink=True)
_ENTRIES = RowSource(kv_dtype=V4.name, page_size=64, topk=512, total_k=1_000_000)
_LENGTHS = replace(_ENTRIES, has_topk_lengths=True)
_ALL = RowSource(kv_dtype=V4.name, page_size=2, span=True, table_keys=8192, total_k=1_000_000)
_SPAN = replace(_WINDOW, topk=0, span=True, table_keys=16384)
_BF16_SPAN = typed(_SPAN, "bf16")
_V41_SPAN = replace(_SPAN, kv_dtype=V41_SPLIT.name)
_V41_ENTRIES = replace(_LENGTHS, kv_dtype=V41_FP4.name)
_V41_SMALL = replace(_V41_SPAN, total_k=4096), replace(_V41_ENTRIES, total_k=8192)
_BF16_ENTRIES = replace(_LENGTHS, kv_dtype="bf16")
PROBLEMS |= {
    f"{V4.name} two lists": replace(_WINDOW, second=_ENTRIES),
    f"{V4.name} two lists, lengths": replace(_WINDOW, has_topk_lengths=True, second=_LENGTHS),
    f"{V4.name} span": _SPAN,
    f"{V4.name} span and list": replace(_SPAN, second=_ENTRIES),
    f"{V4.name} two spans": replace(_SPAN, second=_ALL),
    f"bf16 span and {V4.name} list": replace(_BF16_SPAN, second=_ENTRIES),
    f"{V4.name} span and bf16 list": replace(_SPAN, second=_BF16_ENTRIES),
    "bf16 two lists": replace(typed(_WINDOW, "bf16"), has_topk_lengths=True, second=_BF16_ENTRIES),
    "bf16 span": _BF16_SPAN,
    f"{V41_SPLIT.name} span and {V41_FP4.name} list": replace(_V41_SPAN, second=_V41_ENTRIES),
    f"{V41_SPLIT.name} span and {V41_FP4.name} list, whole pools": replace(
        _V41_SMALL[0], second=_V41_SMALL[1]
    ),
    f"{V4.name} span and {V41_FP4.name} list": replace(_SPAN, second=_V41_ENTRIES),
    f"bf16 span and {V41_FP4.name} list": replace(_BF16_SPAN, second=_V41_ENTRIES),
    f"{V41_SPLIT.name} span": _V41_SPAN,
    f"{V41_SPLIT.name} span and {V41_FP4.name} list, few": replace(
        _V41_SPAN, total_q=2, table_keys=1024, second=_V41_ENTRIES
    ),
    f"{V4.name} two lists, few": replace(_WINDOW, total_q=4, second=_ENTRIES),
    f"{V4.name} two spans, few": replace(_SPAN, total_q=2, table_keys=1024, second=_ALL),
    f"{V4.name} span and list, turned back": replace(_SPAN, second=_ENTRIES, turned_back=64),
    f"{V4.name} two lists, few, turned back": replace(
        _WINDOW, total_q=4, second=_ENTRIES, turned_back=64
    ),
    f"{V4.name} two lists, few, 128 columns, turned back": replace(
        _WINDOW, total_q=16, heads=128, second=_ENTRIES, turned_back=64
    ),
    f"{V4.name} one list, turned back": replace(_WINDOW, turned_back=64),
    "bf16 two lists, turned back": replace(
        typed(_WINDOW, "bf16"), second=_BF16_ENTRIES, turned_back=64
    ),
}
SINK_ARGUMENT = 16  # bytes: a pointer, rounded up
REGISTER = 4  # bytes


def predicted(plan: Plan, call: Call) -> Predicted:
    """What the plan says of a kernel's memory, and the most that its producer spills."""
    if plan.config.few:
        # The partitions of values_kernel are handed the pointer to the sinks in shared memory.
        sinks = SINK_ARGUMENT * (plan.problem.has_sink and call.kernel.__name__ == "values_kernel")
        return Predicted(shared=plan.config.few.shared[call.kernel.__name__] + sinks)
    merge = merge_memory(call)
    if merge is not None:
        return merge
    if call.kernel.__name__ == "place_kernel":
        return Predicted(shared=SUMS_OF_WARPS)
    return replace(block_memory(plan, call), spills=REGISTER * spilled_registers(plan, call))


def spilled_registers(plan: Plan, call: Call) -> int:
    """Registers of a thread that the producer spills at most, with any Triton:

    | rows | 3.6 | 3.7 | 3.8 | 3.9 |
    |---|---|---|---|---|
    | FP8, dequantized from pages | 0 | | | 9 |
    | V4's, of lists; of a span | 0 | 9 | 0 | 28; 42 |
    | V4.1's, of lists; of pages | 3 | 3 | ; 22 | ; 25 |
    | V4's, of two sources | | 3 | | |
    | of one list, turned back | | 5 | | 14 |
    | of an invariant call | | | 1 | |
    | windows: 16 bits; FP8; V4's | | | | 6; 12; 85 |
    """
    chunked = call.arguments.get("page_rows") is not None  # V4's or V4.1's rows, or several sources
    fp8_pages = bool(call.arguments.get("SCALED")) and plan.problem.form == "latent"
    if plan.problem.window:
        return 85 if chunked else 12 if fp8_pages else 6
    if chunked:
        return 42
    if plan.problem.invariant:
        return 1
    return 9 if fp8_pages else 0


JOBS = Jobs(
    chip="h200",
    problems=PROBLEMS,
    predicted=predicted,
    page_gaps={"512+64 pages with gaps, max logits": 16, "512+64 sequences": 16},
)
