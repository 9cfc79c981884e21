"""The simulator's side of the Gluon language: one namespace per module that kernels import.

`NAMESPACES` maps the name of a Triton module to the substitutes for what it defines. The loader
puts them in place of the originals when it runs a kernel.
"""

from __future__ import annotations

from gluon_sim.language import amd, blackwell, core, hopper, shapes
from gluon_sim.language.namespace import Namespace

_GLUON = "triton.experimental.gluon"
_LANG = f"{_GLUON}.language"

gl = Namespace(**shapes.NAMES, **core.NAMES)
gl.nvidia = Namespace(ampere=hopper.AMPERE, hopper=hopper.HOPPER, blackwell=blackwell.BLACKWELL)
gl.amd = amd.AMD

_PDL = Namespace(gdc_wait=core.nothing, gdc_launch_dependents=core.nothing)

NAMESPACES: dict[str, Namespace] = {
    _LANG: gl,
    f"{_LANG}._core": gl,
    f"{_LANG}._standard": gl,
    f"{_LANG}._math": gl,
    f"{_LANG}._layouts": gl,
    "triton.language": gl,
    "triton.language.core": gl,
    "triton.language.math": gl,
    "triton.language.standard": gl,
    "triton.language.extra.cuda": _PDL,
    "triton.language.extra.cuda.gdc": _PDL,
    f"{_LANG}.nvidia": gl.nvidia,
    f"{_LANG}.nvidia.ampere": hopper.AMPERE,
    f"{_LANG}.nvidia.ampere.async_copy": hopper.ASYNC_COPY,
    f"{_LANG}.nvidia.ampere.mbarrier": hopper.MBARRIER,
    f"{_LANG}.nvidia.hopper": hopper.HOPPER,
    f"{_LANG}.nvidia.hopper.tma": hopper.TMA,
    f"{_LANG}.nvidia.hopper.mbarrier": hopper.MBARRIER,
    f"{_LANG}.nvidia.hopper.cluster": hopper.CLUSTER,
    f"{_LANG}.nvidia.blackwell": blackwell.BLACKWELL,
    f"{_LANG}.nvidia.blackwell.tma": blackwell.TMA,
    f"{_LANG}.amd": amd.AMD,
    f"{_LANG}.amd._layouts": amd.AMD,
    f"{_LANG}.amd.hint": amd.HINT,
    f"{_LANG}.amd.warp_pipeline": amd.AMD,
    f"{_LANG}.amd.cdna3": amd.CDNA4,
    f"{_LANG}.amd.cdna4": amd.CDNA4,
    f"{_LANG}.amd.cdna4.async_copy": amd.ASYNC_COPY,
}

__all__ = ["NAMESPACES", "gl"]
