"""The choice between expanded, latent and sparse: its arithmetic, its edges, its reasons."""

from __future__ import annotations

import pytest

from openmla.errors import InvalidArgument
from openmla.planning.form import (
    EXPANDED_BYTES,
    LayerDims,
    choose_form,
    expanded_work,
    keys_per_piece,
    latent_work,
    least_latent_keys,
)

V3 = LayerDims(latent=512, nope=128, rope=64, v=128)
GLM5 = LayerDims(latent=512, nope=192, rope=64, v=256)


def counted(dims: LayerDims, new: int, keys: int) -> tuple[int, int]:
    """Both costs, pair by pair."""
    pairs = sum(keys - new + i + 1 for i in range(new))
    expand = keys * dims.latent * (dims.nope + dims.v)
    absorb = new * dims.latent * dims.nope + new * dims.latent * dims.v
    return (
        expand + pairs * (dims.nope + dims.rope) + pairs * dims.v,
        absorb + pairs * (dims.latent + dims.rope) + pairs * dims.latent,
    )


@pytest.mark.parametrize("dims", [V3, GLM5])
@pytest.mark.parametrize(("new", "keys"), [(1, 1), (7, 7), (1, 40), (5, 33)])
def test_work_is_what_counting_gives(dims: LayerDims, new: int, keys: int):
    work = expanded_work(dims, [new], [keys]), latent_work(dims, [new], [keys])
    assert work == counted(dims, new, keys)


@pytest.mark.parametrize("dims", [V3, GLM5, LayerDims(latent=64, nope=32, rope=16, v=24)])
@pytest.mark.parametrize("new", [1, 2, 16, 29, 100, 170, 171, 300, 4096])
def test_one_number_of_keys_parts_the_forms_of_a_request(dims: LayerDims, new: int):
    least = least_latent_keys(dims, new)
    least = 1 << 20 if least == float("inf") else int(least)
    for keys in {new, new + 1, max(least - 1, new), least, least + 1, 2 * least} - {0}:
        if keys >= new:
            form = choose_form(dims, [new], [keys]).form
            assert (form == "latent") == (keys >= least_latent_keys(dims, new))


@pytest.mark.parametrize("tokens", [1, 100, 4096, 131072])
def test_a_fresh_prompt_is_expanded(tokens: int):
    assert choose_form(V3, [tokens], [tokens]).form == "expanded"


def test_the_forms_of_deepseek_v3_break_even_near_171_new_tokens():
    """(T - n) * 512 * 256 = n * T * 768 for T >> n."""
    assert choose_form(V3, [170], [131072]).form == "latent"
    assert choose_form(V3, [172], [131072]).form == "expanded"


def test_sequences_of_a_batch_count_together():
    assert choose_form(V3, [1, 1], [5000, 5000]).form == "latent"
    assert choose_form(V3, [1, 4096], [5000, 4096]).form == "expanded"


def test_sparse_only_where_keys_are_left_out():
    assert choose_form(V3, [4096], [4096], topk=2048).form == "sparse"
    assert choose_form(V3, [2048], [2048], topk=2048).form == "expanded"
    assert choose_form(V3, [1], [2048], topk=2048).form == "latent"
    assert choose_form(V3, [1, 1], [100, 2049], topk=2048).form == "sparse"


def test_the_reason_names_both_costs():
    choice = choose_form(V3, [16], [4096])
    expanded, latent = counted(V3, 16, 4096)
    assert f"{latent / 1e6:.4g} M" in choice.reason
    assert f"{expanded / 1e6:.4g} M" in choice.reason


def test_an_empty_batch_has_a_form():
    assert choose_form(V3, [], []).form == "expanded"


def test_wrong_lengths_are_named():
    with pytest.raises(InvalidArgument, match="at least the 5 new tokens"):
        choose_form(V3, [5], [4])
    with pytest.raises(InvalidArgument, match="2 lengths, as new has"):
        choose_form(V3, [5, 5], [5])


@pytest.mark.parametrize("sequences", [1, 3, 64, 10_000])
def test_a_piece_keeps_to_its_memory(sequences: int):
    piece = keys_per_piece(V3, heads=128, sequences=sequences, itemsize=2)
    taken = piece * sequences * 128 * (128 + 128) * 2
    assert piece % 64 == 0
    assert taken <= EXPANDED_BYTES or piece == 64
