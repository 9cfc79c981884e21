"""Equal programs have equal intermediate code, whatever their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.compiling import renamed, same_code
from lab.compiling.same_code import _Seen, rekey, stopping_early
from openmla.aot.ahead import compiling_for
from openmla.kernels.call import Call
from openmla.lab.compiling import store

pytestmark = pytest.mark.tritons


def code(kernel: Any) -> str:
    """The intermediate code of a kernel."""
    x = torch.zeros(4, 128)
    named = {"x_ptr": x, "o_ptr": x, "count": 4, "stride": 128, "WARPS": 4, "num_warps": 4}
    with pytest.raises(_Seen) as seen, compiling_for("sm90"), stopping_early():
        Call(kernel, 1, named).compile()
    return seen.value.text


@pytest.fixture(autouse=True)
def nothing_was_compiled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def test_names_do_not_matter() -> None:
    assert code(renamed.numbered) == code(renamed.named)


def test_constants_do() -> None:
    assert code(renamed.numbered) != code(renamed.other)


def test_a_job_of_a_renamed_kernel_keeps_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are labeled by their kernels. Two of them have the same code, and one is gone."""
    reports = tmp_path / "tests" / "compiled"
    monkeypatch.setattr(same_code, "ROOT", tmp_path)
    monkeypatch.setenv("OPENMLA_COMPILE_CACHE", str(reports))
    before = {"hopper sparse a": "1", "hopper sparse b": "1", "hopper dense": "2", "hopper x": "3"}
    after = {"hopper latent a": "1", "hopper latent b": "1", "hopper dense": "2"}
    for name, jobs in (("before", before), ("after", after)):
        told = {k: {"key": f"{k} {name}", "intermediate": code} for k, code in jobs.items()}
        (tmp_path / name).write_text(json.dumps({"triton": "3.7.1", "jobs": told}))
    for label, code in before.items():
        store.keep(label, "3.7.1", f"{label} before", {"shared": int(code)})
    assert rekey(tmp_path / "before", tmp_path / "after") == 1
    for label, code in after.items():
        assert store.stored(label, "3.7.1", f"{label} after") == {"shared": int(code)}
    kept = store.read(reports / "hopper-triton3.7.json")
    assert sorted(kept) == sorted([*after, "hopper x"])
