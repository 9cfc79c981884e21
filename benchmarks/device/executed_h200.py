"""Results of an H200 that executions of compiled code on a CPU are compared with.

    PYTHONPATH=src:gluon-sim/src:tests:gluon-sim/tests python benchmarks/device/executed_h200.py OUT

Runs every probe of gluon-sim/tests/compiled/probes.py, given to the driver as PTX, and every case
of tests/executed/cases.py for the h200 on the kernels that its plan names. Both write one .npz
file: words by the name of the probe; out, lse and max_logits, as they are in memory, by the name of
the case. tests/executed/test_truth.py and gluon-sim/tests/compiled/test_probes.py compare.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

LIMIT = 90  # seconds of one case, which may have to be compiled
WORKERS = 8  # processes that run probes
_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CUDA = ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_CUDA, name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: CUDA error {code}")


def tensor_map(described: Any, base: torch.Tensor) -> Any:
    """cuTensorMapEncodeTiled of a probe's map, at 64 bytes."""
    rank = len(described.box)
    room = ctypes.create_string_buffer(128 + 64)
    at = (ctypes.addressof(room) + 63) // 64 * 64
    dims = (ctypes.c_uint64 * rank)(*reversed(described.shape))
    strides = [s * described.element for s in reversed(described.strides[:-1])]
    steps = (ctypes.c_uint64 * max(1, rank - 1))(*strides)
    box = (ctypes.c_uint32 * rank)(*reversed(described.box))
    ones = (ctypes.c_uint32 * rank)(*[1] * rank)
    kind = {1: 0, 2: 1, 4: 2}[described.element]
    place, start = ctypes.c_void_p(at), ctypes.c_void_p(base.data_ptr())
    shape = (dims, steps, box, ones)
    _call("cuTensorMapEncodeTiled", place, kind, rank, start, *shape, 0, described.swizzle, 0, 0)
    return (ctypes.c_char * 128).from_address(at), room


def run_probe(probe: Any, assembler: str, shared: int) -> np.ndarray:
    """The words that a probe writes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "k.ptx"
        source.write_text(probe.text)
        binary = source.with_suffix(".cubin")
        subprocess.run([assembler, "--gpu-name=sm_90a", source, "-o", binary], check=True)
        image = binary.read_bytes()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), image)
    _call("cuModuleGetFunction", ctypes.byref(function), module, b"k")
    _call("cuFuncSetAttribute", function, _SHARED_ATTRIBUTE, shared)
    given = torch.from_numpy(probe.given.view(np.uint8).reshape(-1).copy()).cuda()
    out = torch.zeros(probe.words, dtype=torch.int32, device="cuda")
    values: list[Any] = []
    kept: list[Any] = [given, out]
    if probe.map is not None:
        base = torch.from_numpy(probe.map.base.view(np.uint8).reshape(-1).copy()).cuda()
        encoded, room = tensor_map(probe.map, base)
        kept += [base, room]
        values = [encoded, *(ctypes.c_uint32(n & 0xFFFFFFFF) for n in probe.map.shape)]
        values += [ctypes.c_uint64(n) for n in probe.map.strides]
    values += [ctypes.c_uint64(given.data_ptr()), ctypes.c_uint64(out.data_ptr())]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    torch.cuda.synchronize()
    _call("cuLaunchKernel", function, 1, 1, 1, probe.threads, 1, 1, shared, None, pointers, None)
    torch.cuda.synchronize()
    _call("cuModuleUnload", module)
    return out.cpu().numpy().view(np.uint32)


def run_some_probes(folder: Path, first: int) -> None:
    """Every WORKERS-th probe from `first` on. One that fails leaves the driver's context broken, so
    that a new process has to go on."""
    from triton.backends.nvidia.compiler import get_ptxas

    from compiled.probes import PROBES, SHARED

    torch.zeros(1, device="cuda")  # makes the driver's context
    names = list(PROBES)
    for number in range(first, len(names), WORKERS):
        try:
            found = run_probe(PROBES[names[number]], get_ptxas(90).path, SHARED)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"probe {names[number]}: {str(error).splitlines()[0]}", flush=True)
            command = [sys.executable, __file__, str(folder), "--probes", str(number + WORKERS)]
            os.execv(sys.executable, command)
        np.save(folder / f"{number}.npy", found)


def run_probes(folder: Path) -> None:
    """All probes into one file; one that fails is named and left out."""
    from compiled.probes import PROBES

    with tempfile.TemporaryDirectory() as parts:
        command = [sys.executable, __file__, parts, "--probes"]
        workers = [subprocess.Popen([*command, str(first)]) for first in range(WORKERS)]
        for worker in workers:
            worker.wait(LIMIT)
        kept = {n: Path(parts) / f"{i}.npy" for i, n in enumerate(PROBES)}
        found = {name: np.load(path) for name, path in kept.items() if path.exists()}
    np.savez_compressed(folder / "probes_h200.npz", **found)
    print(f"{len(found)} of {len(PROBES)} probes")


def run_case(name: str, folder: Path) -> None:
    """One case on the kernels that its plan for a chip of two SMs names."""
    from executed.cases import CASES
    from openmla.kernels.launch import calls
    from openmla.lab.testing.build import build
    from openmla.lab.testing.compare import judge
    from openmla.lab.testing.executed.prepare import SM_COUNT
    from openmla.lab.testing.memory import Memory
    from openmla.lab.testing.simulate import new_results, plan_on
    from openmla.operands import Results

    built = build(CASES["h200"][name], memory=Memory("cuda", "nan"))
    tensors = new_results(built).tensors()
    results = Results(**{key: value.cuda() for key, value in tensors.items()})
    plan = plan_on("h200", built.operands, results, SM_COUNT)
    for call in calls(plan, built.operands, results):
        call.run()
    torch.cuda.synchronize()
    verdict = judge(built, results, fp8_weights=plan.kernel.fp8_weights)
    raw = {
        key: value.contiguous().view(torch.uint8).cpu().numpy()
        for key, value in results.tensors().items()
    }
    np.savez(folder / f"{name}.npz", **raw)
    print(f"{name}: {'accepted' if verdict.ok else 'REJECTED'}, {verdict.bound:.3f} of its bound")


def run_cases(folder: Path) -> None:
    """Every case in a process of its own, side by side: most of the time goes into compiling."""
    from executed.cases import CASES

    with tempfile.TemporaryDirectory() as parts:
        commands = {
            name: subprocess.Popen([sys.executable, __file__, parts, name])
            for name in CASES["h200"]
        }
        found = {}
        for name, process in commands.items():
            try:
                process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
            path = Path(parts) / f"{name}.npz"
            if path.exists():
                found |= {f"{name}/{key}": value for key, value in np.load(path).items()}
    np.savez_compressed(folder / "cases_h200.npz", **found)
    print(f"{len({key.split('/')[0] for key in found})} of {len(commands)} cases")


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if sys.argv[2:3] == ["--probes"]:
        run_some_probes(out, int(sys.argv[3]))
    elif len(sys.argv) > 2:
        run_case(sys.argv[2], out)
    else:
        run_probes(out)
        run_cases(out)
