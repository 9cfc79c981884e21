"""openmla enters vLLM's registries, or says in one line why not; it never ends an engine."""

from __future__ import annotations

import logging
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from enum import Enum
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest

from integrations.vllm import fake_vllm
from openmla.compat import flash_mla
from openmla.integrations import plugin
from openmla.integrations.vllm import platform, register, registration
from openmla.integrations.vllm.registration import SEAMS
from repository.package_source import ROOT, imports, modules

PREFILL, ATTENTION = SEAMS["prefill"].module, SEAMS["attention"].module
OTHERS = "somebody.elses.Backend"
LOADED = ("prefill", "attention", "sparse", "indexer", "cpu")
VLLM_LOADS = {f"integrations.vllm.{name}" for name in LOADED}
CALLS = registration.FLASH_MLA_CALLS
LAYER = "vllm.models.deepseek_v4.nvidia.flashmla"
OPS, MODEL = "vllm.model_executor.custom_op", "vllm.model_executor.models.deepseek_v2"


def registries(vllm: dict[str, dict[str, Any]]) -> tuple[fake_vllm.Registry, fake_vllm.Registry]:
    return vllm[PREFILL]["MLAPrefillBackendEnum"], vllm[ATTENTION]["AttentionBackendEnum"]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in found)
    return found


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("OPENMLA_VLLM_CPU", raising=False)
    monkeypatch.delenv("OPENMLA_VLLM_CUSTOM", raising=False)
    monkeypatch.delenv("OPENMLA_VLLM_INDEXER", raising=False)
    monkeypatch.delenv("OPENMLA_VLLM_FLASHMLA", raising=False)
    monkeypatch.setattr(registration, "_as_custom", set())
    caplog.set_level(logging.INFO)


def test_the_three_backends_are_offered_once_however_often_it_is_called(
    caplog: pytest.LogCaptureFixture,
):
    with fake_vllm.installed() as vllm:
        register()
        register()
        prefill, attention = registries(vllm)
        assert prefill["OPENMLA"].get_path() == SEAMS["prefill"].backend
        assert attention["OPENMLA"].get_path() == SEAMS["attention"].backend
        assert attention["OPENMLA_SPARSE"].get_path() == SEAMS["sparse"].backend
        assert not prefill["CPU"].is_overridden()
        assert not attention["CPU_MLA"].is_overridden()
    assert lines(caplog) == []


@pytest.mark.parametrize("name", ["prefill", "attention"])
def test_on_a_cpu_one_member_is_replaced_when_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", name)
    with fake_vllm.installed() as vllm:
        register()
        register()
        members = dict(zip(("prefill", "attention"), registries(vllm), strict=True))
        for other, registry in members.items():
            member = registry[SEAMS[other].cpu_member]
            assert member.is_overridden() == (other == name)
            assert (member.get_path() == SEAMS[name].backend) == (other == name)
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("wish", "missing"),
    [
        ("prefill", "vllm.v1.attention.backends.mla.prefill.base"),
        ("attention", "vllm.model_executor.layers.attention.mla_attention:split_kv_b_proj"),
        ("sparse", "vllm.platforms.cpu"),
    ],
)
def test_on_a_cpu_no_class_is_named_that_this_vllm_cannot_load(
    wish: str, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """vLLM loads what it is named, later and with nobody to catch what that raises."""
    monkeypatch.setenv("OPENMLA_VLLM_CPU", wish)
    with fake_vllm.installed(without=(missing,)) as vllm:
        assert platform() is None
        if wish != "sparse":
            register()
            [registry] = [r for r in registries(vllm) if SEAMS[wish].cpu_member in r.__members__]
            assert not registry[SEAMS[wish].cpu_member].is_overridden()
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_VLLM_CPU={wish} has no effect: ")
    assert line.endswith("; vLLM 0.32 has it")


def test_another_plug_in_of_that_name_is_left_alone(caplog: pytest.LogCaptureFixture):
    with fake_vllm.installed() as vllm:
        prefill, attention = registries(vllm)
        prefill.add("OPENMLA", OTHERS)
        register()
        assert prefill["OPENMLA"].get_path() == OTHERS
        assert attention["OPENMLA"].get_path() == SEAMS["attention"].backend
    [line] = lines(caplog)
    assert line.startswith("openmla: no backend OPENMLA: another plug-in")
    assert OTHERS in line


def test_another_plug_in_on_the_cpu_member_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "prefill")
    with fake_vllm.installed() as vllm:
        prefill, _ = registries(vllm)
        prefill.add(prefill["CPU"], OTHERS)
        register()
        assert prefill["CPU"].get_path() == OTHERS
    [line] = lines(caplog)
    assert "OPENMLA_VLLM_CPU=prefill has no effect" in line
    assert OTHERS in line


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        (PREFILL, 1),
        (f"{PREFILL}:register_mla_prefill_backend", 1),
        (f"{PREFILL}:MLAPrefillBackendEnum", 1),
        (ATTENTION, 2),
        (f"{ATTENTION}:register_backend", 2),
    ],
)
def test_an_old_vllm_costs_one_line_per_backend(
    missing: str, lost: int, caplog: pytest.LogCaptureFixture
):
    with fake_vllm.installed(without=(missing,)) as vllm:
        register()
        for seam in SEAMS.values():
            registry = vllm.get(seam.module, {}).get(seam.members)
            offered = registry is not None and seam.name in registry.__members__
            assert offered != (seam.module == missing.partition(":")[0])
    assert len(lines(caplog)) == lost
    assert all("vLLM 0.32 has it" in line for line in lines(caplog))


def test_a_vllm_that_takes_names_for_members_is_noticed(caplog: pytest.LogCaptureFixture):
    with fake_vllm.installed() as vllm:
        vllm[PREFILL]["register_mla_prefill_backend"] = lambda backend, path: None
        sys.modules[PREFILL].register_mla_prefill_backend = lambda backend, path: None
        register()
    assert lines(caplog) == [
        "openmla: no backend OPENMLA: this vLLM takes no new names, vLLM 0.32 does"
    ]


class OlderRegistry(fake_vllm.Registry):
    """vLLM 0.16 to 0.31: a name is a key like a member, and CUSTOM is nobody's at first."""

    def __init__(self, **paths: str) -> None:
        super().__init__(**paths, CUSTOM="")

    def add(self, backend: Any, class_path: str | None = None) -> None:
        if not isinstance(backend, str):
            backend.override = class_path or ""


@pytest.fixture
def older() -> Iterator[dict[str, dict[str, Any]]]:
    with fake_vllm.installed() as vllm:
        for seam in SEAMS.values():
            registry = OlderRegistry(CPU="vllm.CPU", CPU_MLA="vllm.CPU_MLA")
            for names in (vllm[seam.module], vars(sys.modules[seam.module])):
                names.update({seam.members: registry, seam.add: registry.add})
        yield vllm


def test_an_older_vllm_hears_of_custom(older: Any, caplog: pytest.LogCaptureFixture):
    register()
    said = "this vLLM takes no new names, vLLM 0.32 does; OPENMLA_VLLM_CUSTOM="
    assert lines(caplog) == [
        f"openmla: no backend {seam.name}: {said}{key} asks for CUSTOM"
        for key, seam in SEAMS.items()
    ]
    assert not any(r["CUSTOM"].is_overridden() for r in registries(older))


def test_custom_is_taken_in_both_registries_when_asked_for(
    older: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CUSTOM", "prefill, attention")
    register()
    register()
    for key, registry in zip(("prefill", "attention"), registries(older), strict=True):
        assert registry["CUSTOM"].get_path() == SEAMS[key].backend
    from openmla.integrations.vllm.attention import OpenMLABackend
    from openmla.integrations.vllm.prefill import OpenMLAPrefillBackend

    # vLLM looks a backend's own name up in its registry.
    assert OpenMLABackend.get_name() == OpenMLAPrefillBackend.get_name() == "CUSTOM"
    assert [line.partition(":")[0] for line in lines(caplog)] == ["openmla"] * 2
    assert all("no backend OPENMLA_SPARSE" in line for line in lines(caplog))


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("yes", "expected prefill, attention, sparse"),
        ("attention", "another plug-in has taken CUSTOM, for somebody.elses.Backend"),
        ("sparse", "another plug-in has taken CUSTOM, for openmla.integrations.vllm.attention."),
        ("prefill", "ModuleNotFoundError: "),
    ],
)
def test_custom_that_cannot_be_had_is_one_line(
    wish: str,
    reason: str,
    older: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    prefill, attention = registries(older)
    if wish in ("attention", "sparse"):
        path = OTHERS if wish == "attention" else SEAMS["attention"].backend
        attention.add(attention["CUSTOM"], path)
    if wish == "prefill":  # a vLLM whose classes are others
        monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.prefill.base", None)
    monkeypatch.setenv("OPENMLA_VLLM_CUSTOM", wish)
    register()
    [line] = [x for x in lines(caplog) if x.startswith("openmla: OPENMLA_VLLM_CUSTOM")]
    assert line.startswith(f"openmla: OPENMLA_VLLM_CUSTOM={wish} has no effect: {reason}")
    assert not prefill["CUSTOM"].is_overridden()
    assert registration.name_of("attention") == "OPENMLA"


def test_a_refusal_of_vllm_is_one_line(caplog: pytest.LogCaptureFixture):
    def refuse(backend: str, path: str) -> None:
        raise RuntimeError("not today\nand a second line")

    with fake_vllm.installed():
        sys.modules[PREFILL].register_mla_prefill_backend = refuse
        register()
    assert lines(caplog) == ["openmla: no backend OPENMLA: RuntimeError: not today"]


RAISED = [
    RuntimeError("no kernel image\nis available"),
    OSError("libcudart.so.12: cannot open shared object file"),
    ImportError("cannot import name"),
    AttributeError("partially initialized module"),
    SyntaxError("invalid syntax"),
]
every_error = pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)


def raising(error: Exception) -> Any:
    def function(*_: Any) -> Any:
        raise error

    return function


class Broken(ModuleType):
    """A module whose import ends midway, so that asking for a name raises."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(name)
        self.__error = error

    def __getattr__(self, name: str) -> Any:
        raise self.__error


@every_error
@pytest.mark.parametrize("where", ["import", "name", "add"])
def test_whatever_a_registry_raises_is_one_line(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with fake_vllm.installed() as vllm:
        if where == "import":
            found, fail = plugin.import_module, raising(error)
            chosen = lambda name: fail() if name == PREFILL else found(name)  # noqa: E731
            monkeypatch.setattr(plugin, "import_module", chosen)
        elif where == "name":
            monkeypatch.setitem(sys.modules, PREFILL, Broken(PREFILL, error))
        else:
            monkeypatch.setattr(sys.modules[PREFILL], SEAMS["prefill"].add, raising(error))
        register()
        assert {"OPENMLA", "OPENMLA_SPARSE"} <= set(registries(vllm)[1].__members__)
    [line] = lines(caplog)
    assert line.startswith(f"openmla: no backend OPENMLA: {type(error).__name__}: ")


@every_error
def test_whatever_members_and_platforms_raise_is_one_line_each(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "attention")
    monkeypatch.setattr(fake_vllm.Member, "get_path", raising(error))
    with fake_vllm.installed() as vllm:
        vllm["vllm.platforms"]["current_platform"].is_cpu = raising(error)
        register()
    *offers, wish = lines(caplog)
    kind = type(error).__name__
    assert len(offers) == len(SEAMS)
    assert all(f": {kind}: " in line for line in offers)
    assert wish.startswith(f"openmla: OPENMLA_VLLM_CPU=attention has no effect: {kind}: ")


def test_a_registry_of_other_names_is_one_line_per_backend(caplog: pytest.LogCaptureFixture):
    class Members(Enum):
        FLASH = "path"

    with fake_vllm.installed():
        for seam in SEAMS.values():
            setattr(sys.modules[seam.module], seam.members, Members)
        register()
    assert len(lines(caplog)) == len(SEAMS)


@pytest.mark.parametrize("members", [None, object(), {}], ids=["None", "object", "dict"])
def test_what_is_no_registry_is_one_line_per_backend(
    members: object, caplog: pytest.LogCaptureFixture
):
    with fake_vllm.installed():
        for seam in SEAMS.values():
            setattr(sys.modules[seam.module], seam.members, members)
        register()
    assert len(lines(caplog)) == len(SEAMS)


@pytest.mark.parametrize("error", ["RuntimeError", "OSError", "ImportError"])
def test_a_broken_triton_does_not_keep_the_plug_in_from_loading(error: str):
    """Triton is imported once a kernel is launched."""
    program = f"""
import sys
from importlib.abc import MetaPathFinder
from importlib.metadata import EntryPoint

class Broken(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise {error}("broken")

sys.meta_path.insert(0, Broken())
EntryPoint("openmla", "openmla.integrations.vllm:register", "vllm.general_plugins").load()()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("sparse", "this is not a CPU"),
        ("yes", "expected prefill, attention, sparse"),
        ("prefill", "MLAPrefillBackendEnum has no member CPU"),
        ("attention", "this is not a CPU"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(
    wish: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", wish)
    with fake_vllm.installed() as vllm:
        prefill, _ = registries(vllm)
        if wish == "prefill":
            prefill.__members__["CPU_NATIVE"] = prefill.__members__.pop("CPU")
        if wish in ("attention", "sparse"):
            vllm["vllm.platforms"]["current_platform"].is_cpu = lambda: False
        register()
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_VLLM_CPU={wish} has no effect: {reason}")


def test_without_vllm_registering_is_three_lines_and_no_error(caplog: pytest.LogCaptureFixture):
    with fake_vllm.installed(without=tuple(fake_vllm.modules())):
        register()
    assert len(lines(caplog)) == len(SEAMS)


@pytest.mark.parametrize(
    ("group", "function"),
    [("vllm.general_plugins", register), ("vllm.platform_plugins", platform)],
    ids=["general", "platform"],
)
def test_vllm_finds_the_plug_in(group: str, function: Any):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [(name, value)] = project["entry-points"][group].items()
    assert EntryPoint(name, value, group).load() is function


def test_on_a_cpu_the_indexer_is_registered_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "sparse")
    with fake_vllm.installed():
        assert platform() == registration.PLATFORM
        register()
        register()
        from openmla.integrations.vllm import indexer, queries

        assert sys.modules[OPS].op_registry_oot == {"SparseAttnIndexer": indexer.OpenMLAIndexer}
        assert sys.modules[MODEL].per_token_group_quant_fp8 is queries.quantize_queries
    assert lines(caplog) == []


@pytest.mark.parametrize("wish", ["", "prefill", "attention", "yes"])
def test_unless_asked_for_the_platform_and_the_indexer_are_vllms(
    wish: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", wish)
    with fake_vllm.installed():
        assert platform() is None
        register()
        assert sys.modules[OPS].op_registry_oot == {}
        assert sys.modules[MODEL].per_token_group_quant_fp8 is None


@every_error
@pytest.mark.parametrize("where", ["platform", "op", "model"])
def test_whatever_stands_in_the_way_of_the_indexer_is_one_line(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "sparse")
    with fake_vllm.installed():
        if where == "platform":
            monkeypatch.setattr(
                sys.modules["vllm.platforms"], "cpu_platform_plugin", raising(error)
            )
            assert platform() is None
        elif where == "op":
            sys.modules[OPS].CustomOp.register_oot = raising(error)
            register()
        else:
            monkeypatch.setitem(sys.modules, MODEL, Broken(MODEL, error))
            register()
    [line] = lines(caplog)
    assert line.startswith("openmla: OPENMLA_VLLM_CPU=sparse has no effect: ")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        (f"{MODEL}:per_token_group_quant_fp8", f"{MODEL} has no per_token_group_quant_fp8"),
        ("vllm.model_executor.layers.sparse_attn_indexer", "ModuleNotFoundError: "),
    ],
)
def test_a_vllm_without_the_indexers_seams_is_one_line(
    missing: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "sparse")
    with fake_vllm.installed(without=(missing,)):
        register()
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_VLLM_CPU=sparse has no effect: {reason}")


def test_another_plug_ins_indexer_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("OPENMLA_VLLM_CPU", "sparse")
    with fake_vllm.installed():
        sys.modules[OPS].CustomOp.register_oot(Broken, name="SparseAttnIndexer")
        register()
        assert sys.modules[OPS].op_registry_oot == {"SparseAttnIndexer": Broken}
        assert sys.modules[MODEL].per_token_group_quant_fp8 is None
    [line] = lines(caplog)
    assert "another plug-in has registered SparseAttnIndexer, as Broken" in line


def models(vllm: dict[str, dict[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = vllm[registration.REGISTRY[0]]["ModelRegistry"].models
    return found


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_on_a_gpu_the_indexer_comes_with_models_that_have_its_op(
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("OPENMLA_VLLM_INDEXER", "1")
    with fake_vllm.installed(capability=capability) as vllm:
        register()
        register()
        from openmla.integrations.vllm import indexer

        assert sys.modules[OPS].op_registry_oot == {"SparseAttnIndexer": indexer.OpenMLAIndexer}
        assert models(vllm) == registration.MODELS
        # Nothing of a model is imported, or changed, before there is one.
        assert vars(sys.modules[MODEL])["fused_indexer_q_rope_quant"] is None
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("wish", "capability", "missing", "reason"),
    [
        ("yes", (8, 0), (), "expected 1"),
        ("1", None, (), "this is no CUDA GPU; on a CPU, OPENMLA_VLLM_CPU=sparse"),
        ("1", (8, 0), (registration.REGISTRY[0],), "ModuleNotFoundError: "),
        ("1", (8, 0), ("vllm.model_executor.layers.sparse_attn_indexer",), "ModuleNotFoundError: "),
        ("1", (8, 0), ("DeepseekV32MTPModel",), "this vLLM has no DeepseekV32MTPModel, vLLM 0.32"),
    ],
)
def test_an_indexer_that_cannot_be_had_is_one_line(
    wish: str,
    capability: tuple[int, int] | None,
    missing: tuple[str, ...],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("OPENMLA_VLLM_INDEXER", wish)
    absent = tuple(name for name in missing if name.startswith("vllm"))
    with fake_vllm.installed(absent, capability) as vllm:
        for name in set(missing) - set(absent):
            del models(vllm)[name]
        before = dict(models(vllm)) if registration.REGISTRY[0] in vllm else {}
        register()
        assert sys.modules[OPS].op_registry_oot == {}
        assert not before or models(vllm) == before
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_VLLM_INDEXER={wish} has no effect: {reason}")


def flash_mlas(vllm: dict[str, dict[str, Any]]) -> list[Any]:
    """What layers get that import FlashMLA's calls now."""
    return [getattr(sys.modules[registration.FLASH_MLA], name) for name in CALLS]


def test_flash_mlas_calls_are_answered_if_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with fake_vllm.installed(capability=(9, 0)) as vllm:
        before = flash_mlas(vllm)
        register()
        assert flash_mlas(vllm) == before
        monkeypatch.setenv("OPENMLA_VLLM_FLASHMLA", "1")
        register()
        register()
        assert flash_mlas(vllm) == [getattr(flash_mla, name) for name in CALLS]
    assert lines(caplog) == []


@pytest.mark.parametrize(
    ("wish", "capability", "reason"),
    [
        ("yes", (9, 0), "expected 1"),
        ("1", None, "this is no CUDA GPU"),
        ("1", (9, 0), f"{LAYER} was imported before, with FlashMLA's flash_mla_sparse_fwd"),
        ("1", (9, 0), "AttributeError: "),
    ],
    ids=["wish", "chip", "late", "missing"],
)
def test_calls_that_cannot_be_answered_are_all_left_alone(
    wish: str,
    capability: tuple[int, int] | None,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """A layer that has one of them already would go on calling FlashMLA for half of its tokens."""
    monkeypatch.setenv("OPENMLA_VLLM_FLASHMLA", wish)
    with fake_vllm.installed(capability=capability) as vllm:
        calls = sys.modules[registration.FLASH_MLA]
        if "imported before" in reason:
            layer = ModuleType(LAYER)
            layer.flash_mla_sparse_fwd = calls.flash_mla_sparse_fwd  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, LAYER, layer)
        if "AttributeError" in reason:
            del calls.flash_mla_sparse_fwd
            first = calls.flash_mla_with_kvcache
            register()
            assert calls.flash_mla_with_kvcache is first
        else:
            before = flash_mlas(vllm)
            register()
            assert flash_mlas(vllm) == before
    [line] = lines(caplog)
    assert line.startswith(f"openmla: OPENMLA_VLLM_FLASHMLA={wish} has no effect: {reason}")


def test_only_what_vllm_loads_imports_vllm():
    found = {m for m in modules() for name, _ in imports(m) if name.split(".")[0] == "vllm"}
    assert found == VLLM_LOADS
    importers = {
        m
        for m in modules()
        for name, _ in imports(m)
        if name.removeprefix("openmla.") in VLLM_LOADS and m not in VLLM_LOADS
    }
    assert importers == set()


def test_importing_openmla_and_its_plug_in_does_not_import_vllm():
    program = "import sys; sys.modules['vllm'] = None; import openmla.integrations.vllm"
    subprocess.run([sys.executable, "-c", program], check=True)
