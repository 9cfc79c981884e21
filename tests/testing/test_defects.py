"""The acceptance rule has teeth: it rejects seeded defects and accepts the correct peer."""

import pytest

from openmla.testing.blocked import Blocked
from openmla.testing.cases import build, random_case
from openmla.testing.compare import judge
from openmla.testing.defects import catalog, judge_correct, judge_defect
from openmla.testing.showcases import defect

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


@pytest.mark.parametrize("seed", range(30_000, 30_040))
def test_the_correct_implementation_is_accepted_on_random_cases(seed):
    built = build(random_case(seed))
    verdict = judge(built, Blocked(built).run())
    assert verdict.ok, f"{built.case}\n{verdict.report()}"


def test_an_unknown_showcase_is_refused():
    with pytest.raises(ValueError, match="unknown showcases"):
        defect("nothing", "no such showcase")
