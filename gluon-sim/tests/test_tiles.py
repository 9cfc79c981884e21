"""Places of elements in shared memory: those of the compiler, and of views that disagree."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl

from gluon_sim import Kind
from gluon_sim.compiled import execute
from gluon_sim.memory.tiles import Home, offsets, seen_as, tile_of
from launches.launch import Launch, descriptor
from toys import views

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def builder() -> Any:
    """Triton's, which knows what its layouts mean."""
    if TRITON < (3, 7):
        pytest.skip("Triton 3.6 tells of layouts of registers alone")
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    return gluon_ir.GluonOpBuilder(context), context


def by_triton(builder: Any, layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Elements from the first one to each."""
    bases = builder[0].to_linear_layout(layout._to_ir(builder[0]), list(shape)).offset_bases
    number = np.arange(1 << len(bases))
    where = [np.zeros(len(number), int) for _ in shape]
    for bit, basis in enumerate(bases):
        for axis, step in enumerate(basis):
            where[axis] ^= (number >> bit & 1) * step
    places = np.zeros(shape, int)
    places[tuple(where)] = number
    return places


def nvmma(swizzle: int, bits: int, rank: int = 2, **more: Any) -> Any:
    return gl.NVMMASharedLayout(swizzle, bits, rank, **more)


TILES = {
    **{
        f"{bits} bits, {swizzle} bytes, {shape}": (nvmma(swizzle, bits), shape)
        for bits, swizzle, shape in product(
            (8, 16, 32), (0, 32, 64, 128), ((8, 128), (64, 256), (512, 512))
        )
    },
    **{
        f"transposed, {swizzle} bytes": (nvmma(swizzle, 16, transposed=True), (128, 64))
        for swizzle in (32, 64, 128)
    },
    "a box of one head": (nvmma(128, 16, 3), (64, 1, 128)),
    "rows of a ragged tensor": (nvmma(64, 16, 5), (1, 1, 64, 1, 128)),
    "a line": (nvmma(0, 32), (1, 512)),
    "words": (nvmma(0, 32), (32, 4)),
    **{
        f"swizzled {exchange} {order}": (gl.SwizzledSharedLayout(*exchange, list(order)), (32, 64))
        for exchange, order in product(((1, 1, 1), (8, 1, 8), (4, 2, 4)), ((1, 0), (0, 1)))
    },
    "swizzled, three axes": (gl.SwizzledSharedLayout(8, 2, 4, [1, 2, 0]), (4, 32, 16)),
    "swizzled, one axis": (gl.SwizzledSharedLayout(1, 1, 1, [0]), (128,)),
}


@pytest.mark.parametrize("name", TILES)
def test_elements_are_where_triton_has_them(name: str, builder: Any) -> None:
    layout, shape = TILES[name]
    assert np.array_equal(offsets(tile_of(layout), shape), by_triton(builder, layout, shape))


PLAIN = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
VIEWS: dict[str, dict[str, Any]] = {
    "the same": {},
    "permuted": {"PERMUTED": True},
    "transposed when allocated": {"LAYOUT": nvmma(64, 16, transposed=True)},
    "permuted, other swizzles": {
        "LAYOUT": gl.SwizzledSharedLayout(8, 2, 4, [1, 0]),
        "PERMUTED": True,
    },
    "the last rows, permuted": {"LENGTH": 16, "PERMUTED": True},
    "the second panel": {"CUT": [64, 64], "AS": [64, 64], "AS_LAYOUT": nvmma(128, 16)},
    "rows of panels": {"AS": [2, 64, 64], "AS_LAYOUT": nvmma(128, 16), "STAGE": 1},
    "another swizzle": {"AS": [64, 128], "AS_LAYOUT": nvmma(64, 16)},
    "no swizzle": {"AS": [64, 128], "AS_LAYOUT": PLAIN},
    "no swizzle, then one": {"LAYOUT": PLAIN, "AS": [64, 128], "AS_LAYOUT": nvmma(128, 16)},
    "half a panel": {"CUT": [32, 32], "AS": [64, 32], "AS_LAYOUT": nvmma(64, 16)},
    "tiles across panels": {"AS": [4, 32, 64], "AS_LAYOUT": nvmma(128, 16), "STAGE": 2},
    "columns first": {
        "AS": [64, 128],
        "AS_LAYOUT": gl.SwizzledSharedLayout(1, 1, 1, [0, 1]),
        "LENGTH": 8,
    },
}
"""Of a tile [64, 128] of 16 bits, swizzled by 128 bytes, if nothing else is said."""
REFUSED = {"the second panel": {(3, 8)}, "half a panel": {(3, 8), (3, 9)}}
"""Versions of Triton that refuse a view: 3.8 another layout of any slice, 3.9 one that reads more
than the slice owns."""


def launch_of(name: str) -> tuple[Launch, torch.Tensor]:
    """Reads a view of numbers; and what it is to write them to."""
    registers = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    how: dict[str, Any] = {
        "TILE": [64, 128],
        "LAYOUT": nvmma(128, 16),
        "CUT": None,
        "AS": None,
        "AS_LAYOUT": None,
        "STAGE": None,
        "LENGTH": 64,
        "PERMUTED": False,
        "L": registers,
        **VIEWS[name],
    }
    src = torch.arange(64 * 128, dtype=torch.int16).view(64, 128)
    out = torch.full((64 * 128,), -1, dtype=torch.int16)
    return Launch(views, "through", "sm90", (1,), (src, out), lambda: None, how), out


@pytest.mark.compile
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_reads_what_compiled_code_reads(name: str) -> None:
    launch, out = launch_of(name)
    launch.run().raise_if_bad()
    simulated = out.clone()
    assert (simulated >= 0).any()
    out.fill_(-1)
    if TRITON in REFUSED.get(name, ()):
        with pytest.raises(RuntimeError, match="parsing"):
            launch.compile()
        return
    arguments = dict(zip(("src_ptr", "o_ptr"), launch.args, strict=True))
    execute(launch.compile(), 1, arguments, outputs=["o_ptr"]).raise_if_bad()
    assert torch.equal(out, simulated)


def words(permuted: bool) -> Launch:
    src, out = torch.arange(128, dtype=torch.int32).view(32, 4), torch.zeros(64, dtype=torch.int32)
    want = src[:, 2:].T if permuted else src[:, 2:]
    registers = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    return Launch(
        views,
        "words",
        "sm90",
        (1,),
        (descriptor(src, [32, 4], nvmma(0, 32)), out),
        lambda: torch.testing.assert_close(out, want.flatten()),
        {"PERMUTED": permuted, "L": registers},
    )


def test_a_permuted_tile_without_a_swizzle_is_refused():
    """Triton 3.6 and 3.7 take it for one that was written in that order."""
    report = words(True).run()
    assert report.kinds() == {Kind.ERROR}
    assert "Triton before 3.8 places the elements of a permuted tile" in str(report)
    right = words(False)
    right.run().raise_if_bad()
    right.check()


@pytest.mark.compile
@pytest.mark.parametrize("permuted", [True, False])
def test_compiled_code_shows_why(permuted: bool) -> None:
    launch = words(permuted)
    execute(launch.compile(), 1, {"src": launch.args[0], "o_ptr": launch.args[1]}).raise_if_bad()
    if permuted and TRITON < (3, 8):
        with pytest.raises(AssertionError):
            launch.check()
    else:
        launch.check()


def test_a_stage_of_a_buffer_that_two_ctas_share_is_itself():
    """The second CTA's rows of a stage are where its half of the buffer is."""
    tile, box = tile_of(nvmma(128, 16)), tile_of(nvmma(128, 16, 3))
    home = Home(tile, (3, 128, 64), 2, nbytes=3 * 128 * 64 * 2, split=-2)
    seen = seen_as(home, 128 * 64 * 2, box, (1, 128, 64), 2, -2)
    assert seen.place is None and seen.strides == (128 * 64 * 2, 64 * 2, 2)
    turned = seen_as(home, 0, tile, (3, 64, 128), 2, -1)  # other rows and columns of each
    assert turned.place is not None and turned.strides[0] == 128 * 64 * 2
    assert turned.place[0, 64] == 64 * 64 * 2
