"""One parallel region per call: threads take whole pieces of work, each on one core.

torch's operators divide themselves: every product and every exponential is a parallel region with a
barrier at its end. Where cores are shared, a barrier waits for whichever thread the system has put
aside, and a call of a thousand small regions takes a hundred times as long as on one core. So the
kernels hand out pieces that no thread has to wait for (a few tokens, a tile, a panel), and inside
of a piece torch is told to use one thread:

    caller    piece 0 ---- piece 2 ---- piece 3 ---- ...        torch.set_num_threads(1), restored
    helper    piece 1 ----------------- piece 4 ---- ...        one thread, always

Which thread computes a piece, and how many pieces there are, does not change its bits.

torch keeps the number of threads per thread, but a thread that asks for the first time gets the
number that was set last. Another library's thread that calls torch for the first time during a call
of ours therefore stays with one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from openmla.kernels.cpu.workspace import Workspace

Item = TypeVar("Item")
Result = TypeVar("Result")

# A second thread pays from about a millisecond of work on; a core does 30 to 100 of these a second
# and more.
FLOPS_PER_THREAD = 2e7


def divide(
    work: Callable[[Workspace, Item], Result], items: Sequence[Item], flops: float
) -> list[Result]:
    """`work` of every item, in any order and on several threads; what it returns, in order."""
    results: list[Result | None] = [None] * len(items)
    left: SimpleQueue[int] = SimpleQueue()
    for number in range(len(items)):
        left.put(number)
    inference = torch.is_inference_mode_enabled()

    def drain() -> None:
        scratch = Workspace()
        with torch.inference_mode() if inference else torch.no_grad():
            while True:
                try:
                    number = left.get_nowait()
                except Empty:
                    return
                try:
                    results[number] = work(scratch, items[number])
                except BaseException:
                    with suppress(Empty):  # the other pieces are not wanted any more
                        while True:
                            left.get_nowait()
                    raise

    def help_out() -> None:
        with one_thread():
            drain()

    threads = threads_for(len(items), flops)
    with one_thread():
        helpers: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread can be had: at exit, or past a limit
                for _ in range(threads - 1):
                    helpers.append(_helpers().submit(help_out))
            drain()
        finally:
            # A helper that never began, because another call has all of them, is not waited for.
            begun = [helper for helper in helpers if not helper.cancel()]
            failed = [error for helper in begun if (error := helper.exception())]
    if failed:
        raise failed[0]
    return results  # type: ignore[return-value]


def threads_for(items: int, flops: float) -> int:
    """How many threads a call gets: no more than torch has, cores there are, or the work needs.

    >>> threads_for(items=1, flops=1e12), threads_for(items=1000, flops=1e6)
    (1, 1)
    """
    needed = min(items, int(flops / FLOPS_PER_THREAD))
    if needed <= 1:
        return 1
    return max(min(needed, torch.get_num_threads(), _cores()), 1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside of it, torch's operators of this thread do not divide themselves."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    """Cores that new threads of this one may run on: one, where an engine has bound it to one."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _helpers() -> ThreadPoolExecutor:
    """Threads are started when they are first needed, and stay."""
    return ThreadPoolExecutor(max(os.cpu_count() or 1, 1), "openmla-cpu")


# The threads of a process do not follow it into its fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_helpers.cache_clear)
