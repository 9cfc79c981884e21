"""The acceptance rule has teeth: it rejects seeded defects and accepts the correct peer."""

from dataclasses import replace

import pytest

from defects.blocked import Blocked
from defects.catalog import catalog, judge_correct, judge_defect
from defects.run import table
from defects.showcases import defect
from openmla.lab.testing.cases import Case, build, random_case
from openmla.lab.testing.compare import judge

VERDICTS: dict[str, tuple[int, int]] = {}


def test_there_are_many_and_their_names_differ():
    names = [d.name for d in catalog()]
    assert len(names) >= 60 and len(set(names)) == len(names)
    assert all(d.breaks and d.shows for d in catalog())


def test_the_correct_implementation_is_accepted_on_every_showcase():
    rejected = {str(case): v.report() for case, v in judge_correct().items() if not v.ok}
    assert rejected == {}


@pytest.mark.parametrize("number", range(8))
def test_every_defect_is_seen(number):
    verdicts = [judge_defect(d) for d in catalog()[number::8]]
    assert [v.defect.name for v in verdicts if not v.rejected] == []
    judged, rejected = sum(v.judged for v in verdicts), sum(v.rejected for v in verdicts)
    assert rejected >= 0.9 * judged


# Blocked has one source of rows.
ONE_SOURCE = [seed for seed in range(30_000, 30_046) if not random_case(seed).sources]


@pytest.mark.parametrize("seed", ONE_SOURCE)
def test_the_correct_implementation_is_accepted_on_random_cases(seed):
    built = build(replace(random_case(seed), key_mask="none"))  # Blocked has no masks
    verdict = judge(built, Blocked(built).run())
    assert verdict.ok, f"{built.case}\n{verdict.report()}"


def test_defects_are_seen_in_narrow_and_in_tiny_values_too():
    """There the rule grants what rounding P may cost; it must not grant mistakes."""
    dense = [replace(d, shows=("narrow", "fp16_tiny")) for d in catalog() if "dense" in d.shows]
    verdicts = [judge_defect(d) for d in dense]
    assert [v.defect.name for v in verdicts if not v.rejected] == []
    assert sum(v.rejected for v in verdicts) >= 0.98 * sum(v.judged for v in verdicts)


# Right results that a rule without the deviation, or without what small weights in fp16 may cost,
# rejects: found by running Blocked on thousands of such cases.
@pytest.mark.parametrize(
    "case",
    [
        # The componentwise bound: P below 2^-14 in fp16.
        Case(
            "dense",
            1,
            128,
            64,
            1,
            (33,),
            (17,),
            "fp16",
            values="tiny",
            causal=False,
            scale=1.0,
            seed=294,
        ),
        Case(
            "dense",
            8,
            64,
            4,
            3,
            (1,),
            (17,),
            "fp16",
            values="tiny",
            causal=False,
            scale=1.0,
            seed=167,
        ),
        Case(
            "latent",
            2,
            64,
            4,
            3,
            (33,),
            (300,),
            "fp16",
            kv="bf16",
            values="tiny",
            scale=0.25,
            seed=1158,
        ),
        # Norms and bias: values that cancel, in few columns.
        Case(
            "dense", 8, 8, 64, 1, (17,), (129,), values="peaky", causal=False, scale=1.0, seed=860
        ),
        Case(
            "dense",
            2,
            64,
            64,
            1,
            (33,),
            (300,),
            "fp16",
            values="peaky",
            causal=False,
            scale=0.1,
            sink="normal",
            seed=526,
        ),
        Case(
            "dense",
            2,
            64,
            64,
            1,
            (17,),
            (129,),
            values="rising",
            scale=0.1,
            sink="normal",
            seed=1250,
        ),
        Case(
            "latent",
            1,
            8,
            64,
            3,
            (17,),
            (40,),
            "fp16",
            kv="bf16",
            causal=False,
            scale=0.02,
            sink="normal",
            seed=538,
        ),
    ],
    ids=str,
)
def test_what_rounding_p_may_cost_is_accepted(case):
    built = build(case)
    verdict = judge(built, Blocked(built).run())
    assert verdict.ok, verdict.report()


def test_an_unknown_showcase_is_refused():
    with pytest.raises(ValueError, match="unknown showcases"):
        defect("nothing", "no such showcase")


def test_the_table(capsys):
    few = [d for d in catalog() if d.name in ("causal ignored", "base two lse")]
    assert table(few)
    printed = capsys.readouterr().out
    assert "base two lse" in printed and "15 of 15 broken results rejected" in printed
    assert "2 of 2 defects seen; 99 of 99 correct results accepted" in printed


def test_a_defect_that_nobody_sees_fails_the_table(capsys):
    right = replace(catalog()[0], name="no defect at all", implementation=Blocked)
    assert not table([right])
    assert "0 of 1 defects seen" in capsys.readouterr().out
