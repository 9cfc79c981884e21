"""Attention on shards, by the acceptance rule, against float64 over the whole batch."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import formula
import openmla
from distributed import on_ranks
from distributed.on_ranks import HEADS, SCALE, Batch
from distributed.ranks import Ranks
from openmla import InvalidArgument, reference
from openmla.distributed import (
    Gathering,
    attention,
    indexes,
    prefill,
    prefill_latent,
    send_latent,
    split,
)
from openmla.distributed.gather import Rows
from openmla.lab.testing.build import Outcome
from openmla.lab.testing.compare import compare
from openmla.operands import DenseOperands, LatentOperands, SparseOperands, Weights
from openmla.planning.target import target_by_name
from openmla.reference import Truth

PREFIX = (3, 40, 0, 21, 0)


def truth_of(form: str, batch: Batch, how: dict[str, Any]) -> Truth:
    """The whole batch at once, in float64."""
    sink = torch.full((HEADS,), how["sink"]) if "sink" in how else None
    weights = Weights(SCALE, sink)
    cu_q = formula.cu_seqlens(list(batch.lengths))
    cache, table = batch.cache(how.get("format", "bf16"))
    batch.append(cache, table, torch.arange(sum(batch.keys)))
    if form == "latent":
        lengths = torch.tensor(batch.keys, dtype=torch.int32)
        return reference.latent(
            LatentOperands(batch.absorbed(), cache, table, lengths, cu_q, True, 512, weights)
        )
    rows = cache.gather(batch.slots(table)) if "format" in how else batch.rows()
    if form == "sparse":
        q, lists = batch.absorbed(), batch.lists()
        return reference.sparse(SparseOperands(q, rows, lists, None, 512, weights))
    k_nope, v = batch.expand(rows[:, :512])
    cu_k = formula.cu_seqlens(batch.keys)
    q = batch.queries()
    return reference.dense(DenseOperands(q, k_nope, rows[:, 512:], v, cu_q, cu_k, True, weights))


def of_rows(truth: Truth, rows: torch.Tensor, heads: slice = slice(None)) -> Truth:
    """Some rows and heads of a truth."""
    picked = {f.name: getattr(truth, f.name)[rows] for f in fields(truth)}
    return Truth(**{n: x if n == "keys" else x[:, heads] for n, x in picked.items()})


CASES = {
    "plain": (Batch(), {}),
    "fp16": (Batch(dtype=torch.float16), {}),
    "overlap": (Batch(), {"overlap": True}),
    "overlap, prefix": (Batch(cached=PREFIX), {"overlap": True, "format": "fp8_656"}),
    "one long sequence": (Batch(lengths=(0, 150, 0, 0, 0)), {}),
    "sink": (Batch(seed=2), {"sink": 0.5}),
    "sent early": (Batch(seed=3), {"early": True, "format": "bf16"}),
    "bf16 prefix": (Batch(cached=PREFIX), {"format": "bf16"}),
    "fp8_656 prefix": (Batch(cached=PREFIX), {"format": "fp8_656"}),
    "fp8_block64": (Batch(), {"format": "fp8_block64"}),
    "fp8_token": (Batch(), {"format": "fp8_token"}),
    "fewer tokens than ranks": (Batch(lengths=(1, 0, 1)), {}),
}


# Overlap is a matter of expanded keys.
PAIRS = [
    (form, case)
    for form in ("dense", "latent", "sparse")
    for case, (_, how) in CASES.items()
    if form == "dense" or "overlap" not in how
]


@pytest.mark.parametrize(("form", "case"), PAIRS)
def test_shards_make_the_whole(ranks: Ranks, form: str, case: str):
    batch, how = CASES[case]
    if form == "latent" and batch.dtype != torch.bfloat16:
        how = {"format": "bf16"}
    if form == "sparse" and len(batch.lengths) < 5:
        batch = replace(batch, lengths=(1, 0, 6))
    layout = "contiguous" if case in ("sink", "fp8_token") else "zigzag"
    truth = truth_of(form, batch, how)
    columns = batch.queries().shape[2] if form == "dense" else 576
    seen = []
    for rows, out, lse in ranks.run(on_ranks.attended, form, batch, layout, how):
        verdict = compare(Outcome(out, lse), of_rows(truth, rows), columns=columns)
        assert verdict.ok, verdict.report()
        seen += rows.tolist()
    assert sorted(seen) == list(range(sum(batch.lengths)))


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_heads_over_another_dimension_of_a_mesh(ranks: Ranks):
    batch = Batch()
    truth = truth_of("dense", batch, {})
    found = ranks.run(on_ranks.attended_in_a_mesh, batch)
    for rows, heads, out, lse in found:
        verdict = compare(Outcome(out, lse), of_rows(truth, rows, heads), columns=80)
        assert verdict.ok, verdict.report()
    assert sorted(h.start for _, h, _, _ in found) == [0, 0, 2, 2]


def test_keys_are_shared_copied_or_expanded_twice(monkeypatch: pytest.MonkeyPatch):
    """Rank 1 of 2, with all rows here: 24 and 10 tokens, of which it sees 18 and 7 in the end."""
    batch, shard = Batch(lengths=(24, 10)), split([24, 10], 2, 1)
    once = indexes.union(shard.parts)
    assert [part.keys for part in once.parts] == [18, 7] and once.offsets == (0, 18)
    # The second wave sees all of them as they lie: nothing is copied for it.
    last = indexes.key_rows(shard.waves[1], once.offsets, torch.device("cpu"))
    assert last == slice(0, 25)
    expanded, called = [], []

    def expand(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        expanded.append(rows.shape[0])
        return batch.expand(rows)

    def counted(*arguments: Any, **options: Any) -> Any:
        called.append((arguments[1].shape[0], options["k_start"] is not None))
        return openmla.mla_prefill(*arguments, **options)

    monkeypatch.setattr(attention, "mla_prefill", counted)
    here, q = Gathering(shard, Rows(batch.rows()), 512), batch.queries()[shard.rows()]
    shared = prefill(q, here, None, expand, shard)
    assert expanded == [25] and called == [(25, True)]
    monkeypatch.setattr(attention, "_may_share", lambda *_: False)
    copied = prefill(q, here, None, expand, shard)
    assert expanded == [25, 25] and called[1:] == [(16, False), (25, False)]
    twice = prefill(q, here, None, expand, shard, overlap=True)
    assert expanded[2:] == [16, 25] and called[3:] == [(16, False), (25, False)]
    assert torch.allclose(shared, copied, atol=2**-8) and copied.equal(twice)


@pytest.mark.parametrize(
    ("target", "backend", "shares"),
    [
        ("cpu", "auto", True),
        ("a100", "auto", True),
        ("h200", "auto", True),
        ("h200", "portable", True),
        ("b200", "blackwell", True),
    ],
)
def test_keys_are_shared_where_the_same_kernels_take_them(
    target: str, backend: str, shares: bool, monkeypatch: pytest.MonkeyPatch
):
    """Never by going to a slower family."""
    monkeypatch.setattr(attention, "device_target", lambda _: target_by_name(target))
    q, kv = torch.zeros(4, 16, 192).bfloat16(), torch.zeros(4, 16, 256).bfloat16()
    found = kv[..., :128], torch.zeros(4, 64).bfloat16(), kv[..., 128:]
    assert attention._may_share(q, found, backend) is shares


def test_one_rank_alone_is_the_plain_call():
    batch = Batch(lengths=(9, 4))
    rows, out, lse = on_ranks.attended(0, 1, "dense", batch, "zigzag", {})
    verdict = compare(Outcome(out, lse), truth_of("dense", batch, {}), columns=80)
    assert rows.tolist() == list(range(13)) and verdict.ok, verdict.report()


def test_a_rank_without_tokens_gets_nothing():
    batch = Batch(lengths=(0, 0))
    empty = torch.zeros(0, 576, dtype=torch.bfloat16)
    shard = split([0, 0], 1, 0)
    q = torch.zeros(0, HEADS, 80, dtype=torch.bfloat16)
    out = prefill(q, empty[:, :512], empty[:, 512:], batch.expand, shard)
    assert out.shape == (0, HEADS, on_ranks.V)
    q = torch.zeros(0, HEADS, 576, dtype=torch.bfloat16)
    out, lse = prefill_latent(q, empty[:, :512], empty[:, 512:], shard, scale=1.0, return_lse=True)
    assert out.shape == (0, HEADS, 512) and lse.shape == (0, HEADS)


def test_what_cannot_be_right_is_refused():
    shard, rows = split([4], 1, 0), torch.zeros(4, 576)
    q = torch.zeros(4, 2, 576)
    sent = send_latent(rows[:, :512], rows[:, 512:], shard)
    wrong = {
        # Rounding fp32 rows to bf16 pages must be asked for, with a cache.
        "latent": lambda: prefill_latent(q, rows[:, :512], rows[:, 512:], shard, scale=1.0),
        "q": lambda: prefill(q[:3], rows[:, :512], rows[:, 512:], Batch().expand, shard),
    }
    for name, call in wrong.items():
        with pytest.raises(InvalidArgument) as raised:
            call()
        assert raised.value.name == name
    with pytest.raises(InvalidArgument, match="q: expected 4 rows, as this rank has, got 3"):
        prefill(q[:3], sent, None, Batch().expand, shard)
    with pytest.raises(InvalidArgument, match="rows of this shard"):
        prefill(q, sent, None, Batch().expand, split([2, 2], 1, 0))
    with pytest.raises(InvalidArgument, match="sent with a cache"):
        prefill_latent(q, sent, None, shard, scale=1.0)
