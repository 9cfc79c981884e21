"""A module that stands in for the package `flash_mla`.

    from openmla.compat import stand_in

    stand_in.install()                                  # before an engine imports flash_mla
    from flash_mla import flash_mla_with_kvcache        # openmla's

An engine that imports `flash_mla` then calls openmla, on chips and with head counts that FlashMLA
does not serve. The module has FlashMLA's decode, its sparse prefill and what schedules them.
Its submodule that fuses a layer's norm, rope and quantization with attention, which is for
Blackwell alone, can be imported, as SGLang does on all chips, and refuses to be called. Asked for
another name, a module raises AttributeError, as an older FlashMLA would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from openmla.compat import flash_mla
from openmla.errors import Unsupported

PACKAGE = "flash_mla"
INTERFACE = "flash_mla.flash_mla_interface"
"""Where the package itself defines its calls; some import them from there."""
FUSED = "flash_mla.fused_norm_rope_attn_rope_cast"
FUSED_CALLS = ("prefill", "decode")
PART_FIELDS = 8  # numbers that describe one part of FlashMLA's schedule


def get_mla_decoding_metadata(
    cache_seqlens: Tensor, *_args: object, **_options: object
) -> tuple[Tensor, Tensor]:
    """(schedule, splits) of FlashMLA's kernels before 2026-09-30, for engines that keep them in
    buffers of CUDA graphs: int32 [1, 8] and [requests + 1], zeros that nothing looks at.

    Args:
        cache_seqlens: [requests].
        *_args: not looked at.
        **_options: not looked at.
    """
    schedule = cache_seqlens.new_zeros(1, PART_FIELDS, dtype=torch.int32)
    return schedule, cache_seqlens.new_zeros(len(cache_seqlens) + 1, dtype=torch.int32)


CALLS: dict[str, Any] = {call: getattr(flash_mla, call) for call in flash_mla.__all__}
CALLS["get_mla_decoding_metadata"] = get_mla_decoding_metadata


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
    package, interface = _made(PACKAGE, CALLS), _made(INTERFACE, CALLS)
    fused = _made(FUSED, {call: _refusing(call) for call in FUSED_CALLS})
    package.__path__ = []  # a package, whose submodules are looked up among those imported
    for module in (package, interface, fused):
        sys.modules[module.__name__] = module
    for module in (interface, fused):
        vars(package)[module.__name__.removeprefix(f"{PACKAGE}.")] = module
    return package


def remove() -> None:
    """Undo `install`: the next import looks for the package itself."""
    for name in (PACKAGE, INTERFACE, FUSED):
        if _is_ours(sys.modules.get(name)):
            del sys.modules[name]


def _made(name: str, served: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, __doc__)
    module.__spec__ = ModuleSpec(name, loader=None, origin=__name__)

    def missing(attribute: str) -> NoReturn:
        raise AttributeError(
            f"openmla stands in for {name}, and has no {attribute!r}; it has {', '.join(served)}"
        )

    vars(module).update(served)
    vars(module)["__getattr__"] = missing
    return module


def _refusing(call: str) -> Callable[..., NoReturn]:
    """A call of the fused submodule."""

    def refuse(*_args: object, **_options: object) -> NoReturn:
        raise Unsupported(
            f"{FUSED}.{call}, whose result is quantized for a projection of FP8",
            nearest="flash_mla_with_kvcache, flash_mla_sparse_fwd",
        )

    return refuse


def _is_ours(module: ModuleType | None) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.origin == __name__
