"""All launches by name."""

from openmla.aot import CompileJob
from sim import cases_blackwell, cases_cdna4, cases_hopper

CASES = {**cases_hopper.CASES, **cases_blackwell.CASES, **cases_cdna4.CASES}


def COMPILE_JOBS() -> list[CompileJob]:
    """Every launch as a compile job for its target."""
    return [make().job(name) for name, make in CASES.items()]
