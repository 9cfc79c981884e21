"""Small programs in PTX that an H200 has run too: what instructions mean, bit by bit.

`PROBES[name].run()` executes one on the interpreter. benchmarks/device/executed_h200.py ran them on
the chip; its results are in probes_h200.npz, and test_probes.py compares.
"""
# ruff: noqa: E501  (programs read best unbroken)

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from gluon_sim.compiled import Schedule, execute

SHARED = 32768
SWIZZLES = {0: 0, 1: 32, 2: 64, 3: 128}
"""Mode of a tensor map, and the bytes of its rows."""


class Faulty(Exception):
    """The interpreter found a fault; the argument is the report."""


@dataclass(frozen=True)
class Map:
    """A tensor map, outermost dimension first; strides in elements."""

    base: np.ndarray
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element: int
    swizzle: int


@dataclass(frozen=True)
class Probe:
    """One block of `threads` threads: an input tensor, or a map and its coordinates; words out."""

    text: str
    given: np.ndarray
    words: int
    threads: int = 128
    map: Map | None = None

    def run(self, schedule: Schedule | None = None) -> np.ndarray:
        """What the interpreter makes of it."""
        out = torch.zeros(self.words, dtype=torch.int32)
        arguments: dict[str, Any] = {"given": _tensor(self.given), "out": out}
        meta = []
        if self.map is not None:
            described = SimpleNamespace(
                base=_tensor(self.map.base),
                shape=self.map.shape,
                strides=self.map.strides,
                block_shape=self.map.box,
            )
            arguments = {"map": described, **arguments}
            m = self.map
            meta = [{"block_size": m.box, "elem_size": m.element, "swizzle": m.swizzle}]
        metadata = SimpleNamespace(shared=SHARED, num_ctas=1, tensordesc_meta=meta)
        compiled = SimpleNamespace(asm={"ptx": self.text}, metadata=metadata)
        report = execute(compiled, 1, arguments, outputs=["out"], schedule=schedule or Schedule())
        if not report.ok:
            raise Faulty(report)
        return out.numpy().view(np.uint32)


def _tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x).view(np.uint8).reshape(-1).copy())


def kernel(body: str, threads: int = 128, rank: int = 0) -> str:
    """A kernel with pointers `given` (%rd1) and `out` (%rd2); %r1 is the thread.

    With a tensor map of so many dimensions before them, its address is in %rd5.
    """
    kinds = [".align 64 .b8 k_param_0[128]"] if rank else []
    kinds += [f".u32 k_param_{1 + i}" for i in range(rank)]
    kinds += [f".u64 k_param_{1 + rank + i}" for i in range(rank)]
    first = len(kinds)
    kinds += [f".u64 .ptr .global .align 1 k_param_{first + i}" for i in range(2)]
    names = ",\n".join(f".param {kind}" for kind in kinds)
    map_address = "mov.b64 %rd4, k_param_0; cvta.param.u64 %rd5, %rd4;" if rank else ""
    return f""".version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(
{names}
)
.reqntid {threads}
{{
.reg .pred %p<8>;
.reg .b16 %rs<16>;
.reg .b32 %r<192>;
.reg .b64 %rd<32>;
ld.param.b64 %rd1, [k_param_{first}];
ld.param.b64 %rd2, [k_param_{first + 1}];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 4;
mov.b32 %r9, global_smem;
{map_address}
{body}
ret;
}}
"""


def _copy_loop(step: str, size: int, threads: int) -> str:
    """`step` for every word of `size` bytes: %r2 its shared address, %rd6 and %rd7 its place in
    the input and the output."""
    return f"""
mov.b32 %r4, %r1;
L{size}{step[:2]}:
shl.b32 %r3, %r4, 2; add.s32 %r2, %r9, %r3;
mul.wide.u32 %rd8, %r4, 4; add.s64 %rd6, %rd1, %rd8; add.s64 %rd7, %rd2, %rd8;
{step}
add.s32 %r4, %r4, {threads};
setp.lt.u32 %p7, %r4, {size // 4};
@%p7 bra L{size}{step[:2]};
"""


FILL = "ld.global.b32 %r5, [%rd6]; st.shared.b32 [%r2], %r5;"
DRAIN = "mov.b32 %r5, 0; ld.shared.b32 %r5, [%r2]; st.global.b32 [%rd7], %r5;"


def _box(described: Map, coordinates: tuple[int, ...]) -> Probe:
    """TMA load of a box over shared memory that held 0x55555555: the raw bytes afterwards."""
    rank, size = len(described.box), int(np.prod(described.box)) * described.element
    named = "; ".join(f"mov.b32 %r{20 + i}, {c}" for i, c in enumerate(reversed(coordinates)))
    where = ", ".join(f"%r{20 + i}" for i in range(rank))
    body = f"""
{_copy_loop("st.shared.b32 [%r2], 0x55555555;", size, 128)}
add.s32 %r10, %r9, {SHARED - 64};
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r10], 1;
fence.proxy.async.shared::cta;
bar.sync 0;
{named};
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {size};
@%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r9], [%rd5, {{{where}}}], [%r10];
W: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
@!%p2 bra W;
{_copy_loop(DRAIN, size, 128)}
"""
    return Probe(kernel(body, rank=rank), np.zeros(1, np.uint32), size // 4, map=described)


def _boxes() -> dict[str, Probe]:
    """Swizzles, boxes that reach out of the tensor on every side, and ragged descriptors."""
    probes = {}
    image = np.arange(64 * 96, dtype=np.uint16)
    for mode, width in SWIZZLES.items():
        columns = (width or 128) // 2
        described = Map(image, (60, 90), (96, 1), (32, columns), 2, mode)
        for name, at in {
            "inside": (8, 16),
            "above": (-3, 16),
            "left": (8, -8),
            "odd": (8, 5),
            "corner": (-3, -5),
            "behind": (50, 80),
            "outside": (70, 0),
        }.items():
            probes[f"box {width} {name}"] = _box(described, at)
    octets = (np.arange(64 * 128) % 251).astype(np.uint8)
    for mode, width in SWIZZLES.items():
        described = Map(octets, (3, 20, 120), (20 * 128, 128, 1), (1, 16, width or 64), 1, mode)
        probes[f"bytes {width}"] = _box(described, (1, 10, 64))
    most, rows, stride = 0x7FFF0000, 1 << 30, 64
    ragged = Map(
        image,
        (most, most, rows, 2, 32),
        ((1 << 34) - stride, stride, stride, 32, 1),
        (1, 1, 16, 1, 32),
        2,
        2,
    )
    for name, (start, length, row, head) in {
        "first": (0, 40, 0, 0),
        "end": (5, 20, 12, 1),
        "past": (5, 20, 32, 0),
        "no rows": (7, 0, 0, 1),
    }.items():
        probes[f"ragged {name}"] = _box(
            ragged, (rows, start + length, rows - length + row, head, 0)
        )
    return probes


def _copies() -> dict[str, Probe]:
    """cp.async of every size and source size, over 0x55555555."""
    probes = {}
    for size in (4, 8, 16):
        cached = "cg" if size == 16 else "ca"
        body = f"""
{_copy_loop("st.shared.b32 [%r2], 0x55555555;", 32 * size, 32)}
bar.sync 0;
mul.wide.u32 %rd8, %r1, {size}; add.s64 %rd6, %rd1, %rd8;
mul.lo.s32 %r3, %r1, {size}; add.s32 %r2, %r9, %r3; rem.u32 %r6, %r1, {size + 1};
cp.async.{cached}.shared.global [%r2], [%rd6], {size}, %r6;
cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
{_copy_loop(DRAIN, 32 * size, 32)}
"""
        given = (1 + np.arange(32 * size) % 250).astype(np.uint8)
        probes[f"cp.async {size}"] = Probe(kernel(body, 32), given, 8 * size, 32)
    return probes


def _descriptor(start: int, leading: int, stride: int, mode: int) -> int:
    """The 64 bits that wgmma takes; `mode` as in a tensor map."""
    layout = {0: 0, 1: 3, 2: 2, 3: 1}[mode]
    return (start >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 | layout << 62


def _product(kind: str, a: int, b: int, image: np.ndarray, across: tuple[int, int], steps: int = 1):
    """m64n64 of two operands in a picture of shared memory; `steps` products, 32 bytes apart."""
    columns, depth = 64, 32 if kind == "e4m3" else 16
    registers = ", ".join(f"%r{32 + i}" for i in range(columns // 2))
    transposed = "" if kind == "e4m3" else f", {across[0]}, {across[1]}"
    products = "\n".join(
        f"setp.ne.u32 %p1, {int(step > 0)}, 0; add.s64 %rd14, %rd12, {2 * step};"
        f" add.s64 %rd15, %rd13, {2 * step};\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} {{{registers}}}, "
        f"%rd14, %rd15, %p1, 1, 1{transposed};"
        for step in range(steps)
    )
    zero = "\n".join(f"mov.b32 %r{32 + i}, 0;" for i in range(columns // 2))
    stores = "\n".join(f"st.global.b32 [%rd10+{4 * i}], %r{32 + i};" for i in range(columns // 2))
    body = f"""
{_copy_loop(FILL, image.nbytes, 128)}
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %r6, %r9, 4; cvt.u64.u32 %rd11, %r6;
add.s64 %rd12, %rd11, {a}; add.s64 %rd13, %rd11, {b};
{zero}
wgmma.fence.sync.aligned;
{products}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd9, %r1, {2 * columns}; add.s64 %rd10, %rd2, %rd9;
{stores}
"""
    return Probe(kernel(body), image, 128 * columns // 2)


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of numbers in a format of the tensor cores."""
    types = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
    raw = torch.from_numpy(values).to(types[kind]).view(torch.uint8)
    return raw.numpy().reshape(-1)


def _layouts() -> dict[str, Probe]:
    """Operands of small integers by every swizzle, with K along rows and across them."""
    probes = {}
    draw = np.random.default_rng(1)
    pictures = {
        kind: encoded(draw.integers(-3, 4, 24576 // size).astype(np.float32), kind)
        for kind, size in (("bf16", 2), ("f16", 2), ("e4m3", 1))
    }
    second = 12288
    for mode, width in SWIZZLES.items():
        along = (1024, 128, mode) if mode == 0 else (16, 8 * width, mode)
        across = {0: (1024, 128), 1: (2048, 256), 2: (1024, 2048), 3: (4096, 1024)}[mode]
        for kind in pictures:
            pairs = [(0, 0)] if kind == "e4m3" else [(0, 0), (0, 1), (1, 0), (1, 1)]
            for pair in pairs:
                shapes = [(*across, mode) if is_across else along for is_across in pair]
                a, b = (_descriptor(at, *s) for at, s in zip((0, second), shapes, strict=True))
                name = f"{kind} swizzle {width} {'across' if pair[0] else 'along'} {'across' if pair[1] else 'along'}"
                probes[name] = _product(kind, a, b, pictures[kind], pair)
        if width == 128:
            a, b = _descriptor(64, *along), _descriptor(second + 96, *along)
            probes["bf16 inside a row of 128"] = _product("bf16", a, b, pictures["bf16"], (0, 0))
    return probes


def _sums() -> dict[str, Probe]:
    """Sums of products of all sizes, four products after another: how tensor cores round."""
    probes = {}
    for kind, size in (("bf16", 2), ("f16", 2), ("e4m3", 1)):
        for spread in (0, 3):
            draw = np.random.default_rng(7 + spread)
            values = draw.standard_normal(16384 // size) * 2.0 ** draw.uniform(
                -spread, spread, 16384 // size
            )
            image = encoded(values.astype(np.float32), kind)
            a, b = _descriptor(0, 16, 1024, 3), _descriptor(8192, 16, 1024, 3)
            probes[f"sums {kind} spread {spread}"] = _product(kind, a, b, image, (0, 0), steps=4)
    return probes


LANES = {
    "ex2": "ex2.approx.ftz.f32 %r5, %r4;",
    "lg2": "abs.f32 %r4, %r4; lg2.approx.ftz.f32 %r5, %r4;",
    "rcp": "rcp.approx.ftz.f32 %r5, %r4;",
    "bf16": "neg.f32 %r6, %r4; cvt.rn.bf16x2.f32 %r5, %r6, %r4;",
    "f16": "neg.f32 %r6, %r4; cvt.rn.f16x2.f32 %r5, %r6, %r4;",
    "e4m3": "neg.f32 %r6, %r4; cvt.rn.satfinite.e4m3x2.f32 %rs1, %r6, %r4; cvt.u32.u16 %r5, %rs1;",
    "max": "max.f32 %r5, %r4, 0f3F000000;",
    "max nan": "max.NaN.f32 %r5, %r4, 0f3F000000;",
    "fma": "fma.rn.f32 %r5, %r4, %r4, 0fBF800001;",
    "shuffle": "shfl.sync.bfly.b32 %r5, %r4, 5, 31, -1;",
    "shuffle up": "shfl.sync.up.b32 %r5, %r4, 3, 0x1800, -1;",
    "ballot": "setp.gt.f32 %p1, %r4, 0f00000000; vote.sync.ballot.b32 %r5, %p1, -1;",
    "permute": "prmt.b32 %r5, %r4, 0x11223344, 0x7B20;",
    "integer": "cvt.rzi.s32.f32 %r5, %r4;",
}
"""What is done to a float32 in %r4; the result in %r5."""


def _lanes() -> dict[str, Probe]:
    draw = np.random.default_rng(3)
    given = (draw.standard_normal(4096) * 2.0 ** draw.uniform(-12, 6, 4096)).astype(np.float32)
    given[:8] = 0, -0.0, np.inf, -np.inf, np.nan, 448, 1e-40, 464
    start = "ld.global.b32 %r4, [%rd6];"
    probes = {}
    for name, step in LANES.items():
        body = "".join(
            f"add.s64 %rd6, %rd1, {128 * i}; add.s64 %rd6, %rd6, %rd3; add.s64 %rd7, %rd2, "
            f"{128 * i}; add.s64 %rd7, %rd7, %rd3; {start} {step} st.global.b32 [%rd7], %r5;\n"
            for i in range(128)
        )
        probes[f"lanes {name}"] = Probe(kernel(body, 32), given, 4096, 32)
    return probes


PROBES: dict[str, Probe] = {**_boxes(), **_copies(), **_layouts(), **_sums(), **_lanes()}
