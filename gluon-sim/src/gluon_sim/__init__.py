"""A CPU simulator for the Gluon kernels of this package: values, synchronization, races, deadlocks.

>>> import gluon_sim as sim                                                # doctest: +SKIP
>>> report = sim.simulate(kernel, grid, args, kwargs, seed=1)              # doctest: +SKIP
>>> report.raise_if_bad()                                                  # doctest: +SKIP

`intercept` does the same for host code that launches kernels itself.

The kernel file is not changed and not copied: the code object that Triton would compile is executed
on NumPy arrays. Partitions are scheduled one at a time by a seeded generator; TMA, cp.async, wgmma,
tcgen05 and LDS copies finish as early or as late as the rules allow.

What is checked: see `Kind`. What is not modeled, and therefore not checked here:

- layouts: swizzles, register distribution, bank conflicts, alignment, padding. Compiling the same
  kernel (`openmla.aot.jobs`) checks that they are legal, not that they are fast. Only shared
  layouts given by bases are modeled byte by byte (`placement`), since views of one buffer may
  disagree;
- the warps of a partition are one thread: a race between two warps of the same partition is seen
  only where a wgmma operand is overwritten, or one thread signals for all, before they met. They
  meet at a thread barrier, at bar.sync and after a wait for cp.async, not at an mbarrier. Other
  barriers that the compiler adds by itself are taken for granted, and counted when it compiles;
- reuse of shared memory of dead allocations by the compiler;
- global memory has bounds and write counts, but no race check: two CTAs that exchange data through
  global memory are only checked by their results;
- proxy fences are required for an ordinary shared-memory write that TMA, wgmma or tcgen05 reads
  afterwards, not for writes that follow writes; fences that the compiler may add do not count;
- a kernel may say that wgmma sees its cp.async copies without such a fence, by the line of assembly
  `// copies that have arrived are seen by wgmma`. It stands for the copies that its partition has
  waited for at that point and excuses nothing else: no copy that arrives later, no ordinary write
  before or after it, no missing wait. Whether the hardware keeps that promise is not checked;
- in a cluster, data that registers exchange between CTAs (it raises), TMA multicast (it raises),
  and shared memory of a CTA that has already ended;
- rounding inside the tensor cores: products are accumulated in float32 (fp8 products of an H200
  keep fewer bits: 9e-3 apart on a 64 x 64 x 128 product of unit normals, 2026-11-15);
- inline assembly beyond the PTX that `gluon_sim.language.ptx` knows (it raises; `register_asm`
  adds texts);
- PDL, cluster launch control;
- time: "timed" uses nominal rates, see `gluon_sim.timeline`.
"""

from __future__ import annotations

try:
    import numpy as _numpy  # noqa: F401
except ImportError as error:  # numpy is not a dependency of openmla itself
    raise ImportError("gluon_sim needs numpy: pip install numpy") from error

from gluon_sim.findings import Finding, Kind, Report
from gluon_sim.intercept import intercept
from gluon_sim.language.asm import register as register_asm
from gluon_sim.launch import Limits, simulate
from gluon_sim.timeline import Timeline

__all__ = [
    "Finding",
    "Kind",
    "Limits",
    "Report",
    "Timeline",
    "intercept",
    "register_asm",
    "simulate",
]
