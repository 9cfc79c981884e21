"""Invariant calls on Hopper, on the simulator: how a prompt is cut changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gluon_sim import intercept
from kernels.chunks import Prompt, new_results, other_bits
from openmla.kernels.launch import launch
from openmla.lab.testing.simulate import plan_on
from openmla.operands import LatentOperands, Results
from openmla.planning import latent_split

RANGE = 256
Part = tuple[int, int]


@pytest.fixture(autouse=True)
def _short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_split, "FIXED_RANGE", RANGE)


def run(op: LatentOperands) -> Results:
    """By the plan of an H200 with two SMs."""
    results = new_results(op)
    plan = plan_on("h200", op, results)
    plan = replace(plan, config=replace(plan.config, sm_count=2))
    with intercept() as reports:
        launch(plan, op, results)
    assert [str(f) for report in reports for f in report.findings] == []
    return results


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return Prompt.of(tokens=600, heads=2, d_v=128, rope=32)


@pytest.fixture(scope="module")
def whole(prompt: Prompt) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_split, "FIXED_RANGE", RANGE)
        return run(prompt.call((0, 600)))


PARTS: dict[str, tuple[Part, ...]] = {
    "chunks": ((0, 250), (250, 400), (400, 600)),
    # One range, whose request is not split; a range to the key; one key into the next.
    "ends of ranges": ((100, 200), (200, 256), (256, 257), (512, 513)),
    "decode steps": ((0, 1), (127, 128), (255, 256), (511, 512), (599, 600)),
    "129 neighbors": ((599, 600), *((i, i + 1) for i in range(128)), (300, 302)),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_have_the_bits_of_the_prompt(prompt: Prompt, whole: Results, name: str) -> None:
    parts = PARTS[name]
    assert other_bits(whole, run(prompt.call(*parts, seed=1)), parts) == []


@pytest.mark.parametrize("page", [1, 24, 64])
def test_page_sizes_change_no_bit(prompt: Prompt, whole: Results, page: int) -> None:
    parts = ((290, 300), (597, 600))
    assert other_bits(whole, run(prompt.call(*parts, page=page, seed=page)), parts) == []


def test_a_workspace_for_few_tokens_changes_no_bit(
    prompt: Prompt, whole: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = 4 * (128 + 2) * 2 * 3  # bytes: a token's partial results of three ranges
    monkeypatch.setattr(latent_split, "PARTIAL_CAP", 100 * token)
    parts = ((530, 600), (0, 3), (100, 260))
    op = prompt.call(*parts)
    assert plan_on("h200", op, new_results(op)).variant.ranges.tokens == 100
    assert other_bits(whole, run(op), parts) == []


def test_full_attention(prompt: Prompt, monkeypatch: pytest.MonkeyPatch) -> None:
    """All queries see all keys, so that a request of fewer queries has the bits of its rows."""
    full = prompt._replace(causal=False)
    alone = run(replace(full.call((0, 600)), q=prompt.q[:1], cu_seqlens_q=torch.tensor([0, 1]).int()))
    few = run(replace(full.call((0, 600)), q=prompt.q[:9], cu_seqlens_q=torch.tensor([0, 9]).int()))
    assert torch.equal(alone.out, few.out[:1])


def test_without_the_switch_chunks_have_other_bits(prompt: Prompt, whole: Results) -> None:
    """The prompt is not split then, and its bits are other ones: what the switch is for."""
    plain = run(replace(prompt.call((0, 600)), invariant=False))
    assert not torch.equal(plain.out, whole.out)
    assert torch.equal(plain.out[:RANGE], whole.out[:RANGE])  # one range is no range
