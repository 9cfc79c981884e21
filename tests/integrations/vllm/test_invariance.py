"""`OPENMLA` with VLLM_BATCH_INVARIANT=1: how a request is served does not reach its bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from integrations.vllm import fake_vllm, invariant
from integrations.vllm.invariant import Served
from openmla import Unsupported


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    with invariant.switched_on():
        yield


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_how_a_request_is_served_does_not_reach_its_bits(name: str):
    invariant.check(Served(name))


def test_without_the_switch_decoding_is_vllms(monkeypatch: pytest.MonkeyPatch):
    served = Served("auto")
    envs = served.layer.forward_mqa.__globals__["envs"]
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", False)
    assert served.layer.forward_mqa(None, None, None, None) == (None, None)
    assert served.layer.went_vllms_way == "forward_mqa"


def test_output_that_another_backend_would_quantize_is_refused():
    served = Served("auto")
    with pytest.raises(Unsupported, match="quantized on the way"):
        served.layer.forward_mha(served.q[2], None, None, served.pages, None, None, None, 1.0)


@pytest.mark.parametrize(("switch", "base"), [(True, "TritonMLA"), (False, "FlashMLA")])
def test_the_decoding_backend_on_hopper(switch: bool, base: str):
    """Its layout and its metadata are used in both cases; FlashMLA's are not invariant."""
    with fake_vllm.installed() as vllm:
        vllm["vllm.platforms"]["current_platform"].capability = (9, 0)
        sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = switch  # type: ignore[attr-defined]
        from openmla.integrations.vllm.attention import OpenMLABackend
    assert OpenMLABackend.__base__.__name__ == base
