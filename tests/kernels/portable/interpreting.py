"""Parts of the interpreted_*.py scripts, in forks of one process that has Triton's interpreter.

    with Interpreting() as interpreted:
        interpreted("interpreted_indexer", "scores")  # what it printed, line by line

Triton must be imported with TRITON_INTERPRET set, so it is another process; importing takes it two
seconds, and parts are many. A fork shares nothing with another, and one that dies ends alone.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[2]
SCRIPTS = (
    *("interpreted", "interpreted_backward", "interpreted_sparse_backward"),
    *("interpreted_indexer", "interpreted_index_loss"),
)


class Interpreting:
    """The process; it starts when it is first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Interpreting:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.communicate()  # nobody asks any more: it ends

    def __call__(self, script: str, part: str, *numbers: int) -> list[dict[str, Any]]:
        """What a part printed; AssertionError with its last words where it did not end well."""
        process = self._process = self._process or _started()
        assert process.stdin and process.stdout
        with tempfile.TemporaryDirectory() as folder:
            process.stdin.write(json.dumps([script, part, numbers, folder]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer, "the process that runs the parts has ended"
            printed, said = ((Path(folder) / name).read_text() for name in ("out", "err"))
        assert json.loads(answer) == 0, f"status {answer.strip()}: {said[-3000:]}"
        return [json.loads(line) for line in printed.splitlines()]


def _started() -> subprocess.Popen[str]:
    path = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "kernels.portable.interpreting"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(path)},
    )


def _serve() -> None:
    """Answer every line with the status of a fork; the fork itself returns and ends normally."""
    modules = {name: importlib.import_module(f"kernels.portable.{name}") for name in SCRIPTS}
    # Through the buffer of sys.stdin a fork could take lines that are meant for this process.
    with os.fdopen(os.dup(0)) as requests:
        for line in iter(requests.readline, ""):
            script, part, numbers, folder = json.loads(line)
            child = os.fork()
            if not child:
                for number, name in enumerate(("out", "err"), start=1):
                    os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT), number)
                modules[script].main(part, *numbers)
                return
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(json.dumps(status), flush=True)


if __name__ == "__main__":
    _serve()
