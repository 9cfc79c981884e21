"""All launches by name."""

from sim import cases_blackwell, cases_cdna4, cases_hopper

CASES = {**cases_hopper.CASES, **cases_blackwell.CASES, **cases_cdna4.CASES}
