"""The launch that makes bf16 of e4m3 values, and the bytes of the copy."""

import torch
from torch import Tensor

from openmla.arithmetic import ceildiv
from openmla.kernels.call import COPY, Call, LaunchNumbers, Sources, strides
from openmla.kernels.gluon.upcast.kernel import ROWS, VECTOR, upcast_kernel
from openmla.problem import Problem


def room_for(v: Tensor) -> Tensor:
    """Where the copy of v [tokens, heads, columns] goes: rows without gaps."""
    return torch.empty(v.shape, dtype=torch.bfloat16, device=v.device)


def upcast(v: Tensor, copy: Tensor) -> Call:
    """v to `copy`, which `room_for` made."""
    tokens, heads, d_v = v.shape
    arguments = {
        "v_ptr": v,
        "out_ptr": copy,
        "rows": tokens * heads,
        "heads": heads,
        "D_V": d_v,
        **strides("v", v, VECTOR.value),
        "num_warps": 4,
    }
    sources: Sources = {"v_ptr": "v", "out_ptr": COPY}
    return Call(upcast_kernel, upcast_programs(tokens * heads), arguments, sources)


def upcast_programs(rows: int) -> int:
    """One for each 64 rows of all tokens and heads."""
    return ceildiv(rows, ROWS.value)


def upcast_numbers(problem: Problem) -> LaunchNumbers:
    """What a problem's token counts decide of the launch."""
    rows = problem.total_k * problem.heads
    size = rows * problem.d_v * torch.bfloat16.itemsize
    return LaunchNumbers(upcast_programs(rows), {"rows": rows}, {COPY: size})
