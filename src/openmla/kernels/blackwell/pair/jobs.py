"""The problems that the kernel of a CTA pair is compiled for without a GPU."""

from dataclasses import replace

from openmla.kernels.blackwell.dense.jobs import predicted_by
from openmla.kernels.blackwell.pair.kernel import pair_kernel
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR, PairKernel
from openmla.kernels.blackwell.sparse.jobs import LATENT, V32
from openmla.kernels.call import Call
from openmla.kernels.gluon.dequantize.kernels import place_kernel
from openmla.kernels.gluon.ranges.jobs import merge_memory
from openmla.kernels.jobs import SUMS_OF_WARPS, Jobs, Predicted, typed
from openmla.kernels.triton_version import TRITON
from openmla.planning import Plan
from openmla.problem import RowSource

_WINDOW = replace(
    *(V32,),
    **{"heads": 64, "d_rope": 0, "kv_dtype": "fp8_584", "topk": 0, "has_topk_lengths": False},
    span=True,
    table_keys=4096,
    page_size=64,
    total_k=4096,
)
# A kernel before this one has dequantized FP8 rows to bf16.
PROBLEMS = {
    "128 heads": V32,
    "128 heads sink, no lse": replace(V32, has_sink=True, wants_lse=False, has_topk_lengths=False),
    "128 heads fp16": typed(V32, "fp16"),
    "128 heads latent": LATENT,
    "128 heads 512+0": replace(V32, d_rope=0),
    "128 heads latent split": replace(LATENT, total_k=1 << 20, table_keys=32768, has_sink=True),
    "128 heads latent window": replace(LATENT, total_k=1 << 20, table_keys=32768, window=128),
    "16 heads latent split": replace(LATENT, heads=16, total_k=1 << 20, table_keys=32768),
    "64 heads window and list fp8_584": replace(
        _WINDOW,
        second=RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=1024),
        has_sink=True,
    ),
    "128 heads latent fp8_584": replace(LATENT, d_rope=0, kv_dtype="fp8_584"),
    "64 heads window bf16": replace(_WINDOW, kv_dtype="bf16"),
    "64 heads window bf16, turned back": replace(_WINDOW, kv_dtype="bf16", turned_back=64),
    "128 heads e4m3": typed(V32, "e4m3"),
    "16 heads e4m3": typed(replace(V32, heads=16), "e4m3"),
}
# Bytes of addresses that every partition needs: they are spilled once, before warp specialization.
# With two sources the loader stores four or five registers more, once a token.
SPILLS = 36


def predicted(plan: Plan, call: Call) -> Predicted:
    """Memory and registers that the plan predicts."""
    merge = merge_memory(call)
    if merge is not None:
        return merge
    if call.kernel is place_kernel:
        return Predicted(shared=SUMS_OF_WARPS, tmem=0)
    if call.kernel is not pair_kernel:
        return Predicted(shared=0, tmem=0)  # another pass that dequantizes
    return predicted_by(PairKernel(plan.config, plan.problem), SPILLS)


# Where Triton has no pairs, these problems run as the kernel of one CTA, which has its own jobs.
JOBS = Jobs(
    chip="b200", problems=PROBLEMS if TRITON >= FIRST_ROWS_PAIR else {}, predicted=predicted
)
