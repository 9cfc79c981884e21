"""What the CDNA4 kernel over latent rows is compiled for without a GPU."""

from dataclasses import replace
from typing import Any

from openmla.formats import V4, V32
from openmla.kernels.call import Call
from openmla.kernels.cdna4.dense.jobs import predicted
from openmla.kernels.gluon.ranges.launch import MERGED_TOGETHER
from openmla.kernels.jobs import Jobs, Predicted, typed
from openmla.planning import Plan
from openmla.planning.latent_split import SHORT
from openmla.problem import Problem, RowSource

_V32 = Problem(
    form="sparse",
    heads=128,
    d_nope=512,
    d_rope=64,
    d_v=512,
    topk=2048,
    total_q=4096,
    total_k=65536,
    wants_lse=True,
    has_sink=True,
    has_topk_lengths=True,
    page_size=64,
)
_ROWS = replace(_V32, page_size=0)
_SPLIT = replace(
    *(_V32,),
    **{"form": "latent", "topk": 0, "has_sink": False, "has_topk_lengths": False, "causal": True},
    **{"total_q": 32, "batch": 32, "table_keys": 32768},
)
_LATENT = replace(_SPLIT, total_q=4096, batch=1, table_keys=SHORT)
_V4: dict[str, Any] = {"d_rope": 0, "rope": "none", "kv_dtype": V4.name}
_WINDOW = replace(
    *(_ROWS,),
    **{**_V4, "span": True, "topk": 0, "has_topk_lengths": False, "page_size": 64},
    **{"heads": 64, "table_keys": 4096, "total_k": 65536},
)
_CHOSEN = RowSource(kv_dtype=V4.name, page_size=2, topk=512, has_topk_lengths=True, total_k=16384)
FP32 = 4
PROBLEMS = {
    "bf16 pages": _V32,
    "fp16 rows": typed(_ROWS, "fp16"),
    "bf16 without rope, lse, sink": replace(
        _ROWS, d_rope=0, rope="none", wants_lse=False, has_sink=False
    ),
    f"{V32.name} pages": replace(_V32, kv_dtype=V32.name),
    "fp8_block64 pages": replace(_V32, kv_dtype="fp8_block64"),
    "e4m3 rows": typed(_ROWS, "e4m3"),
    "latent bf16": _LATENT,
    "latent bf16 without rope, lse": replace(_LATENT, d_rope=0, rope="none", wants_lse=False),
    f"latent {V32.name}": replace(_LATENT, kv_dtype=V32.name),
    "latent fp8_block64": replace(_LATENT, kv_dtype="fp8_block64", has_sink=True),
    "latent 256+64 bf16": replace(_LATENT, d_nope=256, d_v=256),
    "latent 256+64 fp8_block64": replace(_LATENT, d_nope=256, d_v=256, kv_dtype="fp8_block64"),
    "latent 256+64 bf16, split": replace(_SPLIT, d_nope=256, d_v=256),
    "bf16 256+0, lse": replace(_ROWS, d_nope=256, d_v=256, d_rope=0, rope="none"),
    "256+64 fp8_token pages": replace(_V32, d_nope=256, d_v=256, kv_dtype="fp8_token"),
    f"latent {V32.name}, e4m3 queries": replace(_LATENT, q_dtype="e4m3", kv_dtype=V32.name),
    "latent fp8_token, e4m3 queries, split": replace(_SPLIT, q_dtype="e4m3", kv_dtype="fp8_token"),
    "fp8_token pages, e4m3 queries": replace(_V32, q_dtype="e4m3", kv_dtype="fp8_token"),
    "latent bf16, split": _SPLIT,
    "latent bf16, 16 heads, split": replace(_SPLIT, heads=16, has_sink=True, wants_lse=False),
    "latent bf16 without rope, split": replace(_SPLIT, d_rope=0, rope="none"),
    f"latent {V32.name}, split": replace(_SPLIT, kv_dtype=V32.name),
    "latent fp8_block64, split": replace(_SPLIT, kv_dtype="fp8_block64", has_sink=True),
    "latent bf16 window": replace(_LATENT, window=128),
    "latent bf16 without rope, window": replace(_LATENT, d_rope=0, rope="none", window=128),
    "latent 256+64 bf16 window": replace(_LATENT, d_nope=256, d_v=256, window=128),
    f"latent {V32.name} window": replace(_LATENT, kv_dtype=V32.name, window=128),
    "latent fp8_block64 window": replace(_LATENT, kv_dtype="fp8_block64", window=128),
    "bf16 pages, fp32 out": replace(_V32, fp32_out=True),
    f"{V32.name} pages, fp32 out": replace(_V32, kv_dtype=V32.name, fp32_out=True),
    "latent bf16, fp32 out": replace(_LATENT, fp32_out=True),
    "latent bf16, split, fp32 out": replace(_SPLIT, fp32_out=True),
    "latent fp8_block64, split, fp32 out": replace(_SPLIT, kv_dtype="fp8_block64", fp32_out=True),
    f"{V4.name} pages": replace(_V32, **_V4),
    f"latent {V4.name}": replace(_LATENT, **_V4),
    f"latent {V4.name}, split": replace(_SPLIT, **_V4),
    f"span of {V4.name}": _WINDOW,
    f"span and list of {V4.name}": replace(_WINDOW, second=_CHOSEN),
    f"span and list of {V4.name}, turned back": replace(_WINDOW, second=_CHOSEN, turned_back=64),
    "span and list of bf16": replace(
        _WINDOW, kv_dtype="bf16", second=replace(_CHOSEN, kv_dtype="bf16")
    ),
    f"list of {V4.name}, span of bf16": replace(
        *(_V32,),
        **_V4,
        second=RowSource(kv_dtype="bf16", page_size=64, span=True, table_keys=4096, total_k=65536),
    ),
}


def _predicted(plan: Plan, call: Call) -> Predicted:
    """The prediction of the dense kernel; over FP8 pages, registers that are only needed before and
    after the loop spill."""
    if call.kernel.__name__ == "merge_kernel":
        many, columns = call.arguments["TOGETHER"] == MERGED_TOGETHER, call.arguments["COLUMNS"]
        return Predicted(shared=many * MERGED_TOGETHER * columns * FP32)  # exchanged by warps
    kept = 6 * (plan.problem.form == "latent" and plan.config.dequantized)
    return replace(predicted(plan, call), spills=kept)


JOBS = Jobs(chip="mi355x", problems=PROBLEMS, predicted=_predicted)
