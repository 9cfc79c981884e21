"""Imports point one way only: from the public calls down to the errors.

    errors < arithmetic < modular < problem < sequences < planning < plans of kernels < registry
           < operands < kernels < … < cli

A module may import from its own group and from lower ones, inside functions too. The plan of a
kernel lies in the kernel's folder and is as pure as the planner: neither torch nor Triton.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from repository import package_source
from repository.package_source import imports, modules

PLANS, REGISTRY = "plans of kernels", "registry of families"
PLAN_FILES = {"plan", "resources", "family", "chip", "lds", "tuned"}
"""Modules below openmla.kernels that plan: integers only."""
IN_REGISTRY = {"planning", "planning.registry", "planning.budget"}
"""What knows all families; `openmla.planning` itself offers it."""
# Bottom to top. A name stands for a module or for a whole package; every module of the indexer and
# of gradients has a place beside that of attention which does the same.
LAYERS: list[set[str]] = [
    {"errors", "formats"},
    {"arithmetic"},
    {"modular"},  # the five systems know nothing of openmla's own plans
    {"records"},
    {"problem"},
    {"indexer", "indexer.problem", "indexer.loss_problem", "backward", "backward.problem"},
    {"sequences", "block_scaling", "cache", "indexer.cache", "kept"},
    {"planning"},
    {PLANS},
    {REGISTRY},
    {"sources"},
    {
        "operands",
        "indexer.operands",
        "indexer.loss_operands",
        "indexer.windows",
        "backward.operands",
        "backward.sparse_operands",
    },
    {"kernels"},
    {
        "reference",
        "indexer.reference",
        "indexer.groups_reference",
        "indexer.loss_reference",
        "backward.reference",
        "backward.sparse_reference",
    },
    {"checks", "indexer.checks"},
    {"dispatch"},
    {"cached"},
    {"ops", "indexer.ops", "indexer.loss_ops", "backward.ops", "backward.sparse_ops"},
    {
        "api",
        "indexer.api",
        "indexer.loss_api",
        "backward.given",
        "compressor",
        "indexer.groups",
    },
    {""},  # openmla/__init__.py: the public names
    {"compat", "distributed"},
    {"aot"},
    {"nn"},
    {"integrations"},
    {"explain"},
    {"lab"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PURE = {"errors", "formats", "arithmetic", "modular", "records", "problem", "planning"}
PURE |= {PLANS, REGISTRY, "indexer", "indexer.problem", "indexer.loss_problem"}
PURE |= {"backward", "backward.problem"}
HEAVY = ("triton", "typer", "rich", "numpy", "matplotlib", "transformers", "vllm", "sglang")


def group(module: str) -> str:
    """The module itself or the package around it that LAYERS names."""
    head, _, rest = module.partition(".")
    if module in IN_REGISTRY:
        return REGISTRY
    if head == "kernels" and PLAN_FILES & set(rest.split(".")):
        return PLANS
    two = f"{head}.{rest.split('.')[0]}"
    return two if two in LEVEL else head


def below_openmla(imported: str) -> str | None:
    """ "openmla.planning.target" -> "planning.target"; None for other packages."""
    if imported == "openmla":
        return ""
    return imported.removeprefix("openmla.") if imported.startswith("openmla.") else None


def upward(module: str, imported: Iterable[tuple[str, int]]) -> list[str]:
    """The imports that a module of this name must not have."""
    wrong = []
    for name, line in imported:
        target = below_openmla(name)
        if target is not None and LEVEL[group(target)] > LEVEL[group(module)]:
            wrong.append(f"openmla.{module}, line {line}: {name}")
    return wrong


def foreign_kernels(module: str, imported: Iterable[tuple[str, int]]) -> list[str]:
    """Imports of the reference or of another target's kernels by a kernel module."""
    families = {m.split(".")[1] for m in modules() if m.startswith("kernels.") and m.count(".") > 1}
    families -= {"gluon"}  # what Gluon kernels of all families share
    wrong = []
    for name, line in imported:
        package, _, rest = (below_openmla(name) or "").partition(".")
        family = rest.split(".")[0]
        foreign = package == "kernels" and family in families - {module.split(".")[1]}
        if package == "reference" or (foreign and module != "kernels.launch"):
            wrong.append(f"openmla.{module}, line {line}: {name}")
    return wrong


def test_every_module_has_a_place():
    unplaced = sorted({group(name) for name in modules()} - set(LEVEL))
    assert unplaced == [], "say in LAYERS where these belong"


def test_imports_point_downwards():
    assert [wrong for module in modules() for wrong in upward(module, imports(module))] == []


def test_kernels_know_neither_the_reference_nor_each_other():
    kernels = [module for module in modules() if module.startswith("kernels.")]
    assert [wrong for m in kernels for wrong in foreign_kernels(m, imports(m))] == []


def test_planning_needs_neither_torch_nor_triton():
    found = [
        f"openmla.{module}, line {line}: {name}"
        for module in modules()
        if group(module) in PURE
        for name, line in imports(module, module_level_only=True)
        if name.split(".")[0] in ("torch", "triton")
    ]
    assert found == []


def test_importing_openmla_imports_nothing_heavy_besides_torch():
    program = (
        "import sys, torch; before = set(sys.modules); import openmla; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) & set(HEAVY) == set()


def test_importing_the_planner_does_not_import_torch():
    """`openmla/__init__.py` offers the calls, so the pure modules are loaded by themselves."""
    pure = [m for m in modules() if group(m) in PURE]
    names = ", ".join(repr(f"openmla.{m}") for m in pure)
    program = (
        "import importlib, sys, types; package = types.ModuleType('openmla'); "
        f"package.__path__ = [{str(package_source.PACKAGE)!r}]; sys.modules['openmla'] = package; "
        f"[importlib.import_module(m) for m in ({names},)]; "
        "print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


def test_the_simulator_knows_nothing_of_openmla():
    folder = package_source.ROOT / "gluon-sim"
    files = [p for kind in ("py", "md", "toml") for p in folder.rglob(f"*.{kind}")]
    assert len(files) > 60
    assert [str(p) for p in files if "openmla" in p.read_text().lower()] == []


def test_the_reader_of_imports_sees_every_kind():
    """A check of the checker: one import of each kind that the package has."""
    launch = {name for name, _ in imports("kernels.launch")}
    assert "openmla.kernels.portable.cache_ops" in launch  # inside a function
    assert "openmla.planning" in launch
    outside = {name for name, _ in imports("kernels.launch", module_level_only=True)}
    assert "openmla.kernels.cpu.dense" not in outside
    assert {"openmla.checks", "openmla.ops"} <= {name for name, _ in imports("api.attention")}


def test_planted_imports_are_caught():
    """Another check of the checker."""
    assert upward("planning.target", [("openmla.api", 3)]) != []
    assert upward("checks", [("openmla", 3)]) != []
    assert upward("modular.blackwell.fa4", [("openmla.planning.family", 3)]) != []
    assert upward("api", [("openmla.checks", 3), ("torch", 4), ("openmla.api", 5)]) == []
    assert foreign_kernels("kernels.hopper.dense", [("openmla.kernels.cpu.dense", 3)]) != []
    assert foreign_kernels("kernels.cpu.dense", [("openmla.reference", 3)]) != []
    assert foreign_kernels("kernels.cpu.dense", [("openmla.kernels.cpu.workspace", 3)]) == []
