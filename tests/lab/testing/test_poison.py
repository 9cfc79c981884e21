"""Poisons bite: implementations that touch unused memory are caught, ours is not."""

from dataclasses import replace

import pytest
import torch

from openmla.lab.testing.build import Outcome
from openmla.lab.testing.cases import Case, random_case
from openmla.lab.testing.memory.poison import poison_problems

DENSE = Case(
    "dense", 2, 8, 4, 8, q_lens=(3, 4), k_lens=(5, 4), spare=2, layout="strided", out="strided"
)
LATENT = Case("latent", 2, 8, 4, 8, (3,), (5,), kv="bf16", page_size=4, spare=2, scale=0.3)
SPARSE = Case(
    "sparse", 2, 8, 4, 8, (6,), (9,), spare=3, topk=7, topk_lengths="ragged", scale=0.3, seed=5
)


@pytest.mark.parametrize("case", [DENSE, LATENT, SPARSE], ids=lambda c: c.form)
def test_the_public_calls_do_not_see_unused_memory(case):
    assert poison_problems(case) == []


@pytest.mark.parametrize("seed", range(10_000, 10_012))
def test_random_cases_do_not_see_unused_memory(seed):
    assert poison_problems(random_case(seed)) == []


def test_reading_tokens_after_the_last_sequence_is_caught():
    def leaky(built):
        outcome = built.run()
        outcome.out.add_(built.operands.v[-1, 0, 0] * 0)  # 0 × NaN is NaN
        return outcome

    problems = poison_problems(DENSE, leaky)
    assert any("with nan around: out differs" in p for p in problems)
    assert any("with inf around: out differs" in p for p in problems)
    assert any("with ff around: out differs" in p for p in problems)


def test_reading_unused_pages_is_caught():
    def leaky(built):
        outcome = built.run()
        outcome.lse.add_(built.operands.cache.data.float().mul(0).sum())
        return outcome

    assert any("lse differs" in p for p in poison_problems(LATENT, leaky))


def test_reading_the_gap_of_a_strided_view_is_caught():
    def leaky(built):
        outcome = built.run()
        v = built.operands.v
        outcome.out[0, 0, 0] += v.as_strided((1,), (1,), v.shape[2])[0] * 0
        return outcome

    assert any("out differs in 1 of" in p for p in poison_problems(DENSE, leaky))


def test_using_an_index_past_its_length_is_caught():
    def leaky(built):
        arguments = {**built.arguments, "topk_lengths": None}
        return replace(built, arguments=arguments).run()

    assert any("out differs" in p for p in poison_problems(SPARSE, leaky))


def test_reading_the_tail_of_a_block_table_is_caught():
    def leaky(built):
        outcome = built.run()
        outcome.lse.add_(float(built.operands.block_table[0, -1]))
        return outcome

    assert any("lse differs" in p for p in poison_problems(LATENT, leaky))


def test_an_output_left_unwritten_is_caught():
    def lazy(built):
        fresh = built.memory.new(built.operands.q.shape, torch.bfloat16)
        return Outcome(fresh)

    assert any("out differs" in p for p in poison_problems(DENSE, lazy))


def test_writing_an_input_is_caught():
    def vandal(built):
        outcome = built.run()
        built.operands.q[0, 0, 0] = 7
        return outcome

    assert any("input buffer 0 was written" in p for p in poison_problems(DENSE, vandal))


def test_writing_between_the_rows_of_out_is_caught():
    def sloppy(built):
        outcome = built.run()
        outcome.out.as_strided((1,), (1,), outcome.out.shape[2])[0] = 1
        return outcome

    problems = poison_problems(DENSE, sloppy)
    assert any("between the rows of out was written" in p for p in problems)
