"""All kernel families, in one table: everything that depends on a family is derived from it.

>>> [family.name for family in families_of(target_by_name("h200"))]
['hopper', 'portable']
"""

from typing import Any

from openmla.planning.blackwell.family import BLACKWELL
from openmla.planning.cdna4.family import CDNA4
from openmla.planning.family import Family, Kernel
from openmla.planning.hopper.family import HOPPER
from openmla.planning.host.family import CPU, REFERENCE
from openmla.planning.portable.family import PORTABLE
from openmla.planning.target import Target, target_by_name
from openmla.problem import Problem

__all__ = ["BACKENDS", "FAMILIES", "families_of", "family_named", "kernel_of", "target_by_name"]

FAMILIES = (REFERENCE, CPU, HOPPER, BLACKWELL, CDNA4, PORTABLE)
"""Best first: a chip's own family before the portable one."""
BACKENDS = ("auto", *(family.name for family in FAMILIES))
_BY_NAME = {family.name: family for family in FAMILIES}


def family_named(name: str) -> Family:
    """The family of a backend that is not "auto"."""
    return _BY_NAME[name]


def families_of(target: Target) -> tuple[Family, ...]:
    """Families that "auto" tries on a chip, best first; the reference is never among them."""
    return tuple(f for f in FAMILIES if f is not REFERENCE and f.runs_on(target))


def kernel_of(backend: str, problem: Problem, config: Any) -> Kernel | None:
    """The kernel that a plan's config is for; None for a config of another family or form."""
    family = _BY_NAME.get(backend)
    return None if family is None else family.kernel_of(problem, config)
