"""Small kernels written as PTX and as gfx950 assembly, and how to run them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gluon_sim.compiled import Report, Schedule, execute


def ptx(body: str, sm: int = 90, threads: int = 32, parameters: int = 1) -> str:
    """A kernel with so many pointer parameters around a body."""
    names = ",\n".join(f".param .u64 .ptr .global .align 1 k_param_{i}" for i in range(parameters))
    return f""".version 8.7
.target sm_{sm}a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{names}
)
.reqntid {threads}
{{
.reg .pred %p<8>;
.reg .b16 %rs<8>;
.reg .b32 %r<64>;
.reg .b64 %rd<16>;
{body}
ret;
}}
.file 1 "/kernels/toy.py"
"""


def run_ptx(
    text: str,
    *tensors: torch.Tensor,
    shared: int = 1024,
    schedule: Schedule | None = None,
    **more: Any,
) -> Report:
    """Run one block of a PTX kernel with 1 KiB of shared memory; the last tensor may be written."""
    metadata = SimpleNamespace(shared=1024, num_ctas=1, tensordesc_meta=[])
    return _run({"ptx": text}, metadata, tensors, schedule, **more)


def gfx950(body: str) -> str:
    """A kernel with one pointer, in s[2:3] after its first wait, around a body."""
    return f"""k:
.loc 1 7 0
s_load_dwordx2 s[2:3], s[0:1], 0x0
s_waitcnt lgkmcnt(0)
{body}
s_endpgm
.section .rodata
.amdhsa_user_sgpr_count 2
.amdhsa_kernarg_size 8
.amdhsa_user_sgpr_dispatch_ptr 0
.amdhsa_user_sgpr_queue_ptr 0
.amdhsa_user_sgpr_kernarg_segment_ptr 1
.amdhsa_user_sgpr_dispatch_id 0
.file 1 "/kernels" "toy.py"
  - .offset: 0
    .size: 8
    .value_kind: global_buffer
"""


def run_gfx950(
    text: str, *tensors: torch.Tensor, waves: int = 1, schedule: Schedule | None = None, **more: Any
) -> Report:
    """Run one workgroup of a gfx950 kernel with 1 KiB of LDS; the last tensor may be written."""
    metadata = SimpleNamespace(shared=1024, num_warps=waves)
    return _run({"amdgcn": text}, metadata, tensors, schedule, **more)


def _run(
    asm: dict[str, str],
    metadata: SimpleNamespace,
    tensors: tuple[torch.Tensor, ...],
    schedule: Schedule | None,
    **more: Any,
) -> Report:
    arguments = {f"argument_{i}": tensor for i, tensor in enumerate(tensors)}
    compiled = SimpleNamespace(asm=asm, metadata=metadata)
    last = [f"argument_{len(tensors) - 1}"]
    return execute(compiled, 1, arguments, outputs=last, schedule=schedule or Schedule(), **more)
