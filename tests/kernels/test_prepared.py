"""Reading Triton's launcher: private to Triton, so compared with Triton's own way here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.noted import META
from openmla.kernels import prepared
from openmla.kernels.call import Call
from openmla.kernels.gluon.descriptors import tile_layout
from openmla.kernels.prepared import NotPrepared

driver = pytest.importorskip("triton.backends.nvidia.driver")
COMPILED_META = {**META, "fp4_padded": False}


class Raw:
    """Stands for the launcher in C."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


def compiled_kernel(raw: Raw, signature: dict[str, str]) -> Any:
    """As Triton has it, without a driver."""
    metas = [COMPILED_META for kind in signature.values() if kind.startswith("tensordesc")]
    outer = object.__new__(driver.CudaLauncher)
    vars(outer).update(
        num_ctas=1,
        global_scratch_size=0,
        profile_scratch_size=0,
        launch_cooperative_grid=False,
        global_scratch_align=1,
        profile_scratch_align=1,
        launch_pdl=True,
        gsan_enabled=False,
        arg_annotations="annotations",
        kernel_signature=b"signature",
        launch=driver.wrap_handle_tensordesc(raw, signature, metas),
    )
    metadata = SimpleNamespace(tensordesc_meta=metas)
    return SimpleNamespace(run=outer, function=77, packed_metadata="packed", metadata=metadata)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*args: Any) -> tuple[Any, ...]:
        return tuple(tuple(x) if isinstance(x, list) else x for x in args)

    names = ("fill_tma_descriptor",) if prepared.TRITON < (3, 7) else ("fill_tma_descriptor_tiled",)
    utils = SimpleNamespace(**dict.fromkeys(names, encode))
    active = SimpleNamespace(
        active=SimpleNamespace(utils=utils, allocate_default_profile_scratch=lambda *args: None)
    )
    monkeypatch.setattr(triton.runtime, "driver", active)
    monkeypatch.setattr(prepared, "driver", active)


@pytest.mark.parametrize("described", [True, False], ids=["descriptor", "pointers"])
def test_a_prepared_kernel_is_launched_as_triton_launches_it(described: bool) -> None:
    q, out = torch.zeros(70, 4, 64, dtype=torch.bfloat16), torch.zeros(8)
    names = ["out_ptr", "q_desc", "factor", "heads", "WIDTH"]
    box = TensorDescriptor(q, [70, 4, 64], [256, 64, 1], [64, 1, 64], tile_layout(64, 3))
    values = [out, box if described else q, 0.5, 4, 64]
    kinds = ["*fp32", "tensordesc<bf16[64, 1, 64]>" if described else "*bf16", "fp32", "i32"]
    raw = Raw()
    compiled = compiled_kernel(raw, dict(zip(names, [*kinds, "constexpr"], strict=True)))
    compiled.run(9, 1, 1, 5, compiled.function, compiled.packed_metadata, None, None, None, *values)
    sources = {"out_ptr": "out", "q_desc": "q"}
    kernel = SimpleNamespace(arg_names=names)
    call = Call(kernel, 9, dict(zip(names, values, strict=True)), sources)
    space = prepared._Space(("q", "out"), (q, out))
    ready = prepared._Kernel(call, prepared.launcher(compiled), compiled, space)
    ready.run(5, [q.data_ptr(), out.data_ptr()])
    wanted, got = (list(args) for args in raw.calls)
    if prepared.TRITON >= (3, 7):
        wanted, got = ([*args[:-1], *args[-1]] for args in (wanted, got))
    pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in wanted]
    assert got == pointers and len(got) > len(names) + 5
    # At the same addresses again, and at another one of `out`.
    for moved in (0, 64):
        ready.run(5, [q.data_ptr(), out.data_ptr() + moved])
        again = raw.calls[-1] if prepared.TRITON < (3, 7) else raw.calls[-1][-1]
        assert out.data_ptr() + moved in again and (out.data_ptr() in again) == (not moved)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (prepared, "TRITON", (3, 10)),
        (driver.CudaLauncher, "launch_pdl", None),
        (driver, "TMA_DTYPE_DEVICE_TO_HOST", None),
        (prepared, "driver", SimpleNamespace(active=SimpleNamespace(utils=SimpleNamespace()))),
    ],
    ids=["an unknown version", "no flag", "no table", "no encoder"],
)
def test_another_triton_prepares_nothing(
    place: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.zeros(70, 4, 64, dtype=torch.bfloat16)
    box = TensorDescriptor(q, [70, 4, 64], [256, 64, 1], [64, 1, 64], tile_layout(64, 3))
    compiled = compiled_kernel(Raw(), {"q_desc": "tensordesc<bf16[64, 1, 64]>"})
    if name == "launch_pdl":
        del vars(compiled.run)[name]
    elif value is None:
        monkeypatch.delattr(place, name)
    else:
        monkeypatch.setattr(place, name, value)
    call = Call(SimpleNamespace(arg_names=["q_desc"]), 1, {"q_desc": box}, {"q_desc": "q"})
    with pytest.raises(NotPrepared):
        prepared.prepare([(call, compiled)], ("q", "out"), (q, q.clone()))


def test_kernels_with_scratch_memory_are_not_prepared() -> None:
    compiled = compiled_kernel(Raw(), {"n": "i32"})
    vars(compiled.run)["global_scratch_size"] = 128
    with pytest.raises(NotPrepared):
        prepared.launcher(compiled)
    with pytest.raises(NotPrepared):
        prepared.launcher(None)  # Triton's interpreter compiles nothing
