"""Tell which compile jobs a change of the source leaves alone, without compiling them.

A job's key is a hash of its kernel's source, so a renaming changes it although the compiler sees
the same program. What the compiler sees is Triton's intermediate code after inlining: one that is
equal before and after a change gives the same machine code, and its report in tests/compiled stays
true.

    python tests/lab/compiling/same_code.py write before.json   # in the checkout before a change
    python tests/lab/compiling/same_code.py write after.json    # in the one after it
    python tests/lab/compiling/same_code.py rekey before.json after.json   # new keys

`rekey` says which jobs differ, are new or are gone, and leaves their reports to `make compile-all`.
A job that is labeled anew, because its kernel was renamed, is found by its code.
Put another Triton in front (PYTHONPATH=.tritons/3.9.0) and repeat: reports are of one Triton each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton

from openmla.lab.compiling import store, table
from openmla.lab.compiling.jobs import CompileJob, build, job_key

ROOT = Path(__file__).resolve().parents[3]


class Code(NamedTuple):
    """What is known of a job before it is compiled."""

    key: str
    intermediate: str
    """A hash of the intermediate code; the error, if there is none."""


class _Seen(BaseException):
    """Ends a compilation once the intermediate code is there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


@contextmanager
def stopping_early() -> Iterator[None]:
    """Inside, compiling a kernel ends with `_Seen`, whose text is its intermediate code."""
    from triton.compiler.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kinds = [ASTSource, GluonASTSource]
    before = [kind.__dict__["make_ir"] for kind in kinds]

    def stopped(make_ir: Any) -> Any:
        def made(*args: Any, **named: Any) -> Any:
            raise _Seen(inlined(make_ir(*args, **named)))

        return made

    for kind, make_ir in zip(kinds, before, strict=True):
        kind.make_ir = stopped(make_ir)
    try:
        yield
    finally:
        for kind, make_ir in zip(kinds, before, strict=True):
            kind.make_ir = make_ir


def inlined(module: Any) -> str:
    """A module's text without names of functions, of values and of source lines.

    What is not inlined is the kernel itself, so one name stands for all.
    """
    from triton._C.libtriton import ir, passes

    manager = ir.pass_manager(module.context)
    passes.gluon.add_inliner(manager)
    passes.gluon.add_canonicalizer(manager)
    passes.common.add_sccp(manager)
    passes.common.add_cse(manager)
    passes.gluon.add_canonicalizer(manager)
    passes.common.add_symbol_dce(manager)
    manager.run(module, "inlined")
    return re.sub(r"@\w+", "@kernel", str(module.str_nodebug()))


def intermediate_code(job: CompileJob) -> str:
    """The intermediate code of a job; nothing is compiled."""
    job.call.kernel.device_caches.clear()  # what this process compiled before has no code
    try:
        with stopping_early():
            build(job)
    except _Seen as seen:
        return seen.text
    raise AssertionError(f"{job.label} was compiled without intermediate code")


def code_of(number: int) -> tuple[str, Code]:
    """The label of a job, by its number in the table, and its code."""
    job = _jobs()[number]
    code = hashlib.sha256(intermediate_code(job).encode()).hexdigest()
    return job.label, Code(job_key(job), code)


_found: list[Any] = []


def _jobs() -> list[Any]:
    if not _found:
        _found.extend(table.discover())
    return _found


def write(path: Path, only: str, processes: int) -> None:
    """The code of every job with `only` in its label."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # what was compiled before has no code
    numbers = [i for i, job in enumerate(_jobs()) if only in job.label]
    with ProcessPoolExecutor(processes) as pool:
        found = dict(pool.map(code_of, numbers))
    told = {label: code._asdict() for label, code in sorted(found.items())}
    path.write_text(json.dumps({"triton": triton.__version__, "jobs": told}, indent=1) + "\n")
    print(f"{len(found)} jobs with Triton {triton.__version__}")


def rekey(before: Path, after: Path) -> int:
    """Give the reports of equal code their new keys; the number of jobs that differ."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    if old["triton"] != new["triton"]:
        sys.exit(f"of two Tritons: {old['triton']} and {new['triton']}")
    version, changed = new["triton"], []
    os.environ["OPENMLA_COMPILE_CACHE"] = str(ROOT / "tests" / "compiled")
    gone = {label: code for label, code in old["jobs"].items() if label not in new["jobs"]}
    by_code = {code["intermediate"]: label for label, code in gone.items()}
    for label, code in new["jobs"].items():
        was = label if label in old["jobs"] else by_code.get(code["intermediate"])
        if was is None:
            changed.append(f"new: {label}")
        elif old["jobs"][was]["intermediate"] != code["intermediate"]:
            changed.append(f"differs: {label}")
        elif (was, old["jobs"][was]["key"]) != (label, code["key"]):
            kept = store.stored(was, version, old["jobs"][was]["key"])
            if kept is None:
                changed.append(f"had no report: {label}")
            else:
                store.keep(label, version, code["key"], kept)
    found = {code["intermediate"] for code in new["jobs"].values()}
    renamed = [label for label, code in gone.items() if code["intermediate"] in found]
    forget(renamed, version)
    changed += [f"gone: {label}" for label in gone if label not in renamed]
    print("\n".join([*changed, f"{len(new['jobs'])} jobs, {len(changed)} of them not the same"]))
    return len(changed)


def forget(labels: Collection[str], version: str) -> None:
    """Remove the reports of these jobs, and no others."""
    for path in {store.file_of(label, version) for label in labels}:
        store.prune([label for label in store.read(path) if label not in labels], version)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--only", default="", help="jobs with this text in their label")
    writing.add_argument("--jobs", type=int, default=2, help="processes")
    keying = commands.add_parser("rekey")
    keying.add_argument("before", type=Path)
    keying.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "write":
        write(options.file, options.only, options.jobs)
        return 0
    return 1 if rekey(options.before, options.after) else 0


if __name__ == "__main__":
    sys.exit(main())
