"""Ask about cases in a child process, so that a crash or a hang is a finding, not the end.

The parent sends one JSON line per case and reads one JSON line per case. When the child dies or
falls silent, the case it had begun is to blame. To be sure, that case is asked again, alone in a
fresh child; another fresh child goes on with the next.

    parent -> child    {"check": "module:function", "options": {…}}      once
    child -> parent    {"ready": true}
    parent -> child    the fields of a case                              for each case
    child -> parent    {"status": "right", "kind": "", "message": "", …}

A check is a function that takes a case and the options and returns such an answer: right, refused
or failed. One that says `fatal` (a CUDA context that no longer works) ends its child.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

import torch

from openmla.lab.testing.case import Case
from openmla.lab.testing.sources import SourcesCase

Answer = dict[str, Any]
AnyCase = Case | SourcesCase
Check = Callable[[Any, dict[str, Any]], Answer]
PUBLIC_CALL = "openmla.lab.testing.memory.poison:run_public"
SECONDS_PER_CASE = 60.0
SECONDS_TO_START = 300.0
"""Importing torch and triton takes seconds, on a busy machine many."""
REMEMBERED = 10
"""Cases before a crash that are named beside it."""


class Death(Exception):
    """A child ended, or had to be ended, before it answered; `kind` is crash or hang."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Stopped(Exception):
    """A child was asked after it had been stopped, or was stopped before it answered."""


class Child:
    """A process that answers cases with one check; it starts when it is first asked."""

    def __init__(
        self, check: str, options: dict[str, Any], seconds: float = SECONDS_PER_CASE
    ) -> None:
        self.check, self.options, self.seconds = check, options, seconds
        self.answered: deque[AnyCase] = deque(maxlen=REMEMBERED)
        """The last cases that the living child answered."""
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[str] | None = None
        self._alone: Child | None = None
        """The child that is asked again about what this one died of."""
        self._stopped = False
        self._starting = threading.Lock()

    def ask(self, case: AnyCase) -> Answer:
        """The answer; raises Death, after which the next case gets a fresh child, or Stopped."""
        self._start()
        answer = self._exchange(case.to_json(), self.seconds)
        if answer.get("fatal"):
            self.end()
            raise Death("crash", answer["message"])
        self.answered.append(case)
        return answer

    def ask_or_blame(self, case: AnyCase) -> Answer:
        """The answer; a death is one too, after the case was asked again alone."""
        try:
            return self.ask(case)
        except Death as death:
            before = [str(other.seed) for other in self.answered]
            kind, message = death.kind, str(death)
        try:
            with self._starting:
                alone = self._alone = Child(self.check, self.options, self.seconds)
                alone._stopped = self._stopped
            answer = alone.ask(case)
            if answer["status"] == "failed":
                return answer
            seeds = ", ".join(before) or "none"
            message += f"; not reproduced alone (seeds before it in that process: {seeds})"
        except Death as again:
            kind, message = again.kind, str(again)
        finally:
            alone.end()
        return {"status": "failed", "kind": kind, "message": message}

    def stop(self) -> None:
        """Kill the process from another thread, for good: whoever waits for it gets Stopped."""
        with self._starting:
            self._stopped = True
            process = self._process  # which its own thread may end meanwhile
            if process is not None:
                process.kill()
            if self._alone is not None:
                self._alone.stop()

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout, self._stderr):
                if stream is not None:
                    stream.close()
        self._process = self._stderr = None

    def _start(self) -> None:
        if self._process is not None:
            return
        self.answered.clear()
        with self._starting:
            if self._stopped:
                raise Stopped
            # A file, not a pipe: nobody reads it before the child is dead, and a full pipe would
            # stop it.
            self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "openmla.lab.testing.isolate"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
            )
        self._exchange({"check": self.check, "options": self.options}, SECONDS_TO_START)

    def _exchange(self, question: dict[str, Any], seconds: float) -> Answer:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        hung = threading.Event()

        def give_up() -> None:
            hung.set()
            process.kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: Answer = json.loads(line)
            return answer
        if self._stopped:
            self.end()
            raise Stopped
        death = Death("hang", f"no answer within {seconds:.0f} s") if hung.is_set() else None
        death = death or self._crash(process.wait())
        self.end()
        raise death

    def _crash(self, code: int) -> Death:
        assert self._stderr is not None
        self._stderr.seek(0)
        last_words = " ".join(self._stderr.read().strip().splitlines()[-1:])
        if code >= 0:
            return Death("crash", f"ended with status {code}: {last_words}")
        name = signal.Signals(-code).name
        outside = ": memory outside a tensor was touched" * (name in ("SIGSEGV", "SIGBUS"))
        return Death("crash", f"killed by {name}{outside or f': {last_words}'}")


def end_all(pool: ThreadPoolExecutor, children: Sequence[Child]) -> None:
    """End children at once, and the threads of a pool that wait for them."""
    for child in children:
        child.stop()
    pool.shutdown(cancel_futures=True)
    for child in children:
        child.end()


def run_guarded(
    cases: Sequence[Case], implementation: str = PUBLIC_CALL
) -> Generator[tuple[Case, str], None, None]:
    """Every case against guard pages, with what went wrong, empty if nothing, in order."""
    child = Child("openmla.lab.testing.memory.guard:check", {"implementation": implementation})
    try:
        for case in cases:
            yield case, child.ask_or_blame(case)["message"]
    finally:
        child.end()


def named(function: str) -> Any:
    """The function called "module:function"."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _decoded(values: dict[str, Any]) -> AnyCase:
    """A case from its fields; one of several sources says of which kinds they are."""
    return SourcesCase.from_json(values) if "kinds" in values else Case.from_json(values)


def _child() -> None:
    """Answer each case with one line of JSON until there are no more."""
    # Ctrl-C reaches the whole group of processes: what it means is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever prints (a compiler, an autotuner) must not print between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)  # the cases are tiny
    request = json.loads(sys.stdin.readline())
    check: Check = named(request["check"])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = check(_decoded(json.loads(line)), request["options"])
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            answer = {"status": "failed", "kind": "error", "message": message}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _child()
