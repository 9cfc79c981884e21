"""All launches by name."""

import cases_blackwell
import cases_cdna4
import cases_hopper
from openmla.aot.jobs import CompileJob

CASES = {**cases_hopper.CASES, **cases_blackwell.CASES, **cases_cdna4.CASES}


def COMPILE_JOBS() -> list[CompileJob]:
    """Every launch as a compile job for its target."""
    launches = {name: make() for name, make in CASES.items()}
    return [launch.job(name) for name, launch in launches.items() if launch.compiles]
