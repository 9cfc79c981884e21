"""Host side of lists of rows for few queries: three launches, which compute what the latent kernel
computes in one and take their arguments from its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from openmla.kernels.call import WORKSPACE, Call, Sources
from openmla.kernels.gluon.dequantize.records import RowColumns
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.hopper.few.plan import KEYS, RINGS, TILE, FewQueries
from openmla.kernels.hopper.few.records import Registers
from openmla.kernels.hopper.few.scores import scores_kernel
from openmla.kernels.hopper.few.values import values_kernel
from openmla.kernels.hopper.few.weights import weights_kernel
from openmla.kernels.hopper.latent.records import TileLayouts

SCORE_WARPS = 8
REGISTERS = Registers(copy=40, add_up=200)
NAMES = (
    "scores_ptr",
    "weights_ptr",
    "quads_ptr",
    "maxima_ptr",
    "references_ptr",
    "factors_ptr",
    "v",
)
DESCRIPTORS = ("weights_desc", "v_desc", "v_half_desc")
SOURCES: Sources = dict.fromkeys((*NAMES, *DESCRIPTORS), WORKSPACE)


def few_calls(
    few: FewQueries, arguments: Mapping[str, Any], queries: Mapping[str, Any], sources: Sources
) -> Iterator[Call]:
    """The launches, from `arguments` and `sources` of the latent kernel; `queries`: descriptors
    whose boxes hold all heads of a query."""
    columns: RowColumns = arguments["DIMS"]
    shared = {
        **arguments,
        **queries,
        **_workspace(few, arguments["out_ptr"]),
        "steps": few.steps,
        "HEADS": few.padded_heads,
        "SPAN": few.span,
        "D_V": columns.latent,
        "RING": RINGS[few.width],
        "LAYOUTS": TileLayouts(
            latent=tile_layout(columns.latent // 2), rope=tile_layout(columns.rope or 16), p=None
        ),
        "OVERLAP": few.overlap,
        "REGISTERS": REGISTERS,
    }
    launches = (
        (scores_kernel, few.score_programs, {"num_warps": SCORE_WARPS}),
        (weights_kernel, few.weight_programs, {"num_warps": 4, "launch_pdl": few.overlap}),
        (values_kernel, few.value_programs, {"num_warps": 4, "launch_pdl": few.overlap}),
    )
    for kernel, programs, options in launches:
        named = {name: shared[name] for name in kernel.arg_names}
        yield Call(kernel, programs, {**named, **options}, {**sources, **SOURCES})


def _workspace(few: FewQueries, out: torch.Tensor) -> dict[str, Any]:
    """What the launches hand on, in one piece of memory."""
    space = torch.empty(sum(few.words), dtype=torch.float32, device=out.device)
    parts = dict(zip(NAMES, space.split(few.words), strict=True))
    weights = parts["weights_ptr"].view(out.dtype).view(-1, KEYS)
    v = parts.pop("v").view(out.dtype).view(-1, few.latent)
    return {
        **parts,
        "weights_ptr": weights,
        "weights_desc": _tiles(weights, KEYS),
        "v_desc": _tiles(v, few.width),
        "v_half_desc": _tiles(v, few.latent // 2, few.span),
    }


def _tiles(x: torch.Tensor, columns: int, rows: int = TILE) -> TensorDescriptor:
    """Boxes of some rows of x [rows, columns]."""
    strides, box = [x.shape[1], 1], [rows, columns]
    return TensorDescriptor(x, list(x.shape), strides, box, tile_layout(columns))
