"""`k_start`: sequences that share keys, in the reference, on the CPU, and where it is refused."""

from __future__ import annotations

import pytest
import torch

import calls
import formula
import openmla
from kernels.shared_keys import with_shared_keys
from openmla import InvalidArgument, Problem, plan
from openmla.lab.testing.build import build
from openmla.lab.testing.compare import judge
from openmla.lab.testing.draw import random_case

CHIPS = [("h200", "hopper"), ("b200", "blackwell"), ("mi355x", "cdna4")]


def numbers(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_two_parts_of_one_prompt_share_its_keys(backend: str):
    """Queries 0-1 and 6-7 of 8 tokens, as a rank has them in context parallelism."""
    call = calls.dense([8])
    whole = openmla.mla_prefill(**call, return_lse=True)
    parts = {**call, "q": call["q"][[0, 1, 6, 7]], "cu_seqlens_q": numbers([0, 2, 4])}
    parts |= {"cu_seqlens_k": numbers([0, 2, 10]), "k_start": numbers([0, 0])}
    got = openmla.mla_prefill(**parts, return_lse=True, backend=backend)
    for mine, theirs in zip(got, whole, strict=True):
        formula.assert_close(mine, theirs[[0, 1, 6, 7]].double())


def test_the_reference_means_what_the_formula_says():
    call = calls.dense([3, 2, 2], [4, 5, 0])
    starts, lengths = [5, 1, 9], [4, 5, 0]
    call |= {"k_start": numbers(starts)}
    out, lse = openmla.mla_prefill(**call, return_lse=True, backend="reference")
    rows = [row for s, n in zip(starts, lengths, strict=True) for row in range(s, s + n)]
    rope = call["k_rope"][rows][:, None].expand(-1, calls.HEADS, -1)
    keys = torch.cat([call["k_nope"][rows], rope], dim=-1)
    scale = (calls.D_NOPE + calls.D_ROPE) ** -0.5
    want = formula.ragged(call["q"], keys, call["v"][rows], [3, 2, 2], lengths, scale)
    formula.assert_close(out, want.out)
    formula.assert_close(lse, want.lse)


@pytest.mark.parametrize("seed", range(40))
def test_random_batches_by_the_acceptance_rule(seed: int):
    case = random_case(7000 + seed)
    while case.form != "dense" or case.cost > 5e6:
        case = random_case(case.seed + 1000)
    built = with_shared_keys(build(case), seed)
    verdict = judge(built, built.run())
    assert verdict.ok, verdict.report()


def test_keys_where_they_are_by_themselves_change_no_bit():
    call = calls.dense([3, 4], [5, 6], dtype=torch.bfloat16)
    plain = openmla.mla_prefill(**call)
    assert formula.same_bits(openmla.mla_prefill(**call, k_start=numbers([0, 5])), plain)


@pytest.mark.parametrize(
    ("starts", "said"),
    [
        ([0, 4], "k_start: expected 0 to 3 for sequence 1: 3 of 6 rows of the keys, got 4"),
        ([-1, 0], "k_start: expected 0 to 4 for sequence 0"),
        ([0], r"k_start: expected torch.int32 \[2\]"),
    ],
)
def test_keys_that_do_not_exist_are_named(starts: list[int], said: str):
    call = calls.dense([2, 3], [2, 3])
    for name in ("k_nope", "k_rope", "v"):
        call[name] = torch.cat([call[name], call[name][:1]])
    with pytest.raises(InvalidArgument, match=said):
        openmla.mla_prefill(**call, k_start=numbers(starts))


@pytest.mark.parametrize(("target", "backend"), CHIPS)
def test_every_chips_own_kernels_serve_it(target: str, backend: str):
    problem = Problem(form="dense", heads=16, d_nope=128, d_rope=64, d_v=128, has_k_start=True)
    assert plan(problem, target).backend == backend


def test_it_is_a_matter_of_the_dense_form():
    with pytest.raises(InvalidArgument, match="has_k_start"):
        Problem(form="sparse", heads=1, d_nope=64, d_rope=0, d_v=64, has_k_start=True)


def test_it_works_under_torch_compile():
    call = calls.dense([3, 4], [5, 6])
    starts = numbers([1, 2])
    compiled = torch.compile(openmla.mla_prefill, fullgraph=True, backend="aot_eager")
    assert compiled(**call, k_start=starts).equal(openmla.mla_prefill(**call, k_start=starts))
