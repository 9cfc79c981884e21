"""What depends on the version of Triton: run with every version that a torch of ours brings.

`make test` runs these in its own environment and again with every other Triton in front of it.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings

import pytest
import triton

import gluon_sim
import openmla
from openmla.kernels import prepared
from openmla.kernels.gluon import compat
from openmla.kernels.triton_version import TRITON
from openmla.lab.compiling import table
from openmla.lab.compiling.jobs import CompileJob, captured_output, compile_job, specialized

pytestmark = pytest.mark.tritons
# Engines that the environment of these tests does not have.
OPTIONAL = ("vllm",)


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
    """The first job of every kernel for every target."""
    found: dict[tuple[str, str, str], CompileJob] = {}
    for job in table.discover():
        kernel = job.call.kernel
        found.setdefault((kernel.__module__, kernel.__name__, job.target), job)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("job", one_of_every_kind(), ids=lambda job: job.label)
def test_one_job_of_every_kernel_kind_compiles(job: CompileJob) -> None:
    """By the compiler, not from a report; and no dependency warns whoever calls."""
    with warnings.catch_warnings(record=True) as seen, captured_output() as log:
        warnings.simplefilter("always")
        report = compile_job(job, use_cache=False)
    assert not report.error, report.error
    assert [str(one.message) for one in seen] == [] and "warn" not in log.text.lower()


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
