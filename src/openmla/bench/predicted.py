"""What a chip does beside what was predicted for it: the speed part of `openmla validate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from openmla.bench import dense, sparse
from openmla.bench.gpu_timing import MATMUL_FLOPS, matmul, race
from openmla.dispatch import device_target, plan_for
from openmla.explain.prediction import predict
from openmla.problem import Problem

DENSE = (dense.Shape(128, 8192, 8192), dense.Shape(16, 2048, 2048))
SPARSE = (sparse.Shape(128, 4096, 65536, 2048), sparse.Shape(64, 4096, 32768, 2048))
ROUNDS = 8


def measured_and_predicted() -> Iterator[dict[str, Any]]:
    """Shares of the bf16 matmul of the same run, and the predicted share of the chip's peak."""
    product = matmul()
    for shape, problem, inputs in _calls():
        timings = race({"matmul": product, "openmla": inputs}, ROUNDS)
        ceiling = MATMUL_FLOPS / timings["matmul"].median
        chosen = plan_for(problem, device_target(torch.device("cuda")))
        predicted = predict(chosen)
        yield {
            "shape": str(shape),
            "backend": chosen.backend,
            "milliseconds": timings["openmla"].median,
            "matmul_tflops": ceiling * 1e-9,
            "share_of_matmul": shape.flops / timings["openmla"].median / ceiling,
            "predicted_share_of_peak": predicted.share_of_peak if predicted else None,
        }


def _calls() -> Iterator[tuple[Any, Problem, Callable[[], object]]]:
    for shape in DENSE:
        problem = Problem(
            form="dense", heads=shape.heads, d_nope=shape.d_nope, d_rope=shape.d_rope,
            d_v=shape.d_v, total_q=shape.q_len, total_k=shape.k_len,
        )  # fmt: skip
        yield shape, problem, dense.Inputs(shape).openmla
    for lists in SPARSE:
        problem = Problem(
            form="sparse", heads=lists.heads, d_nope=512, d_rope=64, d_v=512,
            total_q=lists.q_len, total_k=lists.rows, topk=lists.topk,
        )  # fmt: skip
        yield lists, problem, sparse.Inputs(lists).openmla
