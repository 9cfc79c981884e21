"""A dense call where Triton's barrier has no name that openmla knows; prints what happened as JSON.

A process of its own, with TRITON_INTERPRET=1: the names go before openmla is imported.
"""

from __future__ import annotations

import json
import warnings

import torch
from triton.experimental.gluon import language as gl

NAMES = ["barrier", "thread_barrier"]
for name in NAMES:
    if hasattr(gl, name):
        delattr(gl, name)

import openmla  # noqa: E402
from kernels.portable import interpreter  # noqa: E402
from openmla import dispatch  # noqa: E402
from openmla.cli import doctor  # noqa: E402
from openmla.errors import Unsupported  # noqa: E402
from openmla.kernels import fallback  # noqa: E402
from openmla.planning import TARGETS  # noqa: E402


def main() -> None:
    interpreter.repair()
    torch.manual_seed(0)
    dispatch.device_target = lambda device: TARGETS["h200"]
    doctor.device_target = dispatch.device_target
    q, k = torch.randn(9, 2, 192), torch.randn(9, 2, 128)
    q, k, v, rope = (x.to(torch.bfloat16) for x in (q, k, torch.randn(9, 2, 128), q[:, 0, 128:]))
    cu = torch.tensor([0, 9], dtype=torch.int32)
    told = doctor._what_runs(doctor.EXAMPLES["mla_prefill"], torch.device("cuda", 0))
    fallback.forget()  # doctor has tried it without a warning
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outs = [openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu) for _ in range(2)]
    try:
        openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, backend="hopper")
        refused = ""
    except Unsupported as error:
        refused = str(error)
    truth = openmla.mla_prefill(q, k, rope, v, cu_seqlens_q=cu, backend="reference")
    scale = 1 + truth.double().abs()  # bf16 rounds to 8 bits
    errors = [float(((out.double() - truth.double()).abs() / scale).max()) for out in outs]
    print(
        json.dumps(
            {
                "names": NAMES,
                "warnings": sum(one.category is fallback.PortableFallback for one in seen),
                "refused": refused,
                "error": max(errors),
                "doctor": told,
            }
        )
    )


main()
