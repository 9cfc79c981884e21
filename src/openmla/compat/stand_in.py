"""A module that stands in for the package `flash_mla`.

    from openmla.compat import stand_in

    stand_in.install()                                  # before an engine imports flash_mla
    from flash_mla import flash_mla_with_kvcache        # openmla's

An engine that imports `flash_mla` then calls openmla, on chips and with head counts that FlashMLA
does not serve. The module has FlashMLA's decode, its sparse prefill and `get_mla_metadata`; asked
for another name, it raises AttributeError, as an older FlashMLA would.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from openmla.compat import flash_mla
from openmla.errors import Unsupported

PACKAGE = "flash_mla"
INTERFACE = "flash_mla.flash_mla_interface"
"""Where the package itself defines its calls; some import them from there."""


def install() -> ModuleType:
    """Make `import flash_mla` give openmla's calls, in this process; safe to call twice.

    Raises:
        Unsupported: FlashMLA itself was imported before, and may be in use.
    """
    known = sys.modules.get(PACKAGE)
    if known is not None:
        if not _is_ours(known):
            raise Unsupported(
                f"{PACKAGE} was imported before, from {getattr(known, '__file__', 'elsewhere')}",
                nearest="install() before whatever imports it",
            )
        return known
    package, interface = _made(PACKAGE), _made(INTERFACE)
    package.__path__ = []  # a package, whose submodules are looked up among those imported
    vars(package)["flash_mla_interface"] = interface
    sys.modules[PACKAGE], sys.modules[INTERFACE] = package, interface
    return package


def remove() -> None:
    """Undo `install`: the next import looks for the package itself."""
    for name in (PACKAGE, INTERFACE):
        if _is_ours(sys.modules.get(name)):
            del sys.modules[name]


def _made(name: str) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, loader=None, origin=__name__)

    def missing(attribute: str) -> NoReturn:
        served = ", ".join(flash_mla.__all__)
        raise AttributeError(
            f"openmla stands in for {name}, and has no {attribute!r}; it has {served}"
        )

    vars(module).update({call: getattr(flash_mla, call) for call in flash_mla.__all__})
    vars(module)["__getattr__"] = missing
    return module


def _is_ours(module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.origin == __name__
