"""Launches that overlap: each writes, waits, reads or lets the next one begin, as its flags say.

The flags of `step` are what a program does in order: "release" (griddepcontrol.launch_dependents),
"wait" (griddepcontrol.wait); then `out = x + 1`. In `step_of_partitions` a worker waits, and the
default partition reads after the worker has told it, or (not TOLD) without hearing of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from toys.compat import thread_barrier


@gluon.jit
def release():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;",
        "=r,~{memory}",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_one(x_ptr, out_ptr, BLOCK: gl.constexpr):
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(out_ptr + i, gl.load(x_ptr + i) + 1)


@gluon.jit
def step(x_ptr, out_ptr, BLOCK: gl.constexpr, FLAGS: gl.constexpr):
    for i in gl.static_range(len(FLAGS)):
        if FLAGS[i] == "release":
            release()
        else:
            wait()
    add_one(x_ptr, out_ptr, BLOCK)


@gluon.jit
def store_what_is_told(x_ptr, out_ptr, told, BLOCK: gl.constexpr, TOLD: gl.constexpr):
    if TOLD:
        mbarrier.wait(told, 0)
    add_one(x_ptr, out_ptr, BLOCK)


@gluon.jit
def wait_and_tell(told):
    wait()
    mbarrier.arrive(told, count=1)


@gluon.jit
def step_of_partitions(x_ptr, out_ptr, BLOCK: gl.constexpr, TOLD: gl.constexpr):
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    thread_barrier()
    gl.warp_specialize(
        [(store_what_is_told, (x_ptr, out_ptr, told, BLOCK, TOLD)), (wait_and_tell, (told,))],
        [1],
        [40],
    )


@gluon.jit
def all_write_the_first(out_ptr, ATOMIC: gl.constexpr):
    if ATOMIC:
        gl.atomic_add(out_ptr, 1, sem="relaxed")
    else:
        gl.store(out_ptr, gl.program_id(0))


@gluon.jit
def all_read_one_writes(x_ptr, out_ptr, WRITER: gl.constexpr):
    value = gl.load(x_ptr)
    gl.store(out_ptr + gl.program_id(0), value)
    if gl.program_id(0) == WRITER:
        gl.store(x_ptr, value + 1)
