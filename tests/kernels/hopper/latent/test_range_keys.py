"""Ranges whose length the caller names, on Hopper's latent kernel: right and clean in the
simulator, by the kernels of other invariant calls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.chunks import Prompt, new_results, other_bits
from kernels.hopper.latent.test_pages import SMALL, V3
from kernels.hopper.simulated import plan_of, run
from kernels.judging import (
    assert_requests_do_not_see_their_neighbors,
    assert_right_clean_and_deaf_to_poison,
    on,
)
from openmla.aot.operands import operands_of
from openmla.aot.warmup import kernels_of
from openmla.kernels.hopper.latent.launch import calls
from openmla.lab.testing.simulate import plan_on, simulated
from openmla.operands import LatentOperands, Results
from openmla.planning import plan, target_by_name
from openmla.problem import Problem

SHORT = replace(SMALL, range_keys=128, spare=0)
CASES = {
    # One key past a range, of a request whose first row does not see it; two whole ranges.
    "edges": replace(SHORT, heads=4, q_lens=(3, 1), k_lens=(129, 256)),
    # Eighteen ranges: more than the merge has slots.
    "18 ranges": replace(SHORT, heads=2, q_lens=(1, 0), k_lens=(2200, 7), values="rising"),
    # Two tiles of a request, and rows that see none of the last range.
    "70 heads, sink": replace(
        SHORT, heads=70, q_lens=(2, 1), k_lens=(257, 300), sink="mixed", range_keys=256
    ),
    "full, 512 columns": replace(
        V3, heads=3, q_lens=(2,), k_lens=(300,), causal=False, range_keys=128
    ),
    "longer than the keys": replace(SHORT, heads=4, q_lens=(3,), k_lens=(150,), range_keys=2**20),
}


@pytest.mark.parametrize("name", CASES)
def test_right_clean_and_deaf_to_poison(name: str) -> None:
    assert_right_clean_and_deaf_to_poison(CASES[name], run)


def test_a_request_does_not_see_its_neighbors() -> None:
    assert_requests_do_not_see_their_neighbors(CASES["edges"], run)


def test_ranges_are_as_long_as_the_caller_says() -> None:
    for name, bits in (("edges", 7), ("70 heads, sink", 8), ("longer than the keys", None)):
        built = on(CASES[name])
        op = built.operands
        assert isinstance(op, LatentOperands)
        listed = list(calls(plan_of(built), op, new_results(op)))
        assert {call.arguments["range_bits"] for call in listed} == {bits}, name


def test_parts_have_the_bits_of_the_prompt() -> None:
    prompt = Prompt.of(tokens=300, heads=2, d_v=128, rope=32)._replace(range_keys=128)

    def bits(op: LatentOperands) -> Results:
        chosen = plan_on("h200", op, new_results(op))
        small = replace(chosen, config=replace(chosen.config, sm_count=2))
        outcome, reports = simulated(small, op, new_results(op))
        assert all(report.ok for report in reports)
        return outcome

    whole, parts = bits(prompt.call((0, 300))), ((127, 128), (128, 130), (250, 300))
    assert other_bits(whole, bits(prompt.call(*parts, seed=1)), parts) == []
    longer = prompt._replace(range_keys=256)
    assert other_bits(whole, bits(longer.call((0, 300))), ((0, 128),)) == []  # one range is none
    assert other_bits(whole, bits(longer.call((0, 300))), ((0, 300),))


DECODE = Problem(
    "latent",
    128,
    512,
    64,
    512,
    page_size=64,
    batch=32,
    total_q=32,
    total_k=32 * 32768,
    table_keys=32768,
    invariant=True,
)


def test_every_length_has_the_kernels_of_invariant_calls() -> None:
    """The length is a number that kernels are given. A merge is compiled for 1, 2, 4, 8 or 16
    ranges and more, whatever their length."""
    h200 = target_by_name("h200")
    for kv in ("bf16", "fp8_656"):
        invariant = kernels_of(replace(DECODE, kv_dtype=kv), h200)
        for keys, ranges in ((512, 64), (1024, 32), (4096, 8)):
            named = kernels_of(replace(DECODE, kv_dtype=kv, range_keys=keys), h200)
            others = {kernel.name for kernel in named ^ invariant}
            assert others == (set() if ranges >= 16 else {"merge_kernel"})


def test_few_tokens_a_launch_where_ranges_are_many() -> None:
    """Of 128 heads: 15 tokens of 128 ranges; all 32 of 32."""
    for keys, tokens in ((256, [15, 15, 2]), (512, [31, 1]), (1024, [32]), (2048, [32])):
        chosen = plan(replace(DECODE, range_keys=keys), "h200", "hopper")
        listed = list(calls(chosen, *operands_of(chosen.problem)))
        attention = [c for c in listed if c.kernel.__name__ == "latent_kernel"]
        assert [c.arguments["total_q"] for c in attention] == tokens
        assert len(listed) == 2 * len(tokens)  # each with its merge
        for call in listed:
            sums = call.arguments["part_sums_ptr"]
            assert sums.numel() * sums.element_size() <= 512 * 1024 * 1024
