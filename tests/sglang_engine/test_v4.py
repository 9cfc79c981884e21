"""SGLang's own way to FlashMLA, with openmla standing in for the package: DeepSeek-V4's calls.

SGLang's DeepSeek-V4 backend calls two functions of one module, which imports `flash_mla`. The
module itself is loaded here, without the packages around it; lists, lengths and pages are those of
recorded calls of another engine over the same caches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import formula
from integrations.vllm import v4_replay
from openmla.compat import stand_in

INTERFACE = "kernels/ops/attention/flash_mla_interface.py"


@pytest.fixture
def interface() -> Iterator[ModuleType]:
    sglang = importlib.util.find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations
    path = Path(sglang.submodule_search_locations[0]) / INTERFACE
    stand_in.install()
    spec = importlib.util.spec_from_file_location("flash_mla_interface", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    stand_in.remove()


@pytest.mark.parametrize("step", v4_replay.STEPS)
def test_its_calls_are_answered_as_the_formula_says(step: str, interface: ModuleType):
    for call in v4_replay.replayed(step):
        arguments: dict[str, Any] = {**call.arguments}
        del arguments["out"]
        if call.name == "flash_mla_with_kvcache":
            arguments["tile_scheduler_metadata"] = interface.get_mla_metadata()[0]
            out, lse = interface.flash_mla_with_kvcache(**arguments)
            nothing = call.want.lse == -torch.inf
            formula.assert_close(lse[..., 0], call.want.lse.masked_fill(nothing, torch.inf))
        else:
            out, _, base_2 = interface.flash_mla_sparse_fwd(**arguments, d_v=512)
            formula.assert_close(base_2 * torch.tensor(2.0).log(), call.want.lse, bound=1e-4)
        formula.assert_close(out.flatten(0, -3), call.want.out, bound=2**-7)


def test_schedules_of_its_backend_for_dense_decode(interface: ModuleType):
    lengths = torch.tensor([3, 1], dtype=torch.int32)
    schedule, splits = interface.get_mla_metadata(lengths, 16, 1, is_fp8_kvcache=False)
    rows = torch.randn(2, 4, 1, 576).bfloat16()
    q = torch.randn(2, 1, 16, 576).bfloat16()
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    out, _ = interface.flash_mla_with_kvcache(
        q, rows, table, lengths, 512, schedule, splits, softmax_scale=0.05, causal=True
    )
    for request, (page, length) in enumerate([(1, 3), (0, 1)]):
        keys = rows[page, :length].expand(-1, 16, -1)
        seen = formula.bottom_right(1, length)
        want = formula.attend(q[request], keys, keys[..., :512], 0.05, seen)
        formula.assert_close(out[request], want.out, bound=2**-7)
