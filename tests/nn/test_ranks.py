"""`MLAAttention` over several ranks, against the same layer in one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed.ranks import Ranks
from integrations.transformers.tiny import tiny
from nn import on_ranks
from nn.on_ranks import Setting
from nn.test_gate import gated
from nn.test_indexer import model_of
from openmla.errors import InvalidArgument
from openmla.nn import MLAAttention, split_heads

CLOSE = 2e-6
NEW, CACHED = (37, 1, 20), (9, 0, 30)


def setting(kind: str, **how: Any) -> Setting:
    """The second layer of a tiny model."""
    dtype = how.pop("dtype", torch.float32)
    model = model_of(kind) if kind == "deepseek_v32" else tiny(kind)
    module = model.model.layers[1].self_attn
    layer = MLAAttention.from_config(model.config).load(module).to(dtype).requires_grad_(False)
    new, cached = how.pop("new", NEW), how.pop("cached", (0, 0, 0))
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(new) + sum(cached), 64, generator=generator).to(dtype)
    return Setting(layer, x, new, cached, **how)


def joined(found: list[tuple[Tensor, Any]], tokens: int) -> Tensor:
    """Outputs of all ranks, where their tokens are; every token once."""
    rows = torch.cat([rows for rows, _ in found])
    assert sorted(rows.tolist()) == list(range(tokens))
    return torch.cat([out for _, (out, _) in found])[rows.argsort()].float()


BF16 = {"dtype": torch.bfloat16, "paged": True}
CASES = {
    "expanded": setting("deepseek_v3"),
    "expanded, pages": setting("deepseek_v3", **BF16),
    "expanded, prefix": setting("deepseek_v3", **BF16, cached=CACHED),
    "latent": setting("deepseek_v3", **BF16, new=(2, 1, 3), cached=(60, 0, 80)),
    "indexer": setting("deepseek_v32"),
    "indexer, pages": setting("deepseek_v32", **BF16, cached=CACHED),
    "indexer, few keys": setting("deepseek_v32", **BF16, new=(5, 1, 6)),
    "expanded, a rank without tokens": setting("deepseek_v3", new=(2, 0, 0)),
    "latent, a rank without tokens": setting(
        "deepseek_v3", **BF16, new=(2, 0, 0), cached=(60, 0, 9)
    ),
    "indexer, a rank without tokens": setting("deepseek_v32", **BF16, new=(1, 1, 0), cached=CACHED),
    "gate": Setting(
        gated(),
        torch.randn(sum(NEW), 64, generator=torch.Generator().manual_seed(4)),
        NEW,
        (0, 0, 0),
    ),
}


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("name", CASES)
def test_the_output_is_that_of_one_process(ranks: Ranks, name: str) -> None:
    given = CASES[name]
    _, want = given.run(given.layer, 0, 0, None)
    found = ranks.run(on_ranks.attended, given)
    got = joined(found, sum(given.new))
    if given.x.dtype == torch.float32:
        assert (got - want).abs().max() <= CLOSE
    else:  # rounded at other places: how far, the layer in float32 says
        assert (got - want.float()).norm() <= 1e-2 * want.float().norm()
    if given.paged:  # every rank has every row
        assert all(torch.equal(data, found[0][1][1]) for _, (_, data) in found)


@pytest.mark.parametrize("ranks", [4], indirect=True)
@pytest.mark.parametrize("name", ["expanded", "latent", "indexer", "gate"])
def test_heads_over_another_dimension_of_a_mesh(ranks: Ranks, name: str) -> None:
    given = CASES[name]
    _, want = given.run(given.layer, 0, 0, None)
    found = ranks.run(on_ranks.attended_in_a_mesh, given)
    close = CLOSE if given.x.dtype == torch.float32 else 1e-2 * want.abs().max()
    for half in (found[0::2], found[1::2]):
        assert (joined(half, sum(given.new)) - want.float()).abs().max() <= close


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("batch", "batch: expected that of all ranks"),
        ("rows", "(rank 1: expected arguments that pass its checks, got )?x: expected 19 rows"),
    ],
)
def test_what_cannot_be_right_is_refused(ranks: Ranks, how: str, said: str) -> None:
    for message in ranks.run(on_ranks.refused, CASES["expanded"], how):
        assert re.match(said, message), message


def test_heads_that_cannot_be_split_evenly() -> None:
    class Mesh:
        def size(self) -> int:
            return 3

    with pytest.raises(InvalidArgument, match="mesh: expected a divisor of 4 heads, got 3"):
        split_heads(CASES["expanded"].layer, Mesh())  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_parts_of_gradients_add_up_to_those_of_one_process(ranks: Ranks) -> None:
    given = CASES["expanded"]
    expected, found = on_ranks.trained(0, 1, given), ranks.run(on_ranks.trained, given)
    assert expected.keys() == dict(given.layer.named_parameters()).keys()
    for name, want in expected.items():
        got = sum(part[name] for part in found)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max(), name


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("name", ["expanded", "gate"])
def test_heads_over_ranks_train_as_those_of_one_process(ranks: Ranks, name: str) -> None:
    """The rope columns of a row are shared by heads of all ranks: their gradient is a sum."""
    given = CASES[name]
    expected = on_ranks.trained_by_heads(0, 1, given)
    for found in ranks.run(on_ranks.trained_by_heads, given):
        assert found.keys() == expected.keys()
        for weight, want in expected.items():
            assert (found[weight] - want).abs().max() <= 1e-5 * want.abs().max(), weight


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_sequences_and_heads_over_ranks_train_as_one_process(ranks: Ranks) -> None:
    given = CASES["expanded"]
    expected = on_ranks.trained_by_heads(0, 1, given)
    for found in ranks.run(on_ranks.trained_in_a_mesh, given):
        assert found.keys() | {"x"} == expected.keys()
        for weight, got in found.items():
            want = expected[weight]
            assert (got - want).abs().max() <= 1e-5 * want.abs().max(), weight


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_an_indexers_loss_over_some_heads_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(on_ranks.loss_by_heads, CASES["indexer"]):
        assert message.startswith("the loss of an indexer, where heads are split over ranks")
