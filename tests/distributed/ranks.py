"""Processes that are the ranks of a gloo group, kept for many checks: starting them takes seconds.

>>> with Ranks(2) as ranks:                        # doctest: +SKIP
...     ranks.run(on_ranks.gathered, "zigzag")     # what rank 0 returned, what rank 1 returned
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

IMPORTED = ("torch", "torch.distributed", "openmla", "openmla.distributed")
PATIENCE = 60  # seconds for an answer, on a machine that is busy with other tests


class Ranks:
    """`world` processes that run the same function, each as a rank of one group."""

    def __init__(self, world: int) -> None:
        self.world = world

    def __enter__(self) -> Ranks:
        # Forks of a process that has imported what takes them seconds, and done nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(IMPORTED))
        self.folder = tempfile.TemporaryDirectory()
        meeting = f"file://{self.folder.name}/store"
        self.ends, self.processes = [], []
        for rank in range(self.world):
            here, there = context.Pipe()
            arguments = (rank, self.world, meeting, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()  # a rank whose pipe is closed ends
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self.folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(rank, world, *arguments) on every rank; raises what any of them raised."""
        answers = self.outcomes(function, *arguments)
        wrong = [f"rank {i}:\n{answer}" for i, (fine, answer) in enumerate(answers) if not fine]
        assert not wrong, "\n".join(wrong)
        return [answer for _, answer in answers]

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """(True, its result) or (False, its traceback) of every rank; a dead one is (False, "")."""
        for end in self.ends:
            end.send((function, arguments))
        return [self._answer(end) for end in self.ends]

    def _answer(self, end: Connection) -> tuple[bool, Any]:
        assert end.poll(PATIENCE), f"no answer within {PATIENCE} s"
        try:
            return end.recv()
        except EOFError:
            return False, ""


def _serve(rank: int, world: int, meeting: str, orders: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", meeting, patience, world_size=world, rank=rank)
    while True:
        try:
            function, arguments = orders.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            orders.send((True, function(rank, world, *arguments)))
        except Exception:
            orders.send((False, traceback.format_exc()))
    os._exit(0)  # peers may be gone: leaving a group properly would wait for them
