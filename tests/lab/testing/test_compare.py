"""The acceptance rule: what it accepts, what it rejects, and what its report says."""

from dataclasses import replace

import pytest
import torch

from openmla.lab.testing.build import Outcome
from openmla.lab.testing.cases import Case, build
from openmla.lab.testing.compare import RULES, compare, judge

CASE = Case("dense", 4, 32, 16, 32, q_lens=(12, 9), k_lens=(20, 9))


@pytest.fixture
def built():
    return build(CASE)


def rounded(built):
    """The truth, rounded once: as good as a result can be."""
    truth = built.truth()
    return Outcome(truth.out.to(built.run().out.dtype), truth.lse.float())


def changed(built, change):
    outcome = rounded(built)
    change(outcome)
    return judge(built, outcome)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_truth_rounded_once_is_accepted(dtype):
    built = build(replace(CASE, dtype=dtype))
    verdict = judge(built, rounded(built))
    assert verdict.ok and verdict.bound <= 0.51


def test_an_accepted_report_has_the_figures(built):
    text = judge(built, rounded(built)).report()
    assert text.startswith("accepted")
    for word in ("bound", "frobenius", "worst row", "bias", "lse"):
        assert word in text


def test_one_wrong_element_is_found_and_named(built):
    def change(outcome):
        outcome.out[14, 2, 5] += 0.5

    verdict = changed(built, change)
    assert not verdict.ok
    assert "beyond the componentwise bound: 1 of 2688" in verdict.report()
    assert "row 14 (sequence 1, query 2 of 9, sees 3 of 9 keys), head 2, column 5" in (
        verdict.report()
    )
    expected = float(built.truth().out[14, 2, 5])
    assert f"expected {expected:.6g}, got" in verdict.report() and "bound" in verdict.problems[0]


def test_a_row_that_is_slightly_off_everywhere_is_found(built):
    def change(outcome):
        outcome.out[3, 1] *= 1.01

    verdict = changed(built, change)
    assert any("row error too large" in p and "row 3" in p for p in verdict.problems)


def test_a_small_error_everywhere_is_found(built):
    def change(outcome):
        outcome.out.mul_(1.004)

    assert not changed(built, change).ok


def test_a_bias_within_the_norms_is_found():
    built = build(replace(CASE, q_lens=(60, 60), k_lens=(60, 90), causal=False))
    outcome = rounded(built)
    biased = Outcome((built.truth().out * 0.998).to(outcome.out.dtype), outcome.lse)
    verdict = judge(built, biased)
    assert verdict.frobenius < RULES[torch.bfloat16].frobenius
    assert any("all rows off by a factor of 0.99" in p for p in verdict.problems)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_anomaly_is_found(built, value):
    def change(outcome):
        outcome.out[0, 0, 0] = value

    verdict = changed(built, change)
    assert "not finite: 1 of" in verdict.report() and not verdict.ok


@pytest.fixture
def spoiled():
    """A case with a query of one head that is not a number, and its result."""
    built = build(CASE)
    built.operands.q[3, 1, 0] = torch.nan
    return built, rounded(built)


def test_where_the_truth_is_not_finite_the_result_is_not(spoiled):
    built, outcome = spoiled
    assert judge(built, outcome).ok
    for what, place, message in (
        ("out", (3, 1, 5), "finite, though what it is made of is not: 1 of 2688"),
        ("lse", (3, 1), "lse: 1 finite, though scores are not"),
    ):
        finite = rounded(built)
        getattr(finite, what)[place] = 0.25
        [problem] = judge(built, finite).problems
        assert problem.startswith(message)


def test_what_is_beside_a_lost_element_is_judged(spoiled):
    built, outcome = spoiled
    outcome.out[3, 2, 5] += 0.5
    assert any("row 3" in p and "head 2" in p for p in judge(built, outcome).problems)
    outcome.out[3, 2, 5] = torch.inf
    assert any(p.startswith("not finite: 1 of") for p in judge(built, outcome).problems)


@pytest.mark.parametrize("value", [-0.0, 1e-38, torch.nan])
def test_an_empty_row_must_be_plus_zero(value):
    built = build(replace(CASE, k_lens=(3, 0)))
    outcome = rounded(built)
    outcome.out[20, 3, 31] = value
    verdict = judge(built, outcome)
    assert any("must be exactly +0" in p and "row 20" in p for p in verdict.problems)


@pytest.mark.parametrize("value", [torch.inf, -1e30, 0.0, torch.nan])
def test_lse_of_an_empty_row_must_be_minus_infinity(value):
    built = build(replace(CASE, k_lens=(3, 0)))
    outcome = rounded(built)
    outcome.lse[20, 3] = value
    verdict = judge(built, outcome)
    assert any(p.startswith("lse: 1 of 84 wrong; worst at row 20") for p in verdict.problems)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_lse_of_a_row_with_keys_must_be_finite(built, value):
    outcome = rounded(built)
    outcome.lse[1, 0] = value
    assert any(p.startswith("lse") for p in judge(built, outcome).problems)


def test_lse_is_held_to_4e_6(built):
    outcome = rounded(built)
    outcome.lse[5, 2] += 2e-5
    problems = judge(built, outcome).problems
    assert len(problems) == 1 and problems[0].startswith("lse: 1 of 84 wrong; worst at row 5")


def test_exact_rows_are_compared_bit_for_bit():
    built = build(replace(CASE, values="exact", scale=0.25))
    assert built.is_exact
    outcome = built.run()
    assert judge(built, outcome).ok
    row = int((built.truth().keys == 4).nonzero()[0])
    bits = outcome.out.view(torch.int16)
    bits[row, 0, 0] += 1
    assert any("must be exact" in p for p in judge(built, outcome).problems)


def test_large_scores_get_the_error_that_fp32_scores_cost():
    built = build(replace(CASE, values="large", dtype="fp32"))
    truth = built.truth()
    assert float(truth.score_magnitude.max()) > 1000
    assert judge(built, built.run()).ok


def test_eager_sets_the_limit(built):
    truth, outcome = built.truth(), rounded(built)
    noise = torch.full_like(truth.out, 1e-3)
    good = compare(outcome, truth, eager=truth.out + noise)
    assert good.eager is not None and good.ok
    strict = compare(outcome, truth, eager=truth.out + noise / 1000)
    assert not strict.ok and "x that of eager" in strict.report()


def test_a_wrong_shape_is_a_verdict_not_a_crash(built):
    verdict = judge(built, Outcome(rounded(built).out[:-1]))
    assert not verdict.ok and "out has shape [20, 4, 32], expected [21, 4, 32]" in verdict.report()


def test_nothing_to_compare_is_fine():
    built = build(replace(CASE, q_lens=(), k_lens=()))
    assert judge(built, built.run()).ok


def test_wide_scores_get_what_tensor_cores_cut_off():
    """Scores of one sign over 896 columns came out 46 eps too small on an H200."""
    case = Case("dense", 2, 640, 256, 16, q_lens=(3,), k_lens=(5,), values="rising", scale=-0.5)
    built = build(case)
    truth = built.truth()
    for eps, accepted in ((50, True), (100, False)):
        lse = truth.lse - eps * 2.0**-23 * truth.score_magnitude
        verdict = judge(built, Outcome(truth.out.to(torch.bfloat16), lse.float()))
        assert verdict.ok == accepted, (eps, verdict.report())


def with_fp16_weights(built):
    """The result of a dense case whose weights are rounded to fp16 before they meet V."""
    op, causal = built.operands, torch.ones(built.case.total_k, built.case.total_k).tril().bool()
    k = torch.cat([op.k_nope.double(), op.k_rope.double()[:, None].expand_as(op.k_nope)], -1)
    s = torch.einsum("qhd,khd->hqk", op.q.double(), k) * op.weights.scale
    p = (s.masked_fill(~causal, -torch.inf) - built.truth().max_logits.T[..., None]).exp()
    out = torch.einsum("hqk,khd->qhd", p.half().double(), op.v.double())
    return Outcome((out / p.sum(-1).T[..., None]).bfloat16())


def test_weights_have_the_dtype_of_v():
    """e4m3 queries over fp16 values: small weights have an absolute error, the result is bf16."""
    case = Case(
        "dense",
        5,
        1,
        1,
        1,
        q_lens=(128,),
        k_lens=(128,),
        dtype="e4m3",
        side_dtype="fp16",
        rope="shared",
        scale=-0.5,
        values="tiny",
    )
    beyond = []
    for seed in range(8):
        built = build(replace(case, seed=seed))
        outcome = with_fp16_weights(built)
        assert judge(built, outcome).ok
        beyond.append(not compare(outcome, built.truth(), columns=2).ok)
    assert any(beyond)  # by the rule for bf16 weights


FORMS = {
    "dense": Case("dense", 2, 32, 16, 32, q_lens=(3, 2), k_lens=(40, 9)),
    "latent": Case(
        "latent", 4, 64, 16, 64, q_lens=(3, 2), k_lens=(40, 9), scale=0.1, kv="bf16", page_size=16
    ),
    "sparse": Case("sparse", 4, 64, 16, 64, q_lens=(5,), k_lens=(70,), topk=33, scale=0.1),
}


@pytest.mark.parametrize(
    ("form", "dtype"), [*((form, "bf16") for form in FORMS), ("dense", "fp16"), ("sparse", "fp16")]
)
def test_an_fp32_output_that_was_rounded_on_its_way_is_found(form, dtype):
    """One row of one head is enough. The norms allow it: half of what they allow is for that."""
    built = build(replace(FORMS[form], dtype=dtype, out="given", fp32_out=True))
    outcome = built.run("cpu")
    assert outcome.out.dtype == torch.float32 and judge(built, outcome).ok
    row = outcome.out[1, 0]
    row.copy_(row.to(built.operands.q.dtype))
    verdict = judge(built, outcome)
    assert not verdict.ok and "before it was fp32: 1 of" in verdict.report()


def test_rows_that_are_of_a_narrow_type_anyhow_are_left_alone():
    """A row of one key is V; where all scores are equal sums of small integers are exact."""
    one = replace(FORMS["dense"], k_lens=(1, 9), q_lens=(1, 2), out="given", fp32_out=True)
    for case in (one, replace(one, values="exact", scale=0.25)):
        built = build(case)
        assert judge(built, built.run("cpu")).ok
