"""Kernels about the language itself: arithmetic, shapes, records, and ways to go wrong.

One partition of 4 warps each. Only `lonely` has barriers (box[2], count 2, one arrival), only
`mismatch` and `unwritten` have shared memory (box).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from toys.compat import aggregate

L1 = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
SHIFT = gl.constexpr(3)


@gluon.jit
def arithmetic(x_ptr, y_ptr, o_ptr, N: gl.constexpr):
    """Integer division and remainder round to zero; shifts and products wrap around 32 bits."""
    i = gl.arange(0, N, L1)
    x = gl.load(x_ptr + i)
    y = gl.load(y_ptr + i)
    gl.store(o_ptr + i, x // y)
    gl.store(o_ptr + N + i, x % y)
    gl.store(o_ptr + 2 * N + i, x * y)
    gl.store(o_ptr + 3 * N + i, (x << SHIFT) ^ (y >> 1))
    gl.store(o_ptr + 4 * N + i, gl.where(x < y, gl.maximum(x, y), gl.minimum(x, 7)))


@gluon.jit
def roundings(x_ptr, half_ptr, brain_ptr, eight_ptr, sum_ptr, N: gl.constexpr):
    """Conversions round to nearest even; bf16 arithmetic stays bf16; fp8 saturates."""
    i = gl.arange(0, N, L1)
    x = gl.load(x_ptr + i)
    gl.store(half_ptr + i, x.to(gl.float16))
    gl.store(brain_ptr + i, x.to(gl.bfloat16))
    gl.store(eight_ptr + i, x.to(gl.float8e4nv))
    b = x.to(gl.bfloat16)
    gl.store(sum_ptr + i, (b + b * 3).to(gl.float32))


@aggregate
class Window:
    """A record with a method, as larger kernels use them."""

    base: gl.tensor
    width: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, base, width):
        self.base = base
        self.width = gl.constexpr(width)

    @gluon.jit
    def columns(self):
        return self.base + gl.arange(0, self.width, L1)


class Rows(NamedTuple):
    """A named tuple of run-time values."""

    base: Any
    stride: Any


class Choices(NamedTuple):
    """One of constants."""

    negative: bool
    times: int


class Sums(NamedTuple):
    """One that a loop carries."""

    total: Any
    most: Any


@gluon.jit
def add_row(sums, rows, number, HOW: gl.constexpr):
    x = gl.load(rows.base + number * rows.stride + gl.arange(0, 128, L1))
    if HOW.negative:
        x = -x
    return Sums(total=sums.total + x * HOW.times, most=gl.maximum(sums.most, x))


@gluon.jit
def named_records(x_ptr, o_ptr, count, stride, HOW: gl.constexpr):
    """Named tuples: run-time values, constants from the host, and what a loop carries."""
    rows = Rows(x_ptr, stride)
    zero = gl.zeros([128], gl.int32, L1)
    sums = Sums(zero, zero - 1000)
    for i in range(0, count):
        sums = add_row(sums, rows, i, HOW)
    gl.store(o_ptr + gl.arange(0, 128, L1), sums.total)
    gl.store(o_ptr + 128 + gl.arange(0, 128, L1), sums.most)


@gluon.jit
def record(o_ptr, start):
    window = Window(start, 128)
    gl.store(o_ptr + gl.arange(0, 128, L1), window.columns())


@gluon.jit
def plus(a, b):
    """For `sums`."""
    return a + b


@gluon.jit
def sums(o_ptr, n):
    """Running sums of n + 0, n + 1, … from the front, then from the back."""
    i = gl.arange(0, 128, L1)
    gl.store(o_ptr + i, gl.associative_scan(n + i, 0, plus))
    gl.store(o_ptr + 128 + i, gl.associative_scan(n + i, 0, plus, reverse=True))


@gluon.jit
def halves(o_ptr):
    """reshape, split, join, permute, reduce along both axes."""
    L2: gl.constexpr = gl.BlockedLayout([1, 2], [8, 4], [4, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, L2))
    columns = gl.arange(0, 8, gl.SliceLayout(0, L2))
    x = rows[:, None] * 8 + columns[None, :]
    even, odd = gl.split(gl.reshape(x, [32, 4, 2]))
    total = gl.sum(even, 1) - gl.max(odd, 1)
    gl.store(o_ptr + gl.arange(0, 32, total.type.layout), total)


@gluon.jit
def endless(o_ptr):
    x = gl.load(o_ptr)
    while x >= 0:
        x = x * 1
    gl.store(o_ptr, x)


@gluon.jit
def lonely(o_ptr):
    """Waits for a phase that nobody completes."""
    box = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(box.index(1), count=2)
    mbarrier.arrive(box.index(1), count=1)
    mbarrier.wait(box.index(1), 0)
    gl.store(o_ptr, 1)


@gluon.jit
def outside(o_ptr, n):
    i = gl.arange(0, 128, L1)
    gl.store(o_ptr + i + 1, i, mask=i < n)


@gluon.jit
def assembly(o_ptr):
    x = gl.inline_asm_elementwise("popc.b32 $0, 7;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    gl.store(o_ptr, x)


@gluon.jit
def mismatch(o_ptr):
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    box = gl.allocate_shared_memory(gl.int32, [64], L)
    box.store(gl.arange(0, 128, L1))
    gl.store(o_ptr, 1)


@gluon.jit
def unrounded(o_ptr):
    L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    box = gl.allocate_shared_memory(gl.bfloat16, [128], L)
    box.store(gl.arange(0, 128, L1).to(gl.float32))
    gl.store(o_ptr, 1)


@gluon.jit
def unwritten(o_ptr):
    box = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gl.store(o_ptr + gl.arange(0, 128, L1), box.load(L1))


@gluon.jit
def carried(o_ptr, n):
    """`i` starts as a constant and becomes a register: C division of negatives, `.to`."""
    i = -3
    total = 0
    for _ in range(0, n):
        total += i // 2 + i % 2 + i.to(gl.int64).to(gl.int32)
        i += 1
    gl.store(o_ptr, total)


@gluon.jit
def unmodeled(o_ptr):
    x = gl.histogram(gl.arange(0, 128, L1), 128, layout=L1)
    gl.store(o_ptr + gl.arange(0, 128, L1), x)


@gluon.jit
def relay(flag_ptr, o_ptr, RELAXED: gl.constexpr = False):
    """Program 1 polls a flag in global memory that program 0 raises; RELAXED tells nothing else."""
    SEM: gl.constexpr = "relaxed" if RELAXED else "acq_rel"
    if gl.program_id(0) == 0:
        gl.store(o_ptr, 42)
        gl.atomic_xchg(flag_ptr, 1, sem=SEM)
    else:
        while gl.atomic_add(flag_ptr, 0, sem=SEM) == 0:
            gl.device_print("waiting")
        gl.store(o_ptr + 1, gl.load(o_ptr) + 1)


@gluon.jit
def constant_loop(o_ptr, N: gl.constexpr = 4):
    """Only constants decide this loop, so no register is ever read."""
    while N > 3:
        pass
    gl.store(o_ptr, 1)


@gluon.jit
def filled(o_ptr, SIZE: gl.constexpr, WARPS: gl.constexpr):
    """The sum of SIZE ones, in a layout of WARPS warps."""
    ones = gl.full([SIZE], 1, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.store(o_ptr, gl.sum(ones, 0))


@gluon.jit
def pairs(o_ptr, SAME: gl.constexpr):
    """Two lanes write every element, both of them its number, or each its own."""
    lane = gl.arange(0, 128, L1)
    gl.store(o_ptr + lane // 2, lane // 2 if SAME else lane)
