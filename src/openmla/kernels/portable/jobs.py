"""What the portable kernels are compiled for without a GPU: one chip of every kind they run on."""

from dataclasses import replace

from openmla.kernels.call import Call
from openmla.kernels.jobs import Jobs, Predicted
from openmla.kernels.triton_version import TRITON
from openmla.planning import Plan
from openmla.problem import Problem, RowSource

CHIPS = ("a100", "l40s", "h200", "rtx5090", "mi300x", "mi355x")
DENSE = Problem(
    form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, total_q=64, total_k=64, wants_lse=True
)
LATENT = replace(DENSE, form="latent", d_nope=512, d_v=512, page_size=64, total_k=128)
ROWS_WITHOUT_ROPE = replace(LATENT, form="sparse", d_rope=0, rope="none", topk=64, total_k=1 << 20)
PROBLEMS = {
    "": DENSE,
    "shared keys": replace(DENSE, has_k_start=True),
    "key mask": replace(DENSE, has_key_mask=True),
    "grouped heads": replace(DENSE, group=4),
    "fp32 out": replace(DENSE, fp32_out=True),
    "window": replace(DENSE, window=128, total_q=512, total_k=512),
    "pages": LATENT,
    "window of pages": replace(LATENT, window=128),
    "window and split keys": replace(LATENT, total_q=1, total_k=32768, window=8192),
    "split keys": replace(LATENT, total_q=1, total_k=32768),
    "128 heads": replace(LATENT, form="sparse", heads=128, topk=64),
    # With so many rows, rows are dequantized where they are read, not ahead.
    "fp8_656": replace(LATENT, form="sparse", topk=64, kv_dtype="fp8_656", total_k=1 << 20),
    "fp8_584": replace(
        LATENT,
        form="sparse",
        d_rope=0,
        rope="none",
        topk=64,
        kv_dtype="fp8_584",
        v_dtype="fp8_584",
        rope_dtype="fp8_584",
        total_k=1 << 20,
    ),
    "span and list": replace(
        LATENT,
        form="sparse",
        d_rope=0,
        rope="none",
        kv_dtype="fp8_584",
        span=True,
        table_keys=1 << 20,
        second=RowSource(kv_dtype="fp8_584", page_size=2, topk=512, total_k=1 << 20),
        total_k=1 << 20,
    ),
    "turned back": replace(
        ROWS_WITHOUT_ROPE,
        kv_dtype="fp8_584",
        topk=0,
        span=True,
        table_keys=1 << 20,
        second=RowSource(kv_dtype="fp8_584", page_size=2, topk=512, total_k=1 << 20),
        turned_back=64,
    ),
    "fp8_528_v32": replace(ROWS_WITHOUT_ROPE, kv_dtype="fp8_528_v32"),
    "fp4_288": replace(ROWS_WITHOUT_ROPE, kv_dtype="fp4_288"),
    "nvfp4_352": replace(LATENT, form="sparse", topk=64, kv_dtype="nvfp4_352", total_k=1 << 20),
    "V4.1's span and list": replace(
        ROWS_WITHOUT_ROPE,
        kv_dtype="fp8_528_v41_split",
        topk=0,
        span=True,
        table_keys=1 << 20,
        second=RowSource(kv_dtype="fp4_288_split", page_size=128, topk=512, total_k=1 << 20),
    ),
}


def predicted(plan: Plan, call: Call) -> Predicted:
    """Plans of plain Triton estimate memory; its compiler decides what it takes and spills.

    Where a dense call has a window, ptxas puts waits between the products that Triton 3.6 makes for
    sm_90; later versions of Triton compile without.
    """
    windowed = isinstance(plan.problem, Problem) and plan.problem.window > 0
    return Predicted(spills=None, serialized=windowed and TRITON < (3, 7))


JOBS = tuple(
    Jobs(
        chip=chip,
        backend="portable",
        problems={f"{name} on {chip}".strip(): problem for name, problem in PROBLEMS.items()},
        predicted=predicted,
    )
    for chip in CHIPS
)
