"""Targets: the chips a problem can be planned for, as numbers. Naming one needs no GPU, no torch.

>>> target_by_name("H200").sm_count, target_by_name("rtx 4090").smem_per_block
(132, 101376)
>>> target_by_name("sm_86:84x101376").sm_count        # any GPU: architecture, SMs, shared memory
84
>>> target_by_name("sm90").name, target_by_name("gh200").name, alias_of("gh200").why
('h200', 'h100', 'the same GPU beside a Grace CPU')

Figures are the vendors' datasheets (dense, not sparse), except the fields named `measured_…`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from openmla.errors import InvalidArgument, with_hint

if TYPE_CHECKING:
    import torch

KB, MB = 1024, 1024 * 1024
# The first NVIDIA architectures with bf16 products and with e4m3 conversions in Triton.
_FIRST_BF16, _FIRST_E4M3 = 80, 89


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One chip. A zero means "unknown" or "it has none"."""

    name: str
    arch: str
    """"sm_90", "gfx950" or "cpu"."""
    sm_count: int
    """Streaming multiprocessors, or compute units on AMD."""
    smem_per_block: int
    """Shared memory (LDS) one block may use, in bytes."""
    registers_per_sm: int = 65536
    """32-bit registers."""
    tmem_cols: int = 0
    """Columns of tensor memory, 128 lanes of 4 bytes each."""
    smem_banks: int = 32
    l2_bytes: int = 0
    bf16_tflops: float = 0
    fp8_tflops: float = 0
    hbm_gbps: float = 0
    measured_bf16_tflops: float = 0
    """A large bf16 matrix product on random data."""
    measured_copy_gbps: float = 0
    """A device-to-device copy, bytes read plus bytes written."""

    @property
    def vendor(self) -> str:
        """nvidia, amd or cpu."""
        if self.arch == "cpu":
            return "cpu"
        return "nvidia" if self.arch.startswith("sm_") else "amd"

    @property
    def warp(self) -> int:
        """Lanes of a warp (wave)."""
        return 64 if self.vendor == "amd" else 32

    @property
    def max_threads(self) -> int:
        """Threads of one block."""
        return 1024

    @property
    def max_registers_per_thread(self) -> int:
        """Registers the compiler may give a thread: vector and accumulation ones on AMD."""
        return 512 if self.vendor == "amd" else 255

    @property
    def has_bf16(self) -> bool:
        """Whether Triton multiplies bf16 here."""
        return self.vendor != "nvidia" or _capability(self.arch) >= _FIRST_BF16

    @property
    def has_e4m3(self) -> bool:
        """Whether Triton converts e4m3 here; elsewhere kernels dequantize it from its bits."""
        return self.vendor != "nvidia" or _capability(self.arch) >= _FIRST_E4M3

    def __str__(self) -> str:
        if self.vendor == "cpu":
            return self.name
        units, memory = ("CUs", "LDS") if self.vendor == "amd" else ("SMs", "shared memory")
        return (
            f"{self.name} ({self.arch}, {self.sm_count} {units}, {self.smem_per_block} B {memory})"
        )


# Measured on the H200: 2026-11-15, driver 580.159, torch 2.11, medians of 30 CUDA-event timings: an
# 8192^3 bf16 torch.matmul on random data, and a device copy.
_KNOWN = (
    Target(name="cpu", arch="cpu", sm_count=0, smem_per_block=0, registers_per_sm=0, smem_banks=0),
    Target(
        name="h100",
        arch="sm_90",
        sm_count=132,
        smem_per_block=227 * KB,
        l2_bytes=50 * MB,
        bf16_tflops=989,
        fp8_tflops=1979,
        hbm_gbps=3350,
    ),
    Target(
        name="h200",
        arch="sm_90",
        sm_count=132,
        smem_per_block=227 * KB,
        l2_bytes=60 * MB,
        bf16_tflops=989,
        fp8_tflops=1979,
        hbm_gbps=4800,
        measured_bf16_tflops=791,
        measured_copy_gbps=4255,
    ),
    Target(
        name="b200",
        arch="sm_100",
        sm_count=148,
        smem_per_block=227 * KB,
        l2_bytes=126 * MB,
        bf16_tflops=2250,
        fp8_tflops=4500,
        hbm_gbps=8000,
        tmem_cols=512,
    ),
    Target(
        name="mi300x",
        arch="gfx942",
        sm_count=304,
        smem_per_block=64 * KB,
        l2_bytes=4 * MB,
        bf16_tflops=1307,
        fp8_tflops=2615,
        hbm_gbps=5300,
        registers_per_sm=131072,
    ),
    Target(
        name="mi355x",
        arch="gfx950",
        sm_count=256,
        smem_per_block=160 * KB,
        l2_bytes=4 * MB,
        bf16_tflops=2517,
        fp8_tflops=5033,
        hbm_gbps=8000,
        registers_per_sm=131072,
        smem_banks=64,
    ),
    Target(
        name="a100",
        arch="sm_80",
        sm_count=108,
        smem_per_block=163 * KB,
        l2_bytes=40 * MB,
        bf16_tflops=312,
        hbm_gbps=2039,
    ),
    Target(
        name="l40s",
        arch="sm_89",
        sm_count=142,
        smem_per_block=99 * KB,
        l2_bytes=96 * MB,
        bf16_tflops=362,
        fp8_tflops=733,
        hbm_gbps=864,
    ),
    Target(
        name="rtx4090",
        arch="sm_89",
        sm_count=128,
        smem_per_block=99 * KB,
        l2_bytes=72 * MB,
        bf16_tflops=165,
        fp8_tflops=330,
        hbm_gbps=1008,
    ),
    Target(
        name="rtx5090",
        arch="sm_120",
        sm_count=170,
        smem_per_block=99 * KB,
        l2_bytes=96 * MB,
        bf16_tflops=209,
        fp8_tflops=419,
        hbm_gbps=1792,
    ),
)
TARGETS = {target.name: target for target in _KNOWN}


class Alias(NamedTuple):
    """A chip that is planned as another target is, and why it may be."""

    target: str
    why: str


_ALIASES = {
    "gh200": Alias("h100", "the same GPU beside a Grace CPU"),
    "h800": Alias("h100", "the same GPU with slower links between GPUs"),
    "h20": Alias("sm_90:78x232448", "a Hopper with 78 SMs"),
    "gb200": Alias("b200", "the same architecture beside a Grace CPU"),
    "b300": Alias("sm_103:148x232448", "Blackwell Ultra, an architecture of its own"),
    "gb300": Alias("sm_103:148x232448", "Blackwell Ultra, an architecture of its own"),
    "mi325x": Alias("mi300x", "the same GPU with more memory"),
    "mi350x": Alias("mi355x", "the same GPU at lower power"),
    "l40": Alias("l40s", "the same GPU at lower clocks"),
    "l4": Alias("sm_89:58x101376", "an Ada GPU with 58 SMs"),
    "rtx3090": Alias("sm_86:82x101376", "an Ampere GPU with 82 SMs"),
    "mi250x": Alias("gfx90a:104x65536", "one of its two dies"),
    "v100": Alias("sm_70:80x98304", "a Volta GPU"),
    "t4": Alias("sm_75:40x65536", "a Turing GPU"),
}
# An architecture alone names its best-known chip.
_BY_ARCH = {target.arch: target for target in reversed(_KNOWN) if target.name != "h100"}
_ARCH = re.compile(r"(?:sm_?(\d{2,3})[af]?|(gfx[0-9a-f]+))")
_GENERIC = re.compile(r"(sm_\d{1,4}|gfx[0-9a-f]{1,8}):(\d{1,9})x(\d{1,9})")


def target_by_name(name: str) -> Target:
    """The target called `name` (case, spaces and dashes do not matter), or an error naming all.

    An architecture ("sm_120", "sm120") stands for its best-known chip, some chips for another one
    of the same kind (`alias_of` says which and why); "arch:SMsxbytes" describes any GPU.
    """
    if not isinstance(name, str):
        raise InvalidArgument("target", "the name of a target", repr(name))
    if name in TARGETS:
        return TARGETS[name]
    lowered = name.strip().lower()
    alias = alias_of(name)
    if alias is not None:
        return target_by_name(alias.target)
    known = TARGETS.get(_without_spacing(lowered)) or _BY_ARCH.get(_arch_named(lowered))
    if known is not None:
        return known
    generic = _GENERIC.fullmatch(lowered)
    if generic is None:
        expected = "one of " + ", ".join(TARGETS) + ", or arch:SMsxbytes such as sm_86:84x101376"
        raise InvalidArgument("target", expected, with_hint(name, [*TARGETS, *_ALIASES]))
    return generic_target(generic[1], int(generic[2]), int(generic[3]))


def alias_of(name: str) -> Alias | None:
    """What a chip is planned as that is no target of its own; None where it is one."""
    return _ALIASES.get(_without_spacing(name.strip().lower()))


def _without_spacing(name: str) -> str:
    return re.sub(r"[\s_-]", "", name)


def _arch_named(name: str) -> str:
    """ "sm90", "sm_90" and "sm_90a" -> "sm_90"; empty where it is no architecture."""
    found = _ARCH.fullmatch(name)
    if found is None:
        return ""
    return found[2] or f"sm_{found[1]}"


def generic_target(arch: str, sm_count: int, smem_per_block: int) -> Target:
    """A GPU that is not in the table. Its name says all of it, so the name can be parsed again."""
    if sm_count < 1 or smem_per_block < 1:
        got = f"{sm_count} SMs with {smem_per_block} bytes"
        raise InvalidArgument("target", "at least one SM with some shared memory", got)
    return Target(
        name=f"{arch}:{sm_count}x{smem_per_block}",
        arch=arch,
        sm_count=sm_count,
        smem_per_block=smem_per_block,
        registers_per_sm=65536 if arch.startswith("sm_") else 131072,
        tmem_cols=512 if arch in ("sm_100", "sm_103") else 0,
        smem_banks=64 if arch == "gfx950" else 32,
    )


def target_of_device(device: torch.device | str | int) -> Target:
    """The target that a torch device is. The only function here that imports torch.

    A known chip with its usual SM count maps to its name; a slice of one, or a chip that is not
    in the table, becomes a generic target built from what torch says about it.
    """
    import torch

    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type == "cpu":
        return TARGETS["cpu"]
    if where.type != "cuda":
        raise InvalidArgument("device", "a cpu or cuda (CUDA or ROCm) device", repr(str(where)))
    return target_of_properties(torch.cuda.get_device_properties(where))


def target_of_properties(properties: Any) -> Target:
    """The target behind the properties that torch reports for one GPU."""
    gcn = getattr(properties, "gcnArchName", "")
    if gcn.startswith("gfx"):
        arch = gcn.split(":")[0]
    else:
        arch = f"sm_{properties.major}{properties.minor}"
    smem = getattr(properties, "shared_memory_per_block_optin", 0)
    smem = smem or getattr(properties, "shared_memory_per_block", 0) or 48 * KB
    sm_count = properties.multi_processor_count
    label = re.sub(r"[\s_-]", "", properties.name).lower()
    for known in _KNOWN:
        same = (known.arch, known.sm_count, known.smem_per_block) == (arch, sm_count, smem)
        if same and known.name in label:
            return known
    return generic_target(arch, sm_count, smem)


def _capability(arch: str) -> int:
    """ "sm_90" -> 90; 0 for anything else."""
    return int(arch[3:]) if arch.startswith("sm_") else 0
