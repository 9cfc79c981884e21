"""Dense latent prefill over pages on Hopper, on the simulator: the kernel of test_sparse.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gluon_sim import intercept
from kernels.hopper.simulated import plan_of, run
from kernels.judging import (
    assert_every_schedule_is_clean,
    assert_requests_do_not_see_their_neighbors,
    assert_right_clean_and_deaf_to_poison,
    on,
)
from openmla import dispatch
from openmla.kernels.hopper.latent.launch import calls
from openmla.lab.testing.case import Case
from openmla.lab.testing.compare import judge
from openmla.lab.testing.simulate import new_results
from openmla.operands import LatentOperands
from openmla.planning import target_by_name

V3 = Case(
    "latent",
    20,
    512,
    64,
    512,
    q_lens=(7, 2, 3),
    k_lens=(7, 150, 2),
    scale=0.05,
    kv="bf16",
    page_size=16,
    spare=2,
)
SMALL = replace(V3, d_nope=128, d_rope=32, d_v=128)
# Of 64 rows and 128 keys: one row into a tile, one key into a step, and a first row that sees one
# key less than a step (3 queries, 129 keys: 127).
EDGES = replace(SMALL, heads=1, q_lens=(3, 65, 5), k_lens=(129, 65, 257), spare=0)
CASES = {
    "causal": V3,
    "edges": EDGES,
    "edges, full, 13 heads": replace(EDGES, heads=13, causal=False, q_lens=(3, 5, 1)),
    # Pages are full, and so is the table's last line.
    "full table": replace(EDGES, q_lens=(3, 5), k_lens=(70, 144)),
    "full, sink": replace(V3, causal=False, sink="mixed"),
    "96 heads": replace(V3, heads=96, q_lens=(3, 1), k_lens=(130, 1)),
    "1 head, pages of 64": replace(
        V3, heads=1, q_lens=(70, 0, 5), k_lens=(70, 3, 200), page_size=64
    ),
    "128 heads, no lse": replace(V3, heads=128, q_lens=(2,), k_lens=(140,), return_lse=False),
    "more queries than keys": replace(V3, q_lens=(9, 4), k_lens=(3, 0)),
    "no sequences": replace(V3, q_lens=(), k_lens=(), spare=3),
    "long": replace(SMALL, q_lens=(5,), k_lens=(700,), page_size=24, values="rising"),
    "many short": replace(SMALL, heads=4, q_lens=(1,) * 9, k_lens=(5, 1, 0, 64, 65, 3, 2, 9, 128)),
    "256+64, negative scale": replace(
        V3, d_nope=256, d_v=256, scale=-0.1, q_lens=(8,), k_lens=(300,)
    ),
    # 9 ranges, 12 and one (see LatentSplit).
    "split": replace(SMALL, heads=4, q_lens=(2, 1, 3), k_lens=(4500, 6000, 2800), sink="mixed"),
    "split, no lse": replace(SMALL, heads=4, q_lens=(1,), k_lens=(4500,), return_lse=False),
    "split, full, 512 columns": replace(V3, heads=3, q_lens=(1,), k_lens=(4500,), causal=False),
    # More requests than are numbered together; the 132nd and the 135th are split.
    "split, 135 requests": replace(
        SMALL,
        heads=1,
        q_lens=(1,) * 135,
        k_lens=(5, 0, 3) * 43 + (200, 1, 4500, 7, 0, 4600),
        spare=1,
    ),
    "512+0": replace(V3, d_rope=0, rope="none", q_lens=(4,), k_lens=(129,)),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_schedule_is_clean(name: str) -> None:
    assert_every_schedule_is_clean(CASES[name], run)


def test_a_request_does_not_see_its_neighbors() -> None:
    assert_requests_do_not_see_their_neighbors(V3, run)


def test_a_request_that_is_split_does_not_see_its_neighbors() -> None:
    built = on(CASES["split, 135 requests"])
    together = run(built)[0]
    op = built.operands
    assert isinstance(op, LatentOperands) and together.lse is not None
    for number in (3, 129, 131, 134):
        alone = replace(
            op,
            q=op.q[number : number + 1],
            block_table=op.block_table[number : number + 1],
            cache_lengths=op.cache_lengths[number : number + 1],
            cu_seqlens_q=torch.tensor([0, 1]).int(),
        )
        found = run(replace(built, operands=alone))[0]
        assert torch.equal(found.out[:1], together.out[number : number + 1])
        assert found.lse is not None
        assert torch.equal(found.lse[:1], together.lse[number : number + 1])


@pytest.mark.parametrize("name", ["causal", "many short", "split", "no sequences"])
def test_the_counter_is_zero_again(name: str) -> None:
    built = on(CASES[name])
    results = new_results(built)
    with intercept():
        made = list(calls(plan_of(built), built.operands, results))
        for call in made:
            call.run()
    assert [int(call.arguments.get("counter_ptr", 0)) for call in made] == [0] * len(made)


def test_queries_with_gaps() -> None:
    built = on(V3)
    op = built.operands
    assert isinstance(op, LatentOperands)
    wide = torch.full((op.q.shape[0], 24, op.q.shape[2] + 8), torch.nan, dtype=op.q.dtype)
    wide[:, :20, :-8] = op.q
    gapped = replace(built, operands=replace(op, q=wide[:, :20, :-8]))
    assert torch.equal(run(gapped)[0].out, run(built)[0].out)


def test_the_public_call_runs_this_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "device_target", lambda device: target_by_name("h200"))
    built = on(replace(V3, q_lens=(2,), k_lens=(9,)))
    with intercept() as reports:
        assert judge(built, built.run(backend="hopper")).ok
    assert len(reports) == 1 and reports[0].ok
    assert dispatch.plan_call(built.operands, new_results(built)).backend == "hopper"
