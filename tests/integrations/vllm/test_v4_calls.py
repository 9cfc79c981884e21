"""What vLLM's DeepSeek-V4 layer asks of FlashMLA, answered by openmla.compat."""

from __future__ import annotations

import pytest
import torch

import formula
from integrations.vllm import v4_replay

every_step = pytest.mark.parametrize("step", v4_replay.STEPS)


def test_the_recording_has_what_it_should():
    """Lists with a distance of their own, pages of 2 rows, pages between other layers', tokens that
    a graph adds, lists that are wider than a window, and both calls."""
    steps = v4_replay.STEPS
    assert {call["name"] for step in steps.values() for call in step} == {
        "flash_mla_with_kvcache",
        "flash_mla_sparse_fwd",
    }
    [decode] = steps["decode, ratio 128"]
    assert (
        decode["extra_indices_in_kvcache"].stride(0) > decode["extra_indices_in_kvcache"].shape[2]
    )
    assert decode["extra_k_cache"]["shape"][1] == 2
    [verified] = steps["verified, ratio 4"]
    assert verified["k_cache"]["stride"][0] == 3 * 37440
    [padded] = steps["padded decode, window"]
    assert padded["topk_length"].tolist()[-3:] == [0, 0, 0]
    [draft] = steps["draft block, window"]
    assert draft["indices"].shape[2] == 192 and draft["topk_length"].max() == 133
    assert v4_replay.CALLS.stat().st_size < 1_000_000


@every_step
def test_every_call_is_answered_as_the_formula_says(step: str):
    for call in v4_replay.replayed(step):
        out, *rest = call.run()
        given = call.arguments["out"]
        assert out.data_ptr() == given.data_ptr() and out.shape == given.shape
        formula.assert_close(out.flatten(0, -3), call.want.out, bound=2**-7)
        if call.name == "flash_mla_with_kvcache":
            [lse] = rest
            nothing = call.want.lse == -torch.inf
            formula.assert_close(lse[..., 0], call.want.lse.masked_fill(nothing, torch.inf))


def test_tokens_that_a_graph_adds_get_zeros_whatever_their_lists_hold():
    [call] = v4_replay.replayed("padded decode, ratio 4")
    added = call.arguments["topk_length"] == 0
    assert added.sum() == 3
    call.arguments["indices"][added] = 2**30
    call.arguments["extra_indices_in_kvcache"][added] = -(2**30)
    out, lse = call.run()
    assert formula.same_bits(out[added], torch.zeros_like(out[added]))
    assert bool((lse[added] == torch.inf).all())
