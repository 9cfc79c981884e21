"""Host side of lists of rows for few queries: two launches, from the arguments of the one kernel
that does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from openmla.kernels.call import WORKSPACE, Call, Sources
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.few.scores import scores_kernel
from openmla.kernels.hopper.few.values import values_kernel
from openmla.planning.hopper.few import FewQueries

SOURCES: Sources = {"scores_ptr": WORKSPACE, "maxima_ptr": WORKSPACE}
WARPS = 8
VALUES_REGISTERS = (144, 120)  # of a thread that makes weights, that loads rows


def few_calls(
    few: FewQueries, arguments: Mapping[str, Any], queries: Mapping[str, Any], sources: Sources
) -> Iterator[Call]:
    """`arguments` and `sources` of the latent kernel; `queries`: descriptors whose boxes hold all
    heads of a query."""
    half, rope = arguments["DIMS"]
    scores = torch.empty(few.space, dtype=torch.float32, device=arguments["out_ptr"].device)
    shared = {
        **arguments, **queries, "scores_ptr": scores, "maxima_ptr": scores[few.scores :],
        "steps": few.steps, "HEADS": few.padded_heads, "num_warps": WARPS,
        "OVERLAP": few.overlap,
    }  # fmt: skip
    layouts = tuple(tile_layout(width) for width in (half, rope or 16))
    yield _call(scores_kernel, few.score_programs, shared | {"LAYOUTS": layouts}, sources)
    layouts = tuple(tile_layout(width) for width in (few.width, 128))
    values = {
        "D_V": 2 * half, "WIDTH": few.width, "LAYOUTS": layouts, "num_warps": 4,
        "REGISTERS": VALUES_REGISTERS,
    }  # fmt: skip
    call = _call(values_kernel, few.value_programs, shared | values, sources)
    if few.overlap:
        call.arguments["launch_pdl"] = True
    yield call


def _call(kernel: Any, programs: int, arguments: Mapping[str, Any], sources: Sources) -> Call:
    names = [*kernel.arg_names, "num_warps"]
    return Call(kernel, programs, {n: arguments[n] for n in names}, {**sources, **SOURCES})
