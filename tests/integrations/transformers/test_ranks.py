"""A whole model over several ranks, against the same model in one process."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import Tensor

from distributed.ranks import Ranks
from integrations.transformers import on_ranks
from integrations.transformers.tiny import logits, tiny
from openmla.errors import Unsupported
from openmla.integrations.transformers import optimize

LENGTHS = (37, 1, 20)
CLOSE = 2e-6


def alone(kind: str, lengths: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of all tokens, a sequence at a time."""
    model = tiny(kind, dtype)
    parts = on_ranks.prompt(lengths).split(lengths, dim=1)
    return torch.cat([logits(model, ids)[0] for ids in parts])


def joined(found: list[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """Logits of all ranks, where their tokens are; every token once."""
    rows = torch.cat([rows for rows, _ in found])
    assert sorted(rows.tolist()) == list(range(tokens))
    return torch.cat([values for _, values in found])[rows.argsort()]


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_the_logits_are_those_of_one_process(ranks: Ranks, kind: str) -> None:
    found = ranks.run(on_ranks.prefilled, kind, "auto", LENGTHS, torch.float32)
    got, want = joined(found, sum(LENGTHS)), alone(kind, LENGTHS)
    assert (got - want).abs().max() <= CLOSE


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_parts_of_gradients_add_up_to_those_of_one_process(ranks: Ranks) -> None:
    model, ids = copy.deepcopy(tiny("deepseek_v3")), on_ranks.prompt((37,))
    model(ids).logits.square().sum().backward()
    found = ranks.run(on_ranks.trained, (37,))
    for name, parameter in model.named_parameters():
        want = parameter.grad
        if want is not None:
            got = sum(part[name] for part in found if name in part)
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_in_latent_form(ranks: Ranks) -> None:
    found = ranks.run(on_ranks.prefilled, "deepseek_v3", "latent", (30,), torch.bfloat16)
    got, want = joined(found, 30), alone("deepseek_v3", (30,), torch.bfloat16)
    exact = alone("deepseek_v3", (30,))
    assert (got - exact).norm() <= 1.5 * (want - exact).norm()


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_heads_over_another_dimension_of_a_mesh(ranks: Ranks) -> None:
    found = ranks.run(on_ranks.prefilled_in_a_mesh, LENGTHS)
    for half in (found[0::2], found[1::2]):  # ranks of one half of the heads have the same logits
        got = joined(half, sum(LENGTHS))
        assert (got - alone("deepseek_v3", LENGTHS)).abs().max() <= CLOSE


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_generation_goes_on_from_the_gathered_cache(ranks: Ranks) -> None:
    found = ranks.run(on_ranks.generated, 40, 8)
    model = tiny("deepseek_v3")
    ids = on_ranks.prompt((40,))
    whole = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert found == [whole[0, 40:].tolist()] * 3


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("group", r"shard: expected a model after optimize\(model, group=...\)"),
        ("mask", "attention_mask: expected none beside a shard"),
        ("tokens", r"input_ids: expected \[1, 4\], this rank's, got \[1, 3\]"),
        ("cached", "a shard after 4 cached tokens"),
        ("lengths", "lengths: expected the same on every rank, got 12 for sequence 0 on rank 0"),
    ],
)
def test_what_cannot_be_right_is_refused(ranks: Ranks, how: str, said: str) -> None:
    for message in ranks.run(on_ranks.refused, how):
        assert re.search(said, message), message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("kimi_linear", "layers of KimiLinearForCausalLM are not MLA"),
        ("deepseek_v32", "DeepseekV32Attention selects keys"),
    ],
)
def test_models_that_cannot_are_refused(kind: str, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        optimize(tiny(kind), group=object())  # type: ignore[arg-type]
