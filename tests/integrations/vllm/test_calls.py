"""Calls of vLLM's real engine, replayed through openmla's backends.

Judged against float64, where openmla must be as good as vLLM was, and against vLLM's own answers.
"""

from __future__ import annotations

import pytest

from integrations.vllm import replay
from integrations.vllm.replay import NAMES, error, exact_call, exact_step, run_backend, run_layer

BF16 = 2.0**-8


@pytest.mark.parametrize("name", NAMES)
def test_a_layers_prefill_is_as_exact_as_vllms(name: str):
    step, weight = replay.recorded(name)
    want, theirs = exact_step(step, weight), step["output"].view(-1, replay.HEADS, replay.V)
    got = run_layer(step, weight)
    # vLLM rounds expanded keys, openmla absorbed queries: neither is always the better one.
    assert error(got, want) <= 1.1 * error(theirs, want) <= 2 * BF16
    assert (got - theirs).abs().max() <= 2 * BF16 * theirs.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_the_prefill_backend_answers_as_vllms_does(name: str):
    step, _ = replay.recorded(name)
    assert len(step["attention"]) == 1 + ("lengths" in step)
    for call in step["attention"]:
        want, scale = exact_call(call, step["scale"]), step["scale"]
        got = run_backend(call, scale)
        if call["lse"] is not None:
            got, lse = got
            assert lse.shape == call["lse"].shape and lse.is_contiguous()
            assert (lse - call["lse"]).abs().max() <= 1e-5 * call["lse"].abs().max()
            assert (lse.T - want.lse).abs().max() <= 1e-5 * want.lse.abs().max()
        assert error(got, want.out) <= 1.1 * error(call["out"], want.out) <= BF16


def test_the_recording_has_what_it_should():
    fresh, context = (replay.recorded(name)[0] for name in NAMES)
    assert "lengths" not in fresh
    assert sorted(context["lengths"].tolist())[0] == 0 < context["lengths"].max()
    assert min(replay.lengths(fresh["offsets"])) == 1
    assert replay.CALLS.stat().st_size < 3_000_000
