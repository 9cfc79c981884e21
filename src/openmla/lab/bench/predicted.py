"""What a chip does beside what was predicted for it: the speed part of `openmla validate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from openmla.dispatch import device_target, plan_for
from openmla.lab.bench import dense, sparse
from openmla.lab.bench.gpu_timing import MATMUL_FLOPS, matmul, race
from openmla.lab.prediction import predict
from openmla.problem import Problem

Shape = dense.Shape | sparse.Shape
DENSE = (
    dense.Shape(128, 1024, 1024),
    dense.Shape(128, 2048, 2048),
    dense.Shape(128, 4096, 4096),
    dense.Shape(128, 8192, 8192),
    dense.Shape(16, 4096, 4096),
    dense.Shape(16, 8192, 8192),
    dense.Shape(16, 16384, 16384),
    dense.Shape(128, 4096, 4096, causal=False),
    dense.Shape(64, 4096, 4096, d_nope=192, d_v=256),
)
SPARSE = (
    sparse.Shape(128, 4096, 8192, 2048),
    sparse.Shape(128, 4096, 65536, 2048),
    sparse.Shape(64, 4096, 8192, 2048),
    sparse.Shape(128, 4096, 8192, 512),
    sparse.Shape(16, 4096, 8192, 2048),
    sparse.Shape(128, 4096, 8192, 2048, rope=0),
    sparse.Shape(128, 4096, 8192, 2048, kv="fp8_656"),
    sparse.Shape(64, 4096, 65536, 2048, kv="fp8_656"),
)
SHAPES: tuple[Shape, ...] = (*DENSE, *SPARSE)
"""The record of the predictions: those measured in benchmarks/results/predicted-h200-*.json."""
ROUNDS = 8


def problem_of(shape: Shape) -> Problem:
    """The call that a shape stands for."""
    if isinstance(shape, sparse.Shape):
        return Problem(
            form="sparse",
            heads=shape.heads,
            d_nope=shape.latent,
            d_rope=shape.rope,
            d_v=shape.latent,
            rope="shared" if shape.rope else "none",
            total_q=shape.q_len,
            total_k=shape.rows,
            topk=shape.topk,
            kv_dtype=shape.kv,
            v_dtype=shape.kv,
            rope_dtype=shape.kv,
            page_size=0 if shape.kv == "bf16" else sparse.PAGE,
        )
    return Problem(
        form="dense",
        heads=shape.heads,
        d_nope=shape.d_nope,
        d_rope=shape.d_rope,
        d_v=shape.d_v,
        total_q=shape.q_len,
        total_k=shape.k_len,
        causal=shape.causal,
    )


def measured_and_predicted() -> Iterator[dict[str, Any]]:
    """Shares of the bf16 matmul of the same run, and the predicted share of the chip's peak."""
    product = matmul()
    for shape in SHAPES:
        inputs = (sparse if isinstance(shape, sparse.Shape) else dense).Inputs(shape)
        timings = race({"matmul": product, "openmla": inputs.openmla}, ROUNDS)
        ceiling = MATMUL_FLOPS / timings["matmul"].median
        chosen = plan_for(problem_of(shape), device_target(torch.device("cuda")))
        predicted = predict(chosen)
        yield {
            "shape": str(shape),
            "backend": chosen.backend,
            "milliseconds": timings["openmla"].median,
            "matmul_tflops": ceiling * 1e-9,
            "share_of_matmul": shape.flops / timings["openmla"].median / ceiling,
            "predicted_share_of_peak": predicted.share_of_peak if predicted else None,
        }
