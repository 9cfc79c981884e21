"""Compile kernels for their targets on a machine without a GPU, and report what the compiler made.

>>> job = CompileJob("hopper dense", call, "sm90")  # doctest: +SKIP
>>> compile_job(job).shared  # doctest: +SKIP
131168

A job is a kernel call and a target: what is compiled is what a launch with these arguments would
compile there. Registers, spills, shared memory, tensor memory, VGPRs and the compiler's warnings
end up in a frozen `CompileReport`; a job may carry a plan's prediction, which
`CompileReport.differences` compares. Reports are kept under a hash of the kernel's source, of every
device function it calls, of its constexprs and signature, the target, the options and Triton's
version: an unchanged kernel costs nothing. Where they are kept: openmla.lab.compiling.store.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton

from openmla.aot.ahead import compiling_for
from openmla.kernels.call import Call
from openmla.kernels.jobs import NO_PLAN, Predicted
from openmla.lab.compiling import store as aot_store
from openmla.lab.compiling.key import stable_key

# What a job says itself, and what differs from run to run.
_NOT_KEPT = ("name", "target", "triton", "seconds", "error", "cached")
SCHEMA = 1  # raise it when a report changes meaning: old cache entries are then ignored
DIVISIBLE = ":16"  # in a signature: an address or a number that 16 divides


@dataclass(frozen=True)
class CompileJob:
    """One kernel call and the architecture to compile it for: "sm90", "sm100", "gfx950"."""

    name: str
    call: Call
    target: str
    predicted: Predicted = NO_PLAN

    @property
    def label(self) -> str:
        """Name and target."""
        return f"{self.name} for {self.target}"


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of one job. Fields that a target does not have are None."""

    name: str
    target: str
    triton: str
    seconds: float
    error: str = ""
    warps: int | None = None
    shared: int | None = None
    tmem: int | None = None
    registers: int | None = None
    partition_registers: tuple[int, ...] = ()
    accumulators: int | None = None  # AGPRs
    occupancy: int | None = None
    spills: int | None = None  # bytes stored on NVIDIA, registers on AMD
    spilling: tuple[int, ...] = ()  # registers of the partitions that store to local memory
    serialized: bool = False  # ptxas put waits between wgmma instructions
    warnings: tuple[str, ...] = ()
    barriers: int | None = None  # None in reports from before they were counted
    cached: bool = False

    def differences(self, predicted: Predicted) -> list[str]:
        """Where the compiler and the plan disagree, in words."""
        out = [f"does not compile: {self.error.splitlines()[0]}"] if self.error else []
        for what in ("shared", "tmem"):
            plan, real = getattr(predicted, what), getattr(self, what)
            if plan is not None and real is not None and plan != real:
                out.append(f"{what}: planned {plan}, compiled {real}")
        for what in ("registers", "spills"):
            plan, real = getattr(predicted, what), getattr(self, what)
            if plan is not None and real is not None and real > plan:
                out.append(f"{what}: planned at most {plan}, compiled {real}")
        if self.serialized and not predicted.serialized:
            out.append("wgmma instructions are serialized")
        return out


class Specialized(NamedTuple):
    """What Triton compiles a call as: types of runtime arguments, and the values of the others."""

    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any]


def specialized(job: CompileJob) -> Specialized:
    """Types of a launch: "*bf16:16" is a pointer that 16 divides; None and 1 are constants."""
    with compiling_for(job.target):
        device = triton.runtime.driver.active.get_current_device()
        binder = job.call.kernel.device_caches[device][-1]
    arguments, kinds, options = binder(**job.call.keywords)
    named = dict(zip(arguments, kinds, strict=True))
    signature = {
        name: kind + (rest or "").replace("D", DIVISIBLE)
        for name, (kind, rest) in named.items()
        if kind != "constexpr"
    }
    constexprs = {name: arguments[name] for name in arguments if name not in signature}
    return Specialized(signature, constexprs, options)


def job_key(job: CompileJob) -> str:
    """The hash under which a job's report is cached."""
    signature, constexprs, options = specialized(job)
    parts = [
        str(SCHEMA),
        triton.__version__,
        stable_key(job.call.kernel),  # with the source of what it calls and the constants it names
        repr(sorted(signature.items())),
        stable_key({name: _plain(value) for name, value in constexprs.items()}),
        repr(sorted(options.items())),
        job.name,
        job.target,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)


def compile_job(job: CompileJob, *, use_cache: bool = True) -> CompileReport:
    """The report of a job, kept or from the compiler. Never raises for a bad kernel."""
    key, version = job_key(job), triton.__version__
    kept = aot_store.stored(job.label, version, key) if use_cache else None
    if kept is not None:
        for name in ("warnings", "partition_registers", "spilling"):
            kept[name] = tuple(kept.get(name, ()))
        return CompileReport(job.name, job.target, version, 0.0, cached=True, **kept)
    report = _compile(job)
    if not report.error:
        values = dataclasses.asdict(report)
        kept = {name: values[name] for name in values if name not in _NOT_KEPT}
        aot_store.keep(job.label, version, key, kept)
    return report


def _compile(job: CompileJob) -> CompileReport:
    started = time.perf_counter()
    found: dict[str, Any] = {}
    with captured_output() as log:
        try:
            found = figures(build(job))
        except Exception as error:  # any failure of the compiler is a result, not a crash
            found = {"error": f"{type(error).__name__}: {error}".strip()}
    if "error" in found:
        found["error"] = "\n".join(filter(None, [found["error"], _errors(log.text)]))
    seconds = time.perf_counter() - started
    return CompileReport(job.name, job.target, triton.__version__, seconds, **found)


def build(job: CompileJob) -> Any:
    """Run the whole compiler."""
    with compiling_for(job.target):
        return job.call.compile()


def figures(compiled: Any) -> dict[str, Any]:
    """Registers, memory and warnings of a compiled kernel: fields of a `CompileReport`."""
    return (_read_cuda if "ptx" in compiled.asm else _read_hip)(compiled)


def _read_cuda(compiled: Any) -> dict[str, Any]:
    """Registers, spills and warnings come from running ptxas once more, verbosely."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx, meta = compiled.asm["ptx"], compiled.metadata
    arch = meta.target.arch
    variant = "a" if arch >= 90 else ""  # instructions of this architecture alone
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{variant}", str(source)]
        run = subprocess.run(
            [*command, "-o", f"{source}.cubin"], capture_output=True, text=True, check=False
        )
        spilling = _spilling(Path(command[0]).with_name("nvdisasm"), Path(f"{source}.cubin"))
    log = run.stdout + run.stderr
    used = re.search(r"Used (\d+) registers", log)
    spill = re.search(r"(\d+) bytes spill stores", log)
    partitions = re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)
    return {
        "warps": meta.num_warps,
        "shared": meta.shared,
        "tmem": getattr(meta, "tmem_size", 0) or 0,
        "registers": int(used.group(1)) if used else None,
        "partition_registers": tuple(int(n) for n in dict.fromkeys(partitions)),
        "spills": int(spill.group(1)) if spill else None,
        "spilling": spilling,
        "serialized": "serialized" in log,
        "warnings": tuple(line.strip() for line in log.splitlines() if "warning" in line.lower()),
        "barriers": count_barriers(ptx),
    }


def count_barriers(assembly: str) -> int:
    """Barriers that warps meet at in PTX or AMD assembly, but for those in inline assembly.

    A kernel asks for a few of them (`thread_barrier`); the others the compiler adds where it sees
    that warps would otherwise race for shared memory.

    >>> own = "// begin inline asm\\nbar.sync 8, 256;\\n// end inline asm\\n"
    >>> count_barriers("bar.sync 0, 128;\\n" + own + "barrier.sync 1;")
    2
    """
    inline = r"(?s)(// begin inline asm|;;#ASMSTART).*?(// end inline asm|;;#ASMEND)"
    kinds = r"(?m)^\s*(?:bar\.sync|barrier(?:\.cta)?\.sync|s_barrier)\b"
    return len(re.findall(kinds, re.sub(inline, "", assembly)))


def _spilling(disassembler: Path, cubin: Path) -> tuple[int, ...]:
    """The partitions, by their registers, whose code stores to local memory.

    A partition's code begins where it sets its registers. Empty without a disassembler.
    """
    if not disassembler.exists() or not cubin.exists():
        return ()
    command = [str(disassembler), "-c", str(cubin)]
    code = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: set[int] = set()
    registers = 0
    for line in code.splitlines():
        if "USETMAXREG" in line:
            numbers = re.findall(r"0x[0-9a-f]+", line.split("USETMAXREG")[1].split(";")[0])
            registers = int(numbers[-1], 16) if numbers else registers
        elif re.search(r"\bSTL\b", line):
            found.add(registers)
    return tuple(sorted(found))


def _read_hip(compiled: Any) -> dict[str, Any]:
    """Registers come from the assembly's own metadata."""
    text = compiled.asm["amdgcn"]

    def last(pattern: str) -> int | None:
        found = re.findall(pattern, text)
        return int(found[-1]) if found else None

    return {
        "warps": compiled.metadata.num_warps,
        "shared": compiled.metadata.shared,
        "registers": last(r"\.vgpr_count:\s+(\d+)"),
        "accumulators": last(r"\.agpr_count:\s+(\d+)"),
        "occupancy": last(r";\s*Occupancy:\s*(\d+)"),
        "spills": last(r"\.vgpr_spill_count:\s+(\d+)"),
        "barriers": count_barriers(text),
    }


def _errors(log: str) -> str:
    """The compiler's own error lines, without the dump of the program that follows them."""
    return "\n".join(line for line in log.splitlines() if "error:" in line)[:2000]


class _Log:
    text = ""


@contextlib.contextmanager
def captured_output() -> Iterator[_Log]:
    """Take what the compiler's C++ side writes to stdout and stderr."""
    log = _Log()
    with tempfile.TemporaryFile() as sink:
        saved = [os.dup(1), os.dup(2)]
        try:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
            yield log
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            sink.seek(0)
            log.text = sink.read().decode(errors="replace")
