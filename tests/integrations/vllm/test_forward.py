"""The arithmetic between vLLM's tensors and openmla's calls."""

from __future__ import annotations

import doctest

import pytest
import torch

import formula
from openmla import LatentCache
from openmla.integrations.vllm import forward
from openmla.integrations.vllm.forward import Context, Shard, UpProjection, physical_rows

HEADS, NOPE, ROPE, LATENT, V = 3, 16, 8, 32, 24


def projection(dtype: torch.dtype = torch.float32) -> UpProjection:
    weight = torch.randn(HEADS, NOPE + V, LATENT).to(dtype) * LATENT**-0.5
    return UpProjection(weight[:, :NOPE], weight[:, NOPE:].mT)


def test_the_examples_in_the_docstrings_are_true():
    assert doctest.testmod(forward).attempted > 3
    assert doctest.testmod(forward).failed == 0


def test_absorbed_queries_score_latent_rows_as_queries_score_keys():
    proj, q, rows = projection(), torch.randn(5, HEADS, NOPE + ROPE), torch.randn(7, LATENT + ROPE)
    keys = torch.einsum("sl,hpl->shp", rows[:, :LATENT], proj.keys)
    want = torch.einsum("thp,shp->ths", q[..., :NOPE], keys)
    want += torch.einsum("thr,sr->ths", q[..., NOPE:], rows[:, LATENT:])
    got = torch.einsum("thw,sw->ths", proj.absorb(q), rows)
    assert torch.allclose(got, want, atol=1e-4)


def test_expanding_the_sum_is_the_sum_of_expanded_rows():
    proj, p, rows = projection(), torch.rand(5, HEADS, 7), torch.randn(7, LATENT)
    values = torch.einsum("sl,hlv->shv", rows, proj.values)
    got = proj.release(torch.einsum("ths,sl->thl", p, rows))
    assert torch.allclose(got, torch.einsum("ths,shv->thv", p, values), atol=1e-4)


def test_break_even_is_where_both_forms_cost_the_same():
    def costs(tokens: int) -> tuple[int, int]:
        return tokens * (NOPE + ROPE + V) + LATENT * (NOPE + V), tokens * (2 * LATENT + ROPE)

    tokens = projection().most_latent_tokens(ROPE)
    expanded, latent = costs(tokens)
    assert latent <= expanded
    expanded, latent = costs(tokens + 1)
    assert latent > expanded


def test_context_is_attended_to_in_its_pages_and_its_absence_leaves_no_trace():
    proj = projection(torch.bfloat16)
    cache = LatentCache.allocate(num_pages=9, page_size=4, latent=LATENT, rope=ROPE)
    cache.data.normal_()
    lengths = [10, 0, 5]
    table = torch.tensor([[8, 1, 3], [-7, -7, -7], [0, 6, -7]], dtype=torch.int32)
    q, q_lens = torch.randn(6, HEADS, NOPE + ROPE).bfloat16(), [2, 3, 1]
    context = Context(cache, table, torch.tensor(lengths, dtype=torch.int32))
    out, lse = forward.attend_context(q, context, proj, formula.cu_seqlens(q_lens), 0.2)
    pages = cache.data.flatten(0, 1)
    slots = [table[b, i // 4] * 4 + i % 4 for b, n in enumerate(lengths) for i in range(n)]
    rows = pages[torch.tensor(slots)].double()
    keys = torch.einsum("sl,hpl->shp", rows[:, :LATENT], proj.keys.double())
    keys = torch.cat([keys, rows[:, None, LATENT:].expand(-1, HEADS, -1)], dim=-1)
    values = torch.einsum("sl,hlv->shv", rows[:, :LATENT], proj.values.double())
    want = formula.ragged(q, keys, values, q_lens, lengths, 0.2, causal=False)
    formula.assert_close(out, want.out, bound=4 * 2**-8)
    formula.assert_close(lse, want.lse, bound=2 * 2**-8)  # absorbed queries are bf16
    assert not out[2:5].any()


@pytest.mark.parametrize("interleave", [1, 4])
def test_the_ranks_of_a_shard_share_the_tokens_without_gap_or_overlap(interleave: int):
    ranks, size = 3, 8
    tokens = torch.arange(60, dtype=torch.int32).view(1, 60)
    table = torch.tensor([[5, 2, 9]], dtype=torch.int32)
    where = [
        physical_rows(tokens, torch.tensor([0]), table, size, size, Shard(ranks, r, interleave))[0]
        for r in range(ranks)
    ]
    owners = torch.stack(where) >= 0
    assert torch.equal(owners.sum(0), torch.ones(60, dtype=torch.int64))
    assert torch.equal(owners.int().argmax(0), torch.arange(60) // interleave % ranks)
    for rank, rows in enumerate(where):
        mine = rows[rows >= 0]
        assert len(set(mine.tolist())) == len(mine)
        local = torch.arange(len(mine))  # a rank's tokens fill its pages in order
        want = table[0][local // size] * size + local % size
        assert torch.equal(mine, want.to(torch.int32)), rank


def test_a_token_past_the_table_is_no_token():
    table = torch.tensor([[5, 2]], dtype=torch.int32)
    tokens = torch.tensor([[15, 16, 2**31 - 1, -5]], dtype=torch.int32)
    got = physical_rows(tokens, torch.tensor([0]), table, block_size=8, block_stride=8)
    assert got.tolist() == [[23, -1, -1, -1]]
    assert got.dtype == torch.int32
