"""What depends on the version of Triton: run with every version that a torch of ours brings.

`make test` runs these in its own environment and again with every other Triton in front of it.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from pathlib import Path

import pytest
import triton

import gluon_sim
import openmla
from lab.compiling.same_code import intermediate_code
from openmla.kernels import prepared
from openmla.kernels.gluon import compat
from openmla.kernels.triton_version import TRITON
from openmla.lab.compiling import table
from openmla.lab.compiling.jobs import CompileJob, captured_output, compile_job, specialized

pytestmark = pytest.mark.tritons
# Engines that the environment of these tests does not have.
OPTIONAL = ("vllm", "sglang")


def modules() -> list[str]:
    found = [
        module.name
        for package in (openmla, gluon_sim)
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [name for name in found if not name.endswith("__main__")]


@pytest.mark.parametrize("name", modules())
def test_every_module_imports(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert (error.name or "").split(".")[0] in OPTIONAL


def one_of_every_kind() -> list[CompileJob]:
    """The first job of every kernel for every target; of a merge, of few ranges and of many, which
    have layouts of their own."""
    found: dict[tuple[str, str, str, int], CompileJob] = {}
    for job in table.discover():
        kernel, ranges = job.call.kernel, job.call.arguments.get("TOGETHER", 0)
        found.setdefault((kernel.__module__, kernel.__name__, job.target, ranges), job)
    return list(found.values())


def dense_of_every_family() -> list[CompileJob]:
    return [job for job in one_of_every_kind() if job.call.kernel.__name__ == "dense_kernel"]


def quiet(seen: list[warnings.WarningMessage], log: str) -> bool:
    """No dependency warns whoever calls."""
    return not seen and "warn" not in log.lower()


@pytest.mark.parametrize("job", one_of_every_kind(), ids=lambda job: job.label)
def test_one_job_of_every_kernel_kind_is_lowered(
    job: CompileJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To Triton's intermediate code, where names of Gluon that are gone or changed show.

    What the compiler makes of it is in the reports of tests/compiled, by a hash of the source.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # what was compiled before has no code
    with warnings.catch_warnings(record=True) as seen, captured_output() as log:
        warnings.simplefilter("always")
        assert intermediate_code(job)
    assert quiet(seen, log.text), log.text


@pytest.mark.slow
@pytest.mark.parametrize("job", dense_of_every_family(), ids=lambda job: job.label)
def test_the_dense_kernel_of_every_family_compiles(job: CompileJob) -> None:
    """To machine code of every target, by the compiler and not from a report."""
    with warnings.catch_warnings(record=True) as seen, captured_output() as log:
        warnings.simplefilter("always")
        report = compile_job(job, use_cache=False)
    assert not report.error, report.error
    assert quiet(seen, log.text), log.text


def test_every_launch_says_what_it_relies_on() -> None:
    """Defaults are Triton's to change: 3.10 no longer fuses products with sums unless asked."""
    for job in table.discover():
        options = specialized(job).options
        assert options["enable_fp_fusion"] is True, job.label
        assert "num_warps" in job.call.arguments, job.label


def test_this_version_is_one_that_cached_launches_were_read_for() -> None:
    assert TRITON in prepared.CHECKED_TRITONS
    assert triton.__version__.startswith(".".join(str(n) for n in TRITON))


def test_names_are_looked_up_one_by_one() -> None:
    """A Triton that has renamed some calls and not others: all are found."""

    class Half:
        async_load = "new"
        async_copy_shared_to_global = "old"

    assert compat.renamed(Half, "async_load", "async_copy_global_to_shared") == "new"
    assert compat.renamed(Half, "async_store", "async_copy_shared_to_global") == "old"
    with pytest.raises(compat.MissingFromTriton, match="Half has no barrier or thread_barrier"):
        compat.renamed(Half, "barrier", "thread_barrier")
