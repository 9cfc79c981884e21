"""The problems that the sparse Blackwell kernel is compiled for without a GPU."""

from dataclasses import replace

from openmla.kernels.blackwell.dense.jobs import predicted_by
from openmla.kernels.blackwell.pair.plan import FIRST_ROWS_PAIR
from openmla.kernels.blackwell.sparse.plan import SparseKernel
from openmla.kernels.call import Call
from openmla.kernels.gluon.upcast.kernel import upcast_kernel
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.kernels.triton_version import TRITON
from openmla.planning import Plan
from openmla.problem import Problem, RowSource

V32 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    topk=2048,
    total_q=4096,
    total_k=65536,
    has_topk_lengths=True,
    wants_lse=True,
)
LATENT = replace(V32, form="latent", topk=0, has_topk_lengths=False, page_size=64, total_k=4096)
V4 = replace(V32, heads=64, d_rope=0, kv_dtype="fp8_584", topk=640, page_size=64, total_k=1 << 20)


def _cache(heads: int, kv_dtype: str) -> Problem:
    return replace(V32, heads=heads, kv_dtype=kv_dtype)


# DeepSeek-V3.2: 64, 16 and 8 of its 128 heads per GPU; GLM-5: 64 heads.
PROBLEMS = {
    "64 heads sink": replace(V32, heads=64, has_sink=True),
    "16 heads no lse": replace(V32, heads=16, wants_lse=False, has_topk_lengths=False),
    "8 heads": replace(V32, heads=8),
    "64 heads fp16": typed(replace(V32, heads=64), "fp16"),
    "64 heads uneven pages": replace(V32, heads=64, page_size=64),
    "64 heads fp8_656": _cache(64, "fp8_656"),
    "64 heads fp8_block32": _cache(64, "fp8_block32"),
    "64 heads fp8_block64": _cache(64, "fp8_block64"),
    "64 heads fp8_block128": _cache(64, "fp8_block128"),
    "16 heads fp8_token": _cache(16, "fp8_token"),
    "64 heads e4m3": _cache(64, "e4m3"),
    "64 heads fp8_656, fp8 queries": replace(
        _cache(64, "fp8_656"), q_dtype="e4m3", has_q_scale=True
    ),
    "16 heads latent": replace(LATENT, heads=16),
    "64 heads latent fp8_block64": replace(LATENT, heads=64, kv_dtype="fp8_block64"),
    "16 heads latent window": replace(LATENT, heads=16, window=128),
    "64 heads latent window fp8_656": replace(
        LATENT, heads=64, kv_dtype="fp8_656", total_k=1 << 20, table_keys=32768, window=128
    ),
    "64 heads 512+0": replace(V32, heads=64, d_rope=0),
    "64 heads 512+0 fp8_block64": replace(V32, heads=64, d_rope=0, kv_dtype="fp8_block64"),
    "64 heads fp8_584": V4,
    "64 heads window and list fp8_584": replace(
        replace(V4, topk=0, has_topk_lengths=False, span=True, table_keys=1 << 16, has_sink=True),
        second=RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=1 << 20),
    ),
    "64 heads window and list fp8_584, turned back": replace(
        replace(V4, topk=0, has_topk_lengths=False, span=True, table_keys=1 << 16, has_sink=True),
        second=RowSource(kv_dtype="fp8_584", page_size=64, topk=512, total_k=1 << 20),
        turned_back=64,
    ),
    "64 heads latent fp8_584": replace(LATENT, heads=64, d_rope=0, kv_dtype="fp8_584"),
    "32 heads 256+64 latent": replace(LATENT, heads=32, d_nope=256, d_v=256),
    "32 heads 256+64 fp8_token": replace(V32, heads=32, d_nope=256, d_v=256, kv_dtype="fp8_token"),
}
if TRITON < FIRST_ROWS_PAIR:  # two CTAs serve 128 heads; later Tritons have pair/jobs.py
    PROBLEMS["128 heads"] = V32
# Bytes that a block of two sources spills once, before its partitions begin: where the second lies;
# with Triton 3.7, which has 48, where angles lie too.
SPILLS = 52


def predicted(plan: Plan, call: Call) -> Predicted:
    """Memory and registers that the plan predicts."""
    if call.kernel is upcast_kernel:
        return Predicted(shared=0, tmem=0)
    return predicted_by(SparseKernel(plan.config, plan.problem), SPILLS * bool(plan.problem.second))


JOBS = Jobs(
    chip="b200", problems=PROBLEMS, predicted=predicted, page_gaps={"64 heads uneven pages": 16}
)
